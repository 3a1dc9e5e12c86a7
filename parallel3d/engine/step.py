"""Execution of one batch by its schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from parallel3d.autograd.fp8 import Fp8
from parallel3d.autograd.split_backward import make_splittable
from parallel3d.comm.collectives import all_gather_object, all_reduce
from parallel3d.comm.transport import Transport
from parallel3d.config import Config
from parallel3d.engine.attention import attention_context
from parallel3d.engine.calls import StepProgress
from parallel3d.engine.fp8 import check_device, gather_in_fp8, linears_of, use_fp8
from parallel3d.engine.loss import LossShare, countable
from parallel3d.engine.reports import Reports
from parallel3d.engine.update import WeightUpdate
from parallel3d.errors import ConfigError
from parallel3d.monitor.memory import RunMemory
from parallel3d.optim.precision import Precision
from parallel3d.pipe.blocks import BlockUnits
from parallel3d.pipe.cuda_graphs import CudaGraphs, check_cuda_graphs
from parallel3d.pipe.executor import Batch, BatchResult, Executor
from parallel3d.pipe.graphed_executor import GraphedExecutor
from parallel3d.pipe.messages import Messages
from parallel3d.pipe.module import PipelineModule
from parallel3d.pipe.programs import FreedMemory, Programs
from parallel3d.pipe.single_stage import SingleStageModule
from parallel3d.pipe.units import LayerUnits
from parallel3d.rng import EnterLayer, RandomStreams
from parallel3d.schedule.instructions import Op
from parallel3d.schedule.lifetimes import ChunkUses, Lifetimes, LiveLimits
from parallel3d.zero.policy import ZeroPolicy, live_limits, usual_live, within
from parallel3d.zero.weights import Units


class _Rank(NamedTuple):
    """Facts of a rank that others need. most_live: elements of weights that may be gathered at a time on its device."""

    seed: int
    num_buckets: Mapping[tuple[int, ...], int]
    units: Mapping[int, int]  # sharded weights and their sizes
    uses: Mapping[int, ChunkUses]
    most_live: int


class BatchRunner:
    """Runs batches by the schedule, with the layers' random streams and the configured attention kernels.

    - attention: makes contexts in which the configured kernels compute attention.
    - blocks: with ZeRO-3, the units of a module that is not a pipeline; else None.
    - on_loss: called with the loss of each micro-batch, if given.
    - fp8: keeps casts of weights to fp8 while these don't change.

    Collective: every rank makes it and calls its methods at the same points.
    """

    def __init__(
        self,
        model: PipelineModule,
        config: Config,
        update: WeightUpdate,
        precision: Precision,
        progress: StepProgress,
        reports: Reports,
        on_loss: Callable[[Tensor], None] | None,
        transport: Transport | None,
    ):
        self._model, self._groups, self._progress, self._reports = model, model.groups, progress, reports
        self._config, self._update, self.fp8 = config, update, Fp8(config.fp8)
        self.attention = attention_context(config.attention.backend, model.device)
        whole = isinstance(model, SingleStageModule)
        layers = None if update.units is None or whole else LayerUnits(model, update.units)
        sizes, uses = update.units.sizes if update.units else {}, layers.uses if layers else {}
        most_live = usual_live(update.policy, model.device)
        own = _Rank(torch.initial_seed(), update.reducer.num_buckets(), sizes, uses, most_live)
        everyone: list[_Rank] = all_gather_object(own, model.groups.control)
        # Rank 0's seed is used, so that a script which seeds each rank differently draws the same numbers in every layout.
        self.streams = RandomStreams((config.seed, everyone[0].seed), model.device, model.groups.own_streams)
        # Only of this rank's pipeline: other tensor-parallel ranks may have parameters of other sizes, and so other numbers.
        pipeline = [everyone[rank] for rank in model.groups.pipe.ranks]
        num_buckets = {owners: n for rank in pipeline for owners, n in rank.num_buckets.items()}
        partitioned = update.policy.stage > 0 and model.groups.data.size > 1
        possible = live_limits(config.zero_optimization, [rank.units for rank in pipeline])
        limits = within(possible, min(rank.most_live for rank in everyone))
        lifetimes: Lifetimes | None = None
        self.blocks: BlockUnits | None = None
        if layers is not None:
            model.use_units(layers)
            lifetimes = _lifetimes(pipeline, limits)
        elif whole and update.policy.stage == 3:
            replicas = model.groups.build(model.groups.topology.get_axis_comm_lists("data"), backend="gloo")
            self.blocks = BlockUnits(model.layers["0"], update.units or Units({}), limits, replicas)
            vars(update.optimizer)["parameter_offload"] = self.blocks  # DeepSpeed's name
        units = layers or self.blocks
        self.programs = Programs(
            model, config.pipeline, num_buckets, partitioned, update.policy.reduce_per_micro_batch, lifetimes
        )
        offload = update.policy.weight_offload if layers is not None and RunMemory.can_measure(model.device) else None
        self._freed = FreedMemory(layers, self.programs, model) if layers and offload and offload.fills else None
        transport = transport or Transport(model.groups, config.pipeline.peer_copies)
        dynamic = config.pipeline.shapes == "dynamic" or model.dynamic_shape
        self._messages = Messages(transport, model.device, dynamic)
        self._units = units
        self._executor = _executor_kind(config, model, update.policy, self.fp8)(
            model, self._messages, update.reducer, update.sharded.gather, precision, on_loss, units
        )

    @property
    def can_capture(self) -> bool:
        """Whether compute instructions may be captured as CUDA graphs."""
        return isinstance(self._executor, GraphedExecutor)

    def forget_graphs(self) -> None:
        """Drop the CUDA graphs, which read and write state where it is now; they are captured anew."""
        if isinstance(self._executor, GraphedExecutor):
            self._executor.forget()

    @cached_property
    def _modules(self) -> list[nn.Module]:
        return list(self._model.modules())  # cached: finding them takes 0.5 ms of each step of a small model

    def _graphed(self) -> bool:
        by_plan, plan = self._config.cuda_graphs == "auto", self.programs.plan
        return self.can_capture and (not by_plan or (plan is not None and plan.captures))

    def split_backwards(self, num_micro_batches: int) -> None:
        """Let layers defer or fuse weight gradients, if the schedule or the precision needs it, and run in fp8.

        Raises ConfigError for a schedule that can't run these micro-batches, and as use_fp8 does. Collective.
        """
        program = self.programs.get(num_micro_batches, training=True)
        splits = any(i.op is Op.BACKWARD_WEIGHT for i in program.instructions[self._model.stage_id])
        fused_from = 0 if splits else self._update.policy.fused_from
        if fused_from is not None:
            make_splittable(self._model, self._update.reducer.sink, fused_from)
        if self.fp8.config.enabled:
            check_device(self._model.device)
            linears = linears_of(self._model)
            use_fp8(linears, self.fp8, self._update.reducer.sink, self._groups.control)
            gather_in_fp8(self.fp8, linears, self._groups)

    def next_stream(self) -> EnterLayer:
        """Return the random stream of the forward that the script calls next: several of a micro-batch draw other numbers."""
        return self._stream(self._progress.num_backwards, self._progress.begin_forward())

    def _stream(self, micro_batch: int, forward: int = 0) -> EnterLayer:
        """Return the random stream of a forward of one of this replica's micro-batches in the current step."""
        number = micro_batch * self._groups.data.size + self._groups.coordinate("data")
        return self.streams.of(self._progress.global_steps, number, forward)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Run forwards in this context with the configured attention kernels; restore the random generators at its end."""
        with self.streams.kept(), self.attending():
            yield

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Run calls in this context with the configured attention kernels; release sharded weights at its end."""
        try:
            with self.attention():
                yield
        except BaseException:
            if self._units is not None:
                with suppress(Exception):  # a gather that fails because a peer is gone would hide the error
                    self._units.abort()
            raise
        if self._units is not None:
            self._units.abort()

    def run(
        self,
        loaded: tuple[list[tuple[Any, Any]], list[int]],
        training: bool,
        keep_outputs: bool = False,
        compute_loss: bool = True,
    ) -> tuple[Batch, BatchResult]:
        """Run a batch. loaded: its micro-batches and signatures, as TrainingData.next returns them."""
        micro_batches, signatures = loaded
        if training and not all(module.training for module in self._modules):
            self._model.train()
        weight = 1.0 / (len(signatures) * self._groups.data.size)
        streams = [self._stream(m) for m in range(len(signatures))] if training else []
        scale = self._update.loss_scale
        batch = Batch(micro_batches, signatures, training, weight, scale, keep_outputs, compute_loss, streams)
        monitor = self._reports.monitor
        if training and "memory" not in monitor.profiles and not monitor.counts_flops():
            graphed = self._graphed()
            batch = replace(batch, replays=graphed, captures=graphed and not monitor.profiles)
        program, owners = self.programs.get(len(signatures), training), self.programs.replica_owners
        freed = self._freed if training and "memory" not in self._reports.monitor.profiles else None
        if freed is not None:
            program = freed.program_for(program, signatures)
        with (
            self.calling(),
            self.fp8.keeping(),
            self._reports.recording(program, batch, self._messages) as (record, wait),
        ):
            result = self._executor.run(program, owners, batch, record, wait)
            if freed is not None:
                freed.after()
            return batch, result

    def output_of(self, inputs: Any, signature: int) -> Any:
        """Return the last layer's output for one micro-batch, in evaluation; None on ranks of other stages."""
        _, result = self.run(([(inputs, None)], [signature]), False, keep_outputs=True, compute_loss=False)
        return result.outputs.get(0)

    def share(self, batch: Batch, result: BatchResult) -> LossShare:
        """Return this rank's part of the batch's loss."""
        losses, counts = list(result.losses.values()), list(result.counts.values())
        return LossShare.of(losses, counts, self._groups, self._model.device, batch.loss_weight)

    def average_loss(self, batch: Batch, result: BatchResult) -> Tensor:
        """Return the mean loss over micro-batches and replicas, on every rank."""
        own = self.share(batch, result)
        both = torch.stack([own.total, own.count])
        all_reduce(both, self._groups.world).wait()
        return (both[0] / countable(both[1])).to(torch.get_default_dtype())

    def all_losses(self, batch: Batch, result: BatchResult) -> Sequence[Tensor]:
        """Return the loss of each of this replica's micro-batches, on every rank of its pipeline."""
        losses = torch.zeros(len(batch.signatures), dtype=torch.float64, device=self._model.device)
        for m, loss in result.losses.items():
            losses[m] = loss.double() / countable(result.counts[m].double()) if m in result.counts else loss
        all_reduce(losses, self._groups.pipe).wait()
        return list(losses.to(torch.get_default_dtype()).unbind())


@contextmanager
def evaluating(model: PipelineModule) -> Iterator[None]:
    """Set a model to evaluation mode, and restore each module's mode after the block."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _executor_kind(config: Config, model: PipelineModule, policy: ZeroPolicy, fp8: Fp8) -> Callable[..., Executor]:
    measured = config.cuda_graphs == "auto"
    # Graphs that hold collectives are made only where the user asks for them.
    if not config.cuda_graphs or (measured and model.groups.model.size > 1):
        return Executor
    try:
        check_cuda_graphs(config, model, policy)
        return partial(GraphedExecutor, CudaGraphs(model.device, model.groups.own_streams), fp8.cast_weights)
    except ConfigError:
        if measured:
            return Executor
        raise


def _lifetimes(pipeline: Sequence[_Rank], limits: LiveLimits) -> Lifetimes:
    """Return the lifetimes of the sharded weights of all stages."""
    sizes = {unit: size for rank in pipeline for unit, size in rank.units.items()}
    uses = {chunk: its for rank in pipeline for chunk, its in rank.uses.items()}
    return Lifetimes([uses[chunk] for chunk in sorted(uses)], sizes, limits)
