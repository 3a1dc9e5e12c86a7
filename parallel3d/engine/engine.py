"""The engine: wires module, schedule, data and optimizer into train_batch and eval_batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from parallel3d.checkpointing import Checkpointer
from parallel3d.comm.collectives import all_gather_integers, all_gather_object, all_reduce
from parallel3d.comm.environment import get_local_rank
from parallel3d.comm.groups import PipelineParallelGrid
from parallel3d.comm.transport import DistributedTransport, Transport
from parallel3d.config import BatchSizes, Config
from parallel3d.data import MicroBatchSource
from parallel3d.errors import ConfigError, DataError
from parallel3d.monitor.breakdown import Breakdown
from parallel3d.monitor.memory import MemoryProfile, MemoryRecorder
from parallel3d.monitor.report import memory_table
from parallel3d.monitor.state import print_tree, state_tree
from parallel3d.monitor.steps import StepMonitor, StepSummary
from parallel3d.parameters import ParameterInfo
from parallel3d.pipe.agreement import agree
from parallel3d.pipe.executor import Batch, BatchResult, Executor, no_record
from parallel3d.pipe.messages import Messages
from parallel3d.pipe.module import PipelineModule
from parallel3d.pipe.programs import Programs
from parallel3d.schedule.instructions import Op, Program
from parallel3d.schedule.simulate import Timeline
from parallel3d.zero.memory import StateBytes, moments_of, predict_state
from parallel3d.zero.optimizer import ShardedOptimizer, TouchedParameters
from parallel3d.zero.policy import make_policy
from parallel3d.zero.reducer import GradientReducer, check_precision


class Engine:
    """Trains a PipelineModule. Made by `initialize`; every rank calls its methods at the same places.

    global_steps: optimizer steps taken; global_samples: samples trained on, over all replicas.
    """

    def __init__(
        self,
        module: PipelineModule,
        config: Config,
        batch_sizes: BatchSizes,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Any = None,
        data_iterator: Iterator[Any] | None = None,
        transport: Transport | None = None,
    ):
        self.module = module
        self.config = config
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.grid = PipelineParallelGrid(module.groups)
        self.global_steps = 0
        self.global_samples = 0
        self._batch_sizes = batch_sizes
        self._groups = module.groups
        self._source = MicroBatchSource()
        self._data_iterator = data_iterator
        self._grad_norm: Tensor | None = None
        self._memory_next = False
        self._memory_profile: MemoryProfile | None = None
        self._monitor = StepMonitor(config, module.groups, module.device)
        self._checkpointer = Checkpointer(config.activation_checkpointing)
        module.use_checkpointer(self._checkpointer)
        self._set_up_zero(module.parameter_infos())
        self._set_up_pipeline(transport or DistributedTransport(self._groups))
        # A schedule that can't run is an error now, not at the first batch.
        self._programs.get(batch_sizes.num_micro_batches, training=True)
        if config.dump_state:
            self._dump_state()

    def _set_up_zero(self, infos: list[ParameterInfo]) -> None:
        """Flat buckets for the parameters, which may move there, and the optimizer on this rank's part of them."""
        module, groups, config = self.module, self._groups, self.config
        mine = make_policy(config, infos, module.device)
        # One rank that runs short of memory decides for all: the program is one.
        anywhere = any(row[0] for row in all_gather_integers([int(mine.reduce_per_micro_batch)], groups.control))
        self._policy = replace(mine, reduce_per_micro_batch=anywhere)
        check_precision(infos, self._policy)
        self._reducer = GradientReducer(infos, self._policy, groups.rank, groups.data, module.replica_groups)
        if self._policy.weight_dtype is not None:
            module.to(self._policy.weight_dtype)
        self._sharded = ShardedOptimizer(
            self.optimizer, self._reducer.all_buckets(), module.parameters(), config.zero_allow_untested_optimizer
        )
        names = all_gather_object([info.name for info in infos], groups.control)
        self._touched = TouchedParameters(infos, names, groups.control)
        module.wait_for_weights = self._sharded.wait_for_module

    def _set_up_pipeline(self, transport: Transport) -> None:
        module, config = self.module, self.config
        num_buckets: dict[tuple[int, ...], int] = {}
        for theirs in all_gather_object(self._reducer.num_buckets(), self._groups.control):
            num_buckets.update(theirs)
        partitioned = self._policy.stage > 0 and self._groups.data.size > 1
        self._programs = Programs(
            module, config.pipeline, num_buckets, partitioned, self._policy.reduce_per_micro_batch
        )
        messages = Messages(transport, module.device, dynamic=config.pipeline.shapes == "dynamic")
        self._executor = Executor(module, messages, self._reducer, self._sharded.gather, self._policy.weight_dtype)
        # A schedule that can't run is an error now, not at the first batch.
        program = self._programs.get(self._batch_sizes.num_micro_batches, training=True)
        splits = any(i.op is Op.BACKWARD_WEIGHT for i in program.instructions[module.stage_id])
        if splits or self._policy.weight_dtype is not None:
            self._reducer.split_backward(module)

    # Training and evaluation

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One optimizer step on gradient_accumulation_steps micro-batches, fewer where the iterators end.

        data_iter yields (inputs, labels); ranks that hold neither the first nor the last chunk may pass None, and the
        iterator of `training_data` or `set_dataiterator` stands in for None. Returns the mean loss over micro-batches
        and replicas, the same on every rank, on the device and without waiting for it. Raises StopIteration on all
        ranks when no micro-batch is left, DataError on all when one can't load, ExecutionError.
        """
        iterator = data_iter if data_iter is not None else self._data_iterator
        self._monitor.begin(self.global_steps + 1, self.global_samples)
        batch = self._next_batch(iterator, self._batch_sizes.num_micro_batches, training=True)
        self.module.train()
        self._reducer.start_step()
        result = self._run(batch)
        self._monitor.computed()
        self._reducer.finish_step()
        self._monitor.reduced()
        loss = self._reduce_loss_and_norm(result, batch)
        if self._memory_next and self._memory_profile is not None:
            with self._memory_profile.step.running():
                self._step()
        else:
            self._step()
        self._memory_next = False
        self.global_steps += 1
        self.global_samples += len(batch.signatures) * self.train_micro_batch_size_per_gpu() * self._groups.data.size
        self._report(loss)
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
        modes = [(module, module.training) for module in self.module.modules()]
        self.module.eval()
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
        micro_batches: list[Any] | None = None
        error: Exception | None = None
        if self.is_first_stage() or self.is_last_stage():
            try:
                micro_batches = self._load(iterator, most)
            except Exception as raised:
                error = raised
        try:
            signatures = agree(micro_batches, error is not None, most, self._groups, self.module.placement[0])
        except DataError:
            if micro_batches is not None and iterator is not None:
                self._source.give_back(iterator, micro_batches)
            if error is not None:
                raise error from None
            raise
        if micro_batches is not None and iterator is not None:
            self._source.give_back(iterator, micro_batches[len(signatures) :])
        if not signatures:
            raise StopIteration("the data iterators have no micro-batch left")
        weight = 1.0 / (len(signatures) * self._groups.data.size)
        return Batch(micro_batches or (), signatures, training, weight, keep_outputs, compute_loss)

    def _load(self, iterator: Iterator[Any] | None, most: int) -> list[Any]:
        if iterator is None:
            raise DataError(
                f"rank {self._groups.rank} holds the first or last chunk and needs data: pass data_iter (to train: or give "
                "training_data to initialize)"
            )
        micro_batches = self._source.take(iterator, most)
        for micro_batch in micro_batches:
            if not isinstance(micro_batch, (tuple, list)) or len(micro_batch) != 2:
                raise DataError(
                    f"a micro-batch must be (inputs, labels), not {type(micro_batch).__name__}; several inputs or labels "
                    "go in a tuple or dict of their own"
                )
        return micro_batches

    def _run(self, batch: Batch) -> BatchResult:
        program = self._programs.get(len(batch.signatures), batch.training)
        owners = self._programs.replica_owners
        if batch.training and self._memory_next:
            memory = MemoryRecorder(self.module.device)
            with memory.running():
                result = self._executor.run(program, owners, batch, memory, no_record)
            self._memory_profile = MemoryProfile(program, memory, MemoryRecorder(self.module.device))
            return result
        recorder = self._monitor.recorder_of(program) if batch.training else None
        record, wait = (recorder.running, recorder.waiting) if recorder is not None else (no_record, no_record)
        return self._executor.run(program, owners, batch, record, wait)

    def _own_loss(self, result: BatchResult, batch: Batch) -> Tensor:
        """This rank's share of the mean loss: 0 but on the last chunk's ranks."""
        zero = torch.zeros((), dtype=torch.float64, device=self.module.device)
        return sum((loss.double().reshape(()) for loss in result.losses.values()), zero) * batch.loss_weight

    def _average_loss(self, result: BatchResult, batch: Batch) -> Tensor:
        loss = self._own_loss(result, batch)
        all_reduce(loss, self._groups.world).wait()
        return loss.to(torch.get_default_dtype())

    def _all_losses(self, result: BatchResult, batch: Batch) -> list[Tensor]:
        losses = torch.zeros(len(batch.signatures), dtype=torch.float64, device=self.module.device)
        for m, loss in result.losses.items():
            losses[m] = loss
        all_reduce(losses, self._groups.pipe).wait()
        return list(losses.to(torch.get_default_dtype()).unbind())

    @torch.no_grad()
    def _reduce_loss_and_norm(self, result: BatchResult, batch: Batch) -> Tensor:
        """One all-reduce for both: the loss is the last chunks', each parameter counts once in the norm."""

        def counts(owners: tuple[int, ...]) -> bool:
            return self.module.placement[owners[0]] == self.module.stage_id

        norm_squared = self._reducer.norm_squared(counts)
        scalars = torch.stack([self._own_loss(result, batch), norm_squared.to(self.module.device)])
        all_reduce(scalars, self._groups.world).wait()
        self._grad_norm = scalars[1].sqrt()
        return scalars[0].to(torch.get_default_dtype())

    @torch.no_grad()
    def _step(self) -> None:
        limit = self.config.gradient_clipping
        if limit > 0 and self._grad_norm is not None:
            self._reducer.scale((limit / (self._grad_norm + 1e-6)).clamp(max=1.0))
        self._sharded.step(self._touched.untouched(self._reducer.touched()))
        self._sharded.gather()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()

    # What a run says of itself

    def _report(self, loss: Tensor) -> None:
        groups = self.optimizer.param_groups
        momentum = [g.get("betas", g.get("momentum")) for g in groups if "betas" in g or "momentum" in g]
        self._monitor.finish(
            StepSummary(self.global_steps, self.global_samples, loss, self._grad_norm, self.get_lr(), momentum)
        )
        if not self._monitor.prints(self.global_steps):
            return
        if self.config.memory_breakdown:
            self.memory_report()
        if self.config.activation_checkpointing.profile and self._groups.rank == 0:
            print(f"activation checkpointing on rank 0: {self._checkpointer.times()}", flush=True)

    def _dump_state(self) -> None:
        """Print, on rank 0, what is in force and what it was made into. Collective."""
        own = {owners: [b.numel for b in buckets] for owners, buckets in self._reducer.buckets.items()}
        buckets = all_gather_object(own, self._groups.control)
        if self._groups.rank == 0:
            shards = self._groups.data.size if self._policy.stage > 0 else 1
            program = self._programs.get(self._batch_sizes.num_micro_batches, training=True)
            sizes, topology, partition = self._batch_sizes, self.module.topology(), self.module.partition_table()
            print_tree(state_tree(self.config, sizes, topology, partition, buckets, shards, program))

    def profile_next_batch(self, what: Literal["time", "memory"] = "time") -> None:
        """Record of the next train_batch when each instruction runs, or what each holds of memory.

        See `timeline` and `time_breakdown`, or `memory_report`.
        """
        if what == "memory":
            self._memory_next = True
        else:
            self._monitor.record_next()

    def timeline(self) -> tuple[Program, Timeline]:
        """The program of the last recorded batch and its measured timeline, of this rank's pipeline, in seconds.

        Recorded are the batch after profile_next_batch and, with wall_clock_breakdown, those that print. Collective over
        all ranks. Raises ConfigError when none was.
        """
        program, records = self._monitor.records()
        spans = [span for rank in self._groups.pipe.ranks for span in records[rank].spans]
        return program, Timeline.of(spans, self.module.num_stages)

    def time_breakdown(self) -> list[Breakdown]:
        """Where the time of the last recorded batch (see `timeline`) went, in seconds, of every rank.

        Collective over all ranks. Raises ConfigError when none was recorded.
        """
        return self._monitor.breakdown()

    def memory_report(self) -> list[dict[str, tuple[int, int]]]:
        """What every rank holds, (predicted, measured) bytes by component and by phase; rank 0 prints it as a table.

        Components: weights, gradients, masters, optimizer (from the first step on), transient (gradient buffers, from the
        first backward on), update (gradients in the masters' dtype). Phases: steady, between batches; backward; step,
        while the optimizer runs. After a batch that `profile_next_batch("memory")` asked for also activations, of all
        micro-batches in flight with the messages between stages, counted in backward; and what the layers' and the
        optimizer's operations need for themselves is measured (not predicted) in backward and step.
        Collective over all ranks.
        """
        measured = replace(self._reducer.state_bytes(), optimizer=self._sharded.state_bytes())
        moments = moments_of(self.optimizer)
        predicted = predict_state(self.module.parameter_infos(), self._policy, self._groups.data.size, moments or 0)
        if moments is None:
            predicted = replace(predicted, optimizer=measured.optimizer)
        activations, workspace, update = (0, 0), 0, measured.update
        if self._memory_profile is not None:
            activations = self._memory_profile.activations(self.module.stage_id)
            workspace, update = self._memory_profile.batch.peak, self._memory_profile.step.peak
        own = {f.name: (getattr(predicted, f.name), getattr(measured, f.name)) for f in fields(StateBytes)}
        own["update"] = (predicted.update, update)
        own["activations"] = activations
        own["steady"] = (predicted.steady, measured.steady)
        own["backward"] = (predicted.backward + activations[0], measured.backward + workspace)
        own["step"] = (predicted.step, measured.steady + measured.transient + update)
        everyone = all_gather_object(own, self._groups.control)
        if self._groups.rank == 0:
            print(memory_table(everyone), flush=True)
        return everyone

    # What scripts ask for

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Take micro-batches from `iterator` when train_batch gets none."""
        self._data_iterator = iterator

    def is_first_stage(self) -> bool:
        """Whether this rank holds the first chunk, and so needs inputs."""
        return self.module.placement[0] == self.module.stage_id

    def is_last_stage(self) -> bool:
        """Whether this rank holds the last chunk, and so needs labels and has the loss and the logits."""
        return self.module.placement[-1] == self.module.stage_id

    def get_global_grad_norm(self) -> Tensor | None:
        """2-norm of the last step's gradient before clipping, of the whole model; a scalar on the device, the same on all."""
        return self._grad_norm

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def train_batch_size(self) -> int:
        """Samples of one step, over all replicas."""
        return self._batch_sizes.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one micro-batch of one replica."""
        return self._batch_sizes.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one step of one replica."""
        return self._batch_sizes.num_micro_batches

    @property
    def global_rank(self) -> int:
        """This process's rank in the world."""
        return self._groups.rank

    @property
    def local_rank(self) -> int:
        """This process's rank on its host."""
        return get_local_rank()

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.module.device
