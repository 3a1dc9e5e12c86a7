"""The engine: wires module, schedule, data and optimizer into steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.activity import EVALUATES, STEADY, Phase
from parallel3d.autograd.recomputation import Checkpointer
from parallel3d.comm.collectives import all_gather_object, all_reduce
from parallel3d.comm.groups import PipelineParallelGrid
from parallel3d.comm.transport import DistributedTransport, Transport
from parallel3d.config import BatchSizes, Config
from parallel3d.engine.answers import Answers
from parallel3d.engine.attention import attention_context
from parallel3d.engine.attributed import Attributed, attributed
from parallel3d.engine.calls import StepByCalls, check_metrics
from parallel3d.engine.compiling import Compiling
from parallel3d.engine.feeding import Feeding
from parallel3d.engine.garbage import Standing
from parallel3d.engine.planning import AutoSchedule
from parallel3d.engine.recording import Recording
from parallel3d.engine.report import dump_state
from parallel3d.engine.saving import Saving
from parallel3d.engine.update import LossShare, WeightUpdate, countable
from parallel3d.errors import ConfigError
from parallel3d.failures.attribution import Attribution
from parallel3d.kernels.slices import open_slices
from parallel3d.monitor.memory import MemoryProfile, MemoryRecorder
from parallel3d.monitor.steps import StepMonitor, StepSummary
from parallel3d.optim.precision import make_precision
from parallel3d.pipe.batch import BatchLoader
from parallel3d.pipe.executor import Batch, BatchResult, Executor, both, no_record
from parallel3d.pipe.messages import Messages
from parallel3d.pipe.module import PipelineModule, SingleStageModule
from parallel3d.pipe.numerics import NumericsCheck
from parallel3d.pipe.programs import Programs
from parallel3d.rng import EnterLayer, RandomStreams, same_stream
from parallel3d.schedule.instructions import Op, Program
from parallel3d.schedule.plan import Plan


class Engine(Answers, Attributed, Feeding, Recording, Saving, Compiling):
    """Trains a model. Made by `initialize`; every rank calls its methods at the same places.

    By train_batch in any layout; a model that is whole on every rank also by `loss = engine(inputs)`,
    `engine.backward(loss)` and `engine.step()` for each micro-batch. What it has no attribute for, it asks the module.
    global_steps: steps taken, skipped ones included; global_samples: samples trained on, over all replicas.
    """

    def __init__(
        self,
        model: PipelineModule,
        config: Config,
        batch_sizes: BatchSizes,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Any = None,
        data_iterator: Iterator[Any] | None = None,
        transport: Transport | None = None,
    ):
        self.module: nn.Module = model.model if isinstance(model, SingleStageModule) else model
        self.config = config
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.grid = PipelineParallelGrid(model.groups)
        self.global_steps = 0
        self.global_samples = 0
        self._model = model
        self._batch_sizes = batch_sizes
        self._groups = model.groups
        self._loader = BatchLoader(model)
        self._data_iterator = data_iterator
        self._step_applied = False
        self._memory_next = False
        self._memory_profile: MemoryProfile | None = None
        self._attention = attention_context(config.attention.backend, model.device)
        self._monitor = StepMonitor(config, model.groups, model.device)
        self._checkpointer = Checkpointer(config.activation_checkpointing)
        model.use_checkpointer(self._checkpointer)
        self._precision = make_precision(config)
        numerics = None
        if config.check_numerics:
            check_gradients = not self._precision.checks_overflow
            numerics = NumericsCheck(model, check_gradients, lambda: self._calls.num_backwards)
        self._on_loss = numerics.loss if numerics is not None else None
        on_value = numerics.gradient if numerics is not None and numerics.checks_gradients else None
        self._update = WeightUpdate(model, optimizer, config, self._precision, self._monitor.launched, on_value)
        self._calls = StepByCalls(model, self.module, self._update, self._precision)
        # Of the first rank, so that scripts which seed each rank differently draw the same in every layout.
        torch_seed = all_gather_object(torch.initial_seed(), model.groups.control)[0]
        self._streams = RandomStreams((config.seed, torch_seed), model.device)
        open_slices(self._groups, model.device, config)
        self._standing = Standing(config.gc_freeze and model.device.type == "cuda")
        self._set_up_pipeline(transport or DistributedTransport(self._groups, config.pipeline.peer_copies))
        self._set_up_checkpoints()
        if config.compile.enabled:
            self.compile()
        self._attribution = Attribution(self, model.groups, config.failures, self._programs.weakly(), model.device)
        if numerics is not None:
            numerics.watch_layers()
            self._calls.look_at_loss = numerics.loss
        if config.dump_state:
            dump_state(self.config, self._batch_sizes, model, self._update, self._program())

    def _set_up_pipeline(self, transport: Transport) -> None:
        model, config, update = self._model, self.config, self._update
        everyone = all_gather_object(update.reducer.num_buckets(), self._groups.control)
        # Of this rank's pipeline: slices of unlike sizes may be cut in other numbers of buckets.
        num_buckets = {owners: n for rank in self._groups.pipe.ranks for owners, n in everyone[rank].items()}
        partitioned = update.policy.stage > 0 and self._groups.data.size > 1
        self._programs = Programs(
            model, config.pipeline, num_buckets, partitioned, update.policy.reduce_per_micro_batch
        )
        dynamic = config.pipeline.shapes == "dynamic" or model.dynamic_shape
        self._messages = Messages(transport, model.device, dynamic)
        self._executor = Executor(
            model, self._messages, update.reducer, update.sharded.gather, self._precision, self._on_loss
        )
        self._auto: AutoSchedule | None = None
        if config.pipeline.schedule == "auto":
            self._auto = AutoSchedule(model, self._programs, config.pipeline, self._monitor)
        # A schedule that can't run is an error now, not at the first batch.
        splits = any(i.op is Op.BACKWARD_WEIGHT for i in self._program().instructions[model.stage_id])
        if splits or update.policy.weight_dtype is not None:
            update.reducer.split_backward(model)

    def _program(self) -> Program:
        return self._programs.get(self._batch_sizes.num_micro_batches, training=True)

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("module")
        if module is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(module, name)

    # A step by train_batch

    @attributed(Phase.LOADING)
    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One optimizer step on gradient_accumulation_steps micro-batches, fewer where the iterators end.

        data_iter yields (inputs, labels); ranks that hold neither the first nor the last chunk may pass None, and the
        iterator of `training_data` or `set_dataiterator` stands in for None. Returns the mean loss over micro-batches
        and replicas, the same on every rank, on the device and without waiting for it. Raises StopIteration on all
        ranks when no micro-batch is left, DataError on all when one can't load, ExecutionError.
        """
        check_metrics(self.lr_scheduler, {})
        iterator = data_iter if data_iter is not None else self._data_iterator
        if self._auto is not None and (what := self._auto.wants()) is not None:
            self.profile_next_batch(what)
        self._monitor.begin(self.global_steps + 1, self.global_samples)
        batch = self._next_batch(iterator, self._batch_sizes.num_micro_batches, training=True)
        self._model.train()
        self._calls.restart()
        self._update.reducer.start_step()
        result = self._run(batch)
        loss = self._finish_step(self._share(result, batch), len(batch.signatures))
        if self._auto is not None and self._auto.plan is None:
            with self.unwatched():  # the first rank searches while the others wait
                self._auto.learn(len(batch.signatures), self._batch_sizes.num_micro_batches, self._memory_profile)
        return loss

    def _finish_step(self, own_loss: LossShare, num_micro_batches: int, **lr_kwargs: Any) -> Tensor:
        """From the last backward on.

        lr_kwargs: what the learning-rate schedule's `step` takes.
        """
        self._monitor.computed()
        self._groups.activity.enter(Phase.REDUCING)
        self._update.reducer.finish_step()
        self._monitor.reduced()
        loss = self._update.reduce_scalars(own_loss)
        self._groups.activity.enter(Phase.STEP)
        profile = self._memory_profile if self._memory_next else None
        with profile.step.running() if profile is not None else nullcontext():
            taken = self._update.step(self.global_steps + 1)
        self._memory_next = False
        self._step_applied = taken
        if self.module is not self._model:
            # The weights of a module that isn't ours are read at any place; on CUDA only the stream waits.
            self._update.sharded.wait_for_module(self._model)
        if taken and self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self.global_steps += 1
        self.global_samples += num_micro_batches * self._batch_sizes.micro_batch_size * self._groups.data.size
        self._report(loss)
        self._record_run()
        self._standing.after_step()
        self._groups.activity.slots[STEADY] = 1
        return loss

    @attributed(Phase.EVALUATING)
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
        """The loss of `num_micro_batches` (as in training by default) without training; nothing of training changes.

        data_iter: as in train_batch, but its own: nothing stands in for None, so that no training data is used up.
        reduce_output: "avg" over micro-batches and replicas, or None for the list of this replica's losses.
        bcast_loss: on every rank, else on those that hold the last chunk, None elsewhere. return_logits: (loss, logits),
        and logits alone without compute_loss: the list of the last layer's outputs, one a micro-batch, None on ranks
        without the last chunk. Raises as train_batch does.
        """
        if reduce_output not in ("avg", None):
            raise ConfigError(f"reduce_output is {reduce_output!r}; use 'avg', or None for one loss per micro-batch")
        most = self._batch_sizes.num_micro_batches if num_micro_batches is None else num_micro_batches
        if most < 1:
            raise ConfigError(f"num_micro_batches is {most}; evaluate at least 1")
        keep = return_logits or not compute_loss
        batch = self._next_batch(data_iter, most, training=False, keep_outputs=keep, compute_loss=compute_loss)
        modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        try:
            result = self._run(batch)
        finally:
            for module, mode in modes:
                module.training = mode
        logits = [result.outputs[m] for m in sorted(result.outputs)] if self.is_last_stage() else None
        if not compute_loss:
            return logits
        loss = self._average_loss(result, batch) if reduce_output else self._all_losses(result, batch)
        shown = loss if bcast_loss or self.is_last_stage() else None
        return (shown, logits) if return_logits else shown

    def _next_batch(
        self,
        iterator: Iterator[Any] | None,
        most: int,
        training: bool,
        keep_outputs: bool = False,
        compute_loss: bool = True,
    ) -> Batch:
        """Load this rank's micro-batches and agree with all others on how many there are."""
        micro_batches, signatures = self._loader.next(iterator, most)
        weight = 1.0 / (len(signatures) * self._groups.data.size)
        scale = self._update.loss_scale
        streams = [self._stream(m) for m in range(len(signatures))] if training else []
        return Batch(micro_batches, signatures, training, weight, scale, keep_outputs, compute_loss, streams)

    def _stream(self, micro_batch: int) -> EnterLayer:
        """Of this replica's micro-batches of the step under way."""
        number = micro_batch * self._groups.data.size + self._groups.coordinate("data")
        return self._streams.of(self.global_steps, number)

    def _run(self, batch: Batch) -> BatchResult:
        with self._streams.kept(), self._attention():
            return self._run_program(self._programs.get(len(batch.signatures), batch.training), batch)

    def _run_program(self, program: Program, batch: Batch) -> BatchResult:
        owners = self._programs.replica_owners
        recorder = self._monitor.recorder_of(program, batch.micro_batches[:1]) if batch.training else None
        record, wait = (recorder.running, recorder.waiting) if recorder is not None else (no_record, no_record)
        if not (batch.training and self._memory_next):
            return self._executor.run(program, owners, batch, record, wait)
        with self._messages.tracking() as in_transit:
            memory = MemoryRecorder(self._model.device, in_transit)
            with memory.running():
                result = self._executor.run(program, owners, batch, both(record, memory), wait)
        self._memory_profile = MemoryProfile(program, memory, MemoryRecorder(self._model.device))
        return result

    def _share(self, result: BatchResult, batch: Batch) -> LossShare:
        given = (result.losses.values(), result.counts.values())
        losses, counts = ([t.double() * batch.loss_weight for t in tensors] for tensors in given)
        return LossShare.of(losses, counts, self._groups, self._model.device)

    def _average_loss(self, result: BatchResult, batch: Batch) -> Tensor:
        own = self._share(result, batch)
        both = torch.stack([own.total, own.count])
        all_reduce(both, self._groups.world).wait()
        return (both[0] / countable(both[1])).to(torch.get_default_dtype())

    def _all_losses(self, result: BatchResult, batch: Batch) -> list[Tensor]:
        losses = torch.zeros(len(batch.signatures), dtype=torch.float64, device=self._model.device)
        for m, loss in result.losses.items():
            losses[m] = loss.double() / countable(result.counts[m].double()) if m in result.counts else loss
        all_reduce(losses, self._groups.pipe).wait()
        return list(losses.to(torch.get_default_dtype()).unbind())

    # A step by calls

    @attributed(Phase.CALL)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output for one micro-batch's inputs; floating-point ones are cast to the weights' dtype.

        Raises ConfigError for a model that is split over stages.
        """
        if self._calls.record is None and self._model.training and torch.is_grad_enabled():
            self._begin_calls()
        if not self._model.training:
            with self._attention():
                return self._calls.forward(args, kwargs, same_stream)
        with self._streams.kept(), self._attention():
            return self._calls.forward(args, kwargs, self._stream(self._calls.num_backwards))

    forward = __call__

    def _begin_calls(self) -> None:
        self._monitor.begin(self.global_steps + 1, self.global_samples)
        recorder = self._monitor.recorder_of(self._program())
        self._calls.record = recorder.running if recorder is not None else no_record

    @attributed(Phase.CALL)
    def backward(self, loss: Any, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Any:
        """Add the gradients of a micro-batch's loss, a tensor of one element, to the step's; returns the loss.

        The step takes their mean over gradient_accumulation_steps micro-batches and all replicas: don't divide the loss.
        scale_wrt_gas: False for their sum over micro-batches. retain_graph: as torch's. Of losses (sum, count) the step
        divides the sums' gradient by the count of all of them. After an exception the step begins anew, with the next
        micro-batch. Raises ExecutionError when the step's gradients are already reduced.
        """
        if self._calls.record is None:
            self._begin_calls()
        weight = 1.0 / ((self._batch_sizes.num_micro_batches if scale_wrt_gas else 1) * self._groups.data.size)
        with self._attention():  # of what is recomputed
            self._calls.backward(loss, weight, self.is_gradient_accumulation_boundary(), retain_graph)
        return loss

    @attributed(Phase.CALL)
    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """At an accumulation boundary, update the weights; between two, only count.

        lr_kwargs: for the learning-rate schedule's `step`, as {"metrics": loss} for ReduceLROnPlateau. Raises
        ExecutionError when there are no gradients that all replicas have reduced, ConfigError without metrics, PrecisionError.
        """
        self._step_applied = False
        boundary = self.is_gradient_accumulation_boundary()
        if boundary:
            check_metrics(self.lr_scheduler, lr_kwargs or {})
            num_micro_batches = self._calls.num_backwards
            self._finish_step(self._calls.finish(), num_micro_batches, **(lr_kwargs or {}))
        self._calls.advance(boundary)

    @property
    def schedule_plan(self) -> Plan | None:
        """What schedule "auto" runs, and what it was made of; None while it measures, and under other schedules."""
        return None if self._auto is None else self._auto.plan

    @property
    def micro_steps(self) -> int:
        """Calls of `step` so far, one a micro-batch."""
        return self._calls.micro_steps

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch under way is the last of its step."""
        return self._calls.is_boundary(self._batch_sizes.num_micro_batches)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say which micro-batches end a step, instead of counting gradient_accumulation_steps."""
        self._calls.set_boundary(is_boundary)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside add to this rank's gradients, but none is reduced over the replicas."""
        return self._calls.no_sync()

    def zero_grad(self) -> None:
        """Drop the gradients since the last step; after a step there is nothing to drop."""
        self._calls.forget()

    def train(self, mode: bool = True) -> Engine:
        """As torch's, for the module."""
        self._model.train(mode)
        self._groups.activity.slots[EVALUATES] = not mode
        return self

    def eval(self) -> Engine:
        """As torch's, for the module."""
        return self.train(False)

    # What a run says of itself

    def _report(self, loss: Tensor) -> None:
        self._report_compilation()
        groups = self.optimizer.param_groups
        momentum = [g.get("betas", g.get("momentum")) for g in groups if "betas" in g or "momentum" in g]
        self._monitor.finish(
            StepSummary(
                self.global_steps,
                self.global_samples,
                loss,
                self._update.grad_norm,
                self.get_lr(),
                momentum,
                self.skipped_steps,
            )
        )
        if not self._monitor.prints(self.global_steps):
            return
        if self.config.memory_breakdown:
            self.memory_report()
        if self.config.activation_checkpointing.profile and self._groups.rank == 0:
            print(f"activation checkpointing on rank 0: {self._checkpointer.times()}", flush=True)
