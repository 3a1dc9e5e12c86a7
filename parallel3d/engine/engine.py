"""The engine: composes module, schedule, data and optimizer into training steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.activity import EVALUATES, STEADY, Phase
from parallel3d.autograd.recomputation import Checkpointer
from parallel3d.comm.transport import Transport
from parallel3d.config import BatchSizes, Config
from parallel3d.engine.auto import AutoSchedule
from parallel3d.engine.calls import StepByCalls, StepProgress, check_metrics
from parallel3d.engine.compile import Compilation
from parallel3d.engine.flops import peak_of
from parallel3d.engine.fp8 import mark_gathers
from parallel3d.engine.garbage import GarbageFreezer
from parallel3d.engine.loss import LossShare
from parallel3d.engine.reports import Reports
from parallel3d.engine.state import Checkpoints, Location
from parallel3d.engine.step import BatchRunner, evaluating
from parallel3d.engine.update import WeightUpdate, idle_optimizer
from parallel3d.errors import ConfigError, ExecutionError, PeerError
from parallel3d.failures.attribution import Attribution
from parallel3d.failures.watchdog import follows
from parallel3d.kernels.all_reduce import open_tensor_parallel
from parallel3d.monitor.steps import StepMonitor
from parallel3d.optim.precision import make_precision
from parallel3d.pipe.batch import TrainingData
from parallel3d.pipe.executor import no_record
from parallel3d.pipe.module import PipelineModule
from parallel3d.pipe.numerics import NumericsCheck
from parallel3d.pipe.single_stage import SingleStageModule
from parallel3d.rng import same_stream
from parallel3d.schedule.auto import Plan

# Phases in which an exception on one rank leaves the others waiting. Earlier phases agree on errors; after a call by the
# script, the script may recover.
_TOGETHER = frozenset({Phase.PROGRAM, Phase.REDUCING, Phase.STEP, Phase.GENERATING})


class Engine:
    """Trains a model. `initialize` makes it; every rank calls its methods at the same points of its script.

    train_batch trains in any layout. A model that is whole on every rank can also be trained by `loss = engine(inputs)`,
    `engine.backward(loss)` and `engine.step()` for each micro-batch. Attributes that the engine lacks are read from the
    module.

    - module: the model, or the module that it wraps. config: the resolved configuration.
    - pipeline_module: the layers of this rank, also of a wrapped module. process_groups: this rank's.
    - optimizer, lr_scheduler: as given to `initialize`, or made from the configuration; None to evaluate only.
    - progress: counters of steps and samples, and the state of the current step.
    - data: the source of micro-batches, and the batch sizes.
    - update: gradients, master weights and optimizer.
    - reports: profiles, memory reports and run records.
    - checkpoints: saves and loads the state of the training.
    """

    def __init__(
        self,
        model: PipelineModule,
        config: Config,
        batch_sizes: BatchSizes,
        optimizer: torch.optim.Optimizer | None,
        lr_scheduler: Any = None,
        data_iterator: Iterator[Any] | None = None,
        transport: Transport | None = None,
    ):
        self.module: nn.Module = model.layers["0"] if isinstance(model, SingleStageModule) else model
        self.config, self.optimizer, self.lr_scheduler = config, optimizer, lr_scheduler
        self.pipeline_module, self.process_groups = model, model.groups
        self.progress = progress = StepProgress()
        self.data = TrainingData(model, batch_sizes, data_iterator)
        checkpointer = Checkpointer(config.activation_checkpointing, capture=lambda: model.groups.own_streams.capture)
        model.use_checkpointer(checkpointer)
        precision = make_precision(config)
        numerics = None
        if config.check_numerics:
            numerics = NumericsCheck(model, not precision.checks_overflow, lambda: progress.num_backwards)
        on_value = numerics.gradient if numerics is not None and numerics.checks_gradients else None
        monitor = StepMonitor(config, model.groups, model.device, peak_of(model.device))
        hooks = monitor.launched, on_value, lambda parameter: self._calls.begin_own(parameter)
        mark_gathers(model, config)
        self.update = WeightUpdate(model, optimizer or idle_optimizer(model), config, precision, *hooks)
        self.reports = Reports(model, config, checkpointer, monitor, self.update, self.data)
        on_loss = numerics.loss if numerics is not None else None
        open_tensor_parallel(self.process_groups, model.device, config)
        self._garbage = GarbageFreezer(config.gc_freeze and model.device.type == "cuda")
        self._runner = BatchRunner(model, config, self.update, precision, progress, self.reports, on_loss, transport)
        parts = model, self.module, self.update, precision, progress, self.data
        self._calls: StepByCalls = StepByCalls(*parts, self._runner.attending, on_loss, self._runner.fp8)
        measures = config.pipeline.schedule == "auto"
        self._auto = AutoSchedule(model, self._runner.programs, config.pipeline, monitor) if measures else None
        self._runner.split_backwards(batch_sizes.num_micro_batches)
        self.checkpoints = Checkpoints(model, config.checkpoint, self.update, progress, self.data, self._runner.streams)
        self.compilation = Compilation(model, config, self.update.reducer.sink, self._runner.blocks)
        if config.compile.enabled:
            self.compile()
        self._attribution = Attribution(self, model.groups, config.failures, self._runner.programs.get, model.device)
        if numerics is not None:
            numerics.watch_layers()
        if config.dump_state:
            self.reports.dump_state(self._runner.programs.get(batch_sizes.num_micro_batches, training=True))

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("module")
        if module is None or name.startswith("__") or not hasattr(module, name):
            raise AttributeError(f"neither the engine nor its module has {name!r}; after destroy() make a new engine")
        return getattr(module, name)

    @contextmanager
    def _attributing(self, phase: Phase) -> Iterator[None]:
        """Record `phase` as this process's activity, and attribute exceptions inside to a rank, see Attribution.failed.

        The activity recorded at an exception is kept, for scripts that don't catch it.
        """
        activity = self.process_groups.activity
        activity.note(None)
        activity.enter(phase)
        if phase is not Phase.CALL:  # for calls, engine.eval() sets it
            activity.slots[EVALUATES] = phase is Phase.EVALUATING
        try:
            yield
        except Exception as error:
            lost = follows(error) and not isinstance(error, PeerError)
            if lost or activity.phase_of(error) in _TOGETHER:
                self._attribution.failed(error)
            raise
        self._attribution.done()

    # A step by train_batch

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Run one optimizer step on gradient_accumulation_steps micro-batches, or fewer if the iterators end.

        data_iter yields (inputs, labels). Ranks that hold neither the first nor the last chunk may pass None. Instead of
        None, the iterator of `training_data` or `set_dataiterator` is used, if there is one.

        Returns the mean loss over micro-batches and replicas, the same on every rank, on the device and without waiting for
        it. Raises StopIteration on all ranks when no micro-batch is left, DataError on all ranks when one can't load its
        micro-batches, and ExecutionError, also between the micro-batches of a step by engine.backward.
        """
        with self._attributing(Phase.LOADING):
            check_metrics(self.lr_scheduler, {})
            self._check_trains()
            if done := self.progress.num_backwards:
                raise ExecutionError(
                    f"{done} micro-batches of a step are done by engine.backward; end it by engine.step(), or drop it by "
                    "engine.zero_grad(), before engine.train_batch"
                )
            auto, most = self._auto, self.data.sizes.num_micro_batches
            if auto is not None and (what := auto.wants()) is not None:
                self.reports.profile_next_batch(what)
            self.progress.restart()
            self.reports.monitor.begin(self.progress.global_steps + 1, self.progress.global_samples)
            loaded = self.data.next(data_iter if data_iter is not None else self.data.iterator, most)
            self.data.warn_of_sizes(loaded[0], len(loaded[1]))
            self.update.reducer.start_step()
            batch, result = self._runner.run(loaded, training=True)
            loss = self._finish_step(self._runner.share(batch, result), len(batch.signatures))
            if auto is not None and auto.plan is None:
                with self.unwatched():  # the first rank searches while the others wait
                    can_capture = self._runner.can_capture and not self.compilation.broke
                    auto.learn(len(batch.signatures), most, self.reports.memory, can_capture)
            return loss

    def _finish_step(self, own_loss: LossShare, num_micro_batches: int, **lr_kwargs: Any) -> Tensor:
        """Finish a step after its last backward, and return its loss. lr_kwargs: for the learning-rate schedule's `step`."""
        progress, monitor, groups = self.progress, self.reports.monitor, self.process_groups
        monitor.computed()
        groups.activity.enter(Phase.REDUCING)
        self.update.reducer.finish_step()
        monitor.reduced()
        loss = self.update.reduce_scalars(own_loss)
        groups.activity.enter(Phase.STEP)
        with self.reports.updating():
            applied = self.update.step(progress.global_steps + 1)
        if self.module is not self.pipeline_module:
            # A user's module may read its weights at any point. On CUDA only the stream waits.
            self.update.sharded.wait_for_module(self.pipeline_module)
        if applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        progress.finish_step(num_micro_batches * self.data.sizes.micro_batch_size * groups.data.size, applied)
        self.compilation.report()
        self.reports.after_step(progress, loss, records=self._auto is None or self._auto.plan is not None)
        self._garbage.after_step()
        groups.activity.slots[STEADY] = 1
        return loss

    @torch.no_grad()
    def eval_batch(
        self,
        data_iter: Iterator[Any] | None = None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Return the loss of micro-batches without training. The state of the training does not change.

        - data_iter: as in train_batch, except that no other iterator is used for None, so that no training data are lost.
        - return_logits: return (loss, logits). Logits are the list of the last layer's outputs, one for each micro-batch;
          None on ranks without the last chunk.
        - compute_loss: False to return only the logits.
        - reduce_output: "avg" over micro-batches and replicas, or None for the list of this replica's losses.
        - bcast_loss: return the loss on every rank; else only on those that hold the last chunk, and None elsewhere.
        - num_micro_batches: as in training by default.

        Raises as train_batch does.
        """
        with self._attributing(Phase.EVALUATING):
            if reduce_output not in ("avg", None):
                raise ConfigError(
                    f"reduce_output is {reduce_output!r}; use 'avg', or None for one loss per micro-batch"
                )
            self.update.parking.check("lp_params")
            most = self.data.sizes.num_micro_batches if num_micro_batches is None else num_micro_batches
            if most < 1:
                raise ConfigError(f"num_micro_batches is {most}; evaluate at least 1")
            loaded = self.data.next(data_iter, most)
            with evaluating(self.pipeline_module):
                batch, result = self._runner.run(loaded, False, return_logits or not compute_loss, compute_loss)
            is_last = self.pipeline_module.placement[-1] == self.pipeline_module.stage_id
            logits = [result.outputs[m] for m in sorted(result.outputs)] if is_last else None
            if not compute_loss:
                return logits
            average = self._runner.average_loss if reduce_output else self._runner.all_losses
            loss = average(batch, result)
            shown = loss if bcast_loss or is_last else None
            return (shown, logits) if return_logits else shown

    def _check_trains(self) -> None:
        if self.optimizer is None:
            raise ConfigError("no optimizer: set optimizer.type in the configuration, or pass one to initialize")
        self.update.parking.check()
        self.compilation.check_weights()
        self._calls.drop_unfinished()

    # A step by calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output for one micro-batch's inputs. Floating-point inputs are cast to the weights' dtype.

        Raises ConfigError for a model that is split over stages.
        """
        with self._attributing(Phase.CALL):
            if not self.pipeline_module.training or self.optimizer is None:
                with self._runner.attending():
                    return self._calls.forward(args, kwargs, same_stream)
            if torch.is_grad_enabled():
                self._begin_calls()
                self.reports.monitor.count_tokens((args, kwargs))
            with self._runner.calling():
                return self._calls.forward(args, kwargs, self._runner.next_stream())

    forward = __call__

    def _begin_calls(self) -> None:
        """Begin a step by calls, unless one has begun."""
        progress, monitor = self.progress, self.reports.monitor
        self._check_trains()
        if progress.record is None:
            monitor.begin(progress.global_steps + 1, progress.global_samples)
            recorder = monitor.recorder_of(self._runner.programs.get(self.data.sizes.num_micro_batches, training=True))
            progress.begin(self.reports.also(recorder.running if recorder is not None else no_record))

    def backward(self, loss: Any, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Any:
        """Add the gradients of a micro-batch's loss, a tensor of one element, to the step's gradients; return the loss.

        The step uses their mean over gradient_accumulation_steps micro-batches and all replicas: don't divide the loss. For
        losses (sum, count) it divides the gradient of all sums by the total count. After an exception the next micro-batch
        starts the step over.

        - retain_graph: as in torch.
        - scale_wrt_gas: False for the sum of the gradients over micro-batches.

        Raises ExecutionError when the step's gradients are already reduced.
        """
        with self._attributing(Phase.CALL):
            self._calls.check_whole()
            self._begin_calls()
            self._calls.backward(loss, retain_graph, scale_wrt_gas)
            return loss

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Update the weights at a gradient accumulation boundary; else only count the micro-batch.

        lr_kwargs: for the learning-rate schedule's `step`, such as {"metrics": loss} for ReduceLROnPlateau.

        Raises ExecutionError when there are no gradients, or they are not reduced over the replicas; ConfigError when a
        metric is missing; PrecisionError.
        """
        with self._attributing(Phase.CALL):
            self._calls.check_whole()
            self._begin_calls()
            boundary = self.is_gradient_accumulation_boundary()
            if boundary:
                check_metrics(self.lr_scheduler, lr_kwargs or {})
                self._finish_step(*self._calls.finish(), **(lr_kwargs or {}))
            self.progress.advance(boundary)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the current micro-batch is the last of its step."""
        return self.progress.is_boundary(self.data.sizes.num_micro_batches)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backwards add to this rank's gradients without reducing them over the replicas."""
        return self._calls.no_sync()

    def train(self, mode: bool = True) -> Engine:
        """Set the module to training mode, as in torch."""
        self.pipeline_module.train(mode)
        self.process_groups.activity.slots[EVALUATES] = not mode
        return self

    def eval(self) -> Engine:
        """Set the module to evaluation mode, as in torch."""
        return self.train(False)

    def unwatched(self) -> AbstractContextManager[None]:
        """Return a context in which failures.timeout_s doesn't apply: this rank may take any time while others wait for it."""
        return self.process_groups.activity.untimed(Phase.UNWATCHED)

    # Checkpoints and compilation

    def save_checkpoint(
        self,
        save_dir: Location,
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the whole state of the training as `<save_dir>/<tag>`; return True.

        - tag: `"global_step<n>"` by default. An existing checkpoint is replaced once all of the new one is on the disk.
        - client_state: rank 0's is saved. It may hold JSON values, tensors, numpy arrays, and lists, tuples and mappings of
          these.
        - save_latest: whether the file `latest` names this checkpoint.
        - exclude_frozen_parameters: leave out parameters that are not trained.

        With checkpoint.async_save it returns when the state is copied. Collective over all ranks. Raises CheckpointError on
        all ranks, with checkpoint.async_save also when the save before has failed; ConfigError for an empty save_dir.
        """
        self.checkpoints.save(save_dir, tag, client_state, save_latest, exclude_frozen_parameters, self.lr_scheduler)
        return True

    def load_checkpoint(
        self,
        load_dir: Location,
        tag: object = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        strict: bool | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint, saved in any layout, and return (path, client_state): training continues from there.

        - tag: by default the one that the file `latest` names; without that file, returns (None, None) with a warning.
        - load_module_strict: raise an error that lists tensors that are missing, extra or of another shape; False to load the
          others, with a warning. strict: another name for it.
        - load_optimizer_states, load_lr_scheduler_states: False to leave these as they are; rates go with the schedule.
        - load_module_only: load the weights and change nothing else.

        Raises CheckpointError on all ranks; a checkpoint that is found damaged changes nothing. Collective.
        """
        strict = load_module_strict if strict is None else strict
        trains = load_optimizer_states and not load_module_only and self.optimizer is not None
        schedule = self.lr_scheduler, load_lr_scheduler_states
        return self.checkpoints.load(load_dir, tag, trains, *schedule, load_module_only, strict)

    def resume(self, load_dir: Location) -> dict[str, Any] | None:
        """Continue from the newest complete checkpoint of a directory; return its client_state, or None where there is none.

        Call it once at the start of a script that may be restarted. The checkpoint that `latest` names comes first, then those
        saved as the latest, the newest first. Each one that is passed over because it is damaged, or of a newer version, gives
        a warning. Collective. Raises CheckpointError on all ranks where there are checkpoints and none can be loaded, as when
        they belong to another model.
        """
        return self.checkpoints.resume(load_dir, lambda tag: self.load_checkpoint(load_dir, tag)[1])

    def compile(self, backend: str | None = None, compile_kwargs: Mapping[str, Any] | None = None) -> None:
        """Compile the layers as the configuration's `compile` section says, enabled or not, and the loss.

        A loss with a method `compiled(backend=..., dynamic=...)`, such as CausalLMLoss, is compiled by that method; with
        tensor parallelism no other loss is compiled. backend, compile_kwargs: arguments of torch.compile that replace those
        of the configuration. Raises ConfigError.
        """
        self.compilation.compile({**({"backend": backend} if backend else {}), **(compile_kwargs or {})})

    @property
    def schedule_plan(self) -> Plan | None:
        """The plan that schedule "auto" runs; None while it measures, and with other schedules."""
        return None if self._auto is None else self._auto.plan
