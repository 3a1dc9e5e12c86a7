"""From a batch's gradients to new weights: reduction, norm, clipping, loss scale, optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from parallel3d.comm.collectives import Work, all_gather_integers, all_gather_object, all_reduce
from parallel3d.comm.groups import ProcessGroups
from parallel3d.config import Config
from parallel3d.errors import ConfigError
from parallel3d.optim.precision import LossScaler, Precision
from parallel3d.pipe.module import PipelineModule
from parallel3d.schedule.instructions import Instruction, Op
from parallel3d.zero.kernels import open_update_kernels
from parallel3d.zero.optimizer import ShardedOptimizer, StepAgreement
from parallel3d.zero.policy import make_policy
from parallel3d.zero.reducer import GradientReducer, check_precision

# Names of overflowed parameters that a message lists.
_MOST_NAMES = 3


@dataclass(frozen=True)
class LossShare:
    """This rank's part of a batch's loss, scalars in float64: 0 but on the last chunk's ranks, of which of those that slice
    one layer the first gives it for all.

    total / count, each summed over all ranks, is the mean loss. counted: whether the loss function counts, as tokens do;
    else the counts add up to 1.
    """

    total: Tensor
    count: Tensor
    counted: bool

    @staticmethod
    def of(
        losses: Sequence[Tensor], counts: Sequence[Tensor], groups: ProcessGroups, device: torch.device
    ) -> LossShare:
        """Of losses, and counts if there are any, each multiplied by the weight that its gradient had."""
        zero = torch.zeros((), dtype=torch.float64, device=device)
        if groups.coordinate("model") > 0:
            losses, counts = [], []
        total = sum((loss.double().reshape(()) for loss in losses), zero)
        if counts:
            return LossShare(total, sum(counts, zero), True)
        # A replica's share, however many losses it summed.
        return LossShare(total, torch.full_like(zero, 1.0 / groups.data.size if losses else 0.0), False)


def countable(count: Tensor) -> Tensor:
    """What to divide a sum by: of nothing, which is 0, it makes 0."""
    return count.clamp(min=torch.finfo(torch.float64).tiny)


def _cast(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Cast the weights to a half precision; not by `to`, which would drop the imaginary part of complex buffers."""
    if dtype is not None:
        cast = model.half if dtype is torch.float16 else model.bfloat16
        cast()


class WeightUpdate:
    """This rank's part of the model's gradients, masters and optimizer: flat buckets, into which the parameters move.

    grad_norm: of the last step's gradient before clipping, of the whole model; a scalar on the device, the same on all.
    on_launch: called with each GATHER_PARAMS and REDUCE_GRADS that has just been launched, of one bucket, and its work.
    on_value: called with each gradient, see GradientSink.
    before_step: called when the gradients in the buckets are reduced, still gradient_scale times those of the mean loss.
    """

    def __init__(
        self,
        model: PipelineModule,
        optimizer: torch.optim.Optimizer,
        config: Config,
        precision: Precision,
        on_launch: Callable[[Instruction, Work], None],
        on_value: Callable[[nn.Parameter, Tensor], None] | None = None,
    ):
        infos, groups = model.parameter_infos(), model.groups
        self._model, self._groups = model, groups
        self._clipping = config.gradient_clipping
        self.optimizer = optimizer
        mine = make_policy(config, infos, model.device, precision.weights)
        # One rank that runs short of memory decides for all: the program is one.
        anywhere = any(row[0] for row in all_gather_integers([int(mine.reduce_per_micro_batch)], groups.control))
        self.policy = replace(mine, reduce_per_micro_batch=anywhere)
        check_precision(infos, self.policy)
        first_slice = groups.coordinate("model") == 0
        self.reducer = GradientReducer(
            infos,
            self.policy,
            groups.rank,
            groups.data,
            model.replica_groups,
            is_first_slice=first_slice,
            on_launch=on_launch,
            on_value=on_value,
        )
        _cast(model, precision.weights)
        self.sharded = ShardedOptimizer(
            optimizer,
            self.reducer.all_buckets(),
            model.parameters(),
            config.zero_allow_untested_optimizer,
            on_gather=self._gather_reporter(on_launch),
        )
        self.sharded.fused = open_update_kernels(optimizer, self.sharded.buckets, groups, model.device, config.kernels)
        self._frozen = model.frozen_infos()
        names = all_gather_object([info.name for info in infos], groups.control)
        self._agreement = StepAgreement(infos, names, groups.control)
        model.use_waiter(self.sharded.wait_for_module)
        self.scaler = LossScaler(precision.scaling) if precision.scaling is not None else None
        self._checks_overflow = precision.checks_overflow
        self.before_step: Callable[[], None] = lambda: None
        self.grad_norm: Tensor | None = None
        # What the last batch's loss functions have counted, relative to the weights of its gradients.
        self._count = torch.ones((), dtype=torch.float64, device=model.device)
        self._counted = False
        self.skipped_steps = 0

    def _gather_reporter(
        self, on_launch: Callable[[Instruction, Work], None]
    ) -> Callable[[tuple[int, ...], int, Work], None]:
        def report(owners: tuple[int, ...], bucket: int, work: Work) -> None:
            first = next(c for c in owners if self._model.placement[c] == self._model.stage_id)
            on_launch(Instruction(Op.GATHER_PARAMS, first, 0, bucket), work)

        return report

    def master_weights(self) -> dict[nn.Parameter, Tensor]:
        """Return the masters, whole, in fp32 or wider, of this rank's trainable parameters; on the host.

        On the first replica's ranks only; empty elsewhere. Collective over all ranks.
        """
        masters: dict[nn.Parameter, Tensor] = {}
        for bucket in self.reducer.all_buckets():
            whole = bucket.whole_masters()
            if self._groups.coordinate("data") == 0:
                masters.update({parameter: master.cpu() for parameter, master in whole.items()})
        return masters

    @property
    def loss_scale(self) -> float:
        """By which the losses of the batch under way are multiplied."""
        return self.scaler.scale if self.scaler is not None else 1.0

    @property
    def gradient_scale(self) -> Tensor:
        """By which reduced gradients exceed those of the mean loss: the loss scale and what a loss function counts."""
        return self._count * self.loss_scale

    @torch.no_grad()
    def reduce_scalars(self, own: LossShare) -> Tensor:
        """The batch's mean loss, of the last chunks' shares, and grad_norm: one all-reduce for both."""

        def counts(owners: tuple[int, ...]) -> bool:
            return self._model.placement[owners[0]] == self._model.stage_id

        scalars = torch.stack([own.total, own.count, self.reducer.norm_squared(counts, own.total.device)])
        all_reduce(scalars, self._groups.world).wait()
        self._counted, self._count = own.counted, countable(scalars[1])
        self.grad_norm = scalars[2].sqrt() / self.gradient_scale
        return (scalars[0] / self._count).to(torch.get_default_dtype())

    @torch.no_grad()
    def step(self, number: int) -> bool:
        """Take the optimizer's step, the `number`-th, unless gradients overflowed: whether it was taken.

        The gradients are divided by the loss scale and clipped on the way. Where overflows are looked for, the host waits
        for the device once, if it can after all is enqueued. Raises PrecisionError at an overflow at the lowest scale,
        ConfigError for a parameter that was frozen at `initialize` and isn't any longer.
        """
        self._refuse_thawed()
        assert self.grad_norm is not None
        self.before_step()
        finite = torch.isfinite(self.grad_norm) if self._checks_overflow else None
        untouched, counted = self._agreement.reach(self.reducer.sink.touched(), self._counted)
        divisor = self._divisor(self.grad_norm, finite, counted)
        overflow = False
        if self.sharded.takes_scale():
            self.sharded.step(untouched, divisor, None if finite is None else ~finite)
            self.sharded.gather()
            overflow = finite is not None and not bool(finite)  # the host waits here, when all is enqueued
        else:
            overflow = finite is not None and not bool(finite)
            if not overflow:
                self.sharded.step(untouched, divisor)
            self.sharded.gather()
        self._settle(number, overflow)
        return not overflow

    def _refuse_thawed(self) -> None:
        for info in self._frozen:
            if info.parameter.requires_grad:
                raise ConfigError(
                    f"parameter {info.name} was frozen when initialize was called, so it has no gradient buffer or optimizer "
                    "state, but now requires a gradient; freeze it after initialize (what gets no gradient is left alone)"
                )

    def _divisor(self, norm: Tensor, finite: Tensor | None, counted: bool) -> Tensor | None:
        """What the gradients have to be divided by, a scalar on the device; None for nothing."""
        if self._clipping == 0 and self.scaler is None and not counted:
            return None
        divisor = self.gradient_scale
        if self._clipping > 0:
            divisor = divisor * ((norm + 1e-6) / self._clipping).clamp(min=1.0)
        # Of an overflow nothing is taken; but the gradients stay, to be looked at.
        return divisor if finite is None else torch.where(finite, divisor, 1.0)

    def _settle(self, number: int, overflow: bool) -> None:
        if not self._checks_overflow:
            return
        scale = self.loss_scale
        if overflow:
            self.skipped_steps += 1
        try:
            if self.scaler is not None:
                self.scaler.update(overflow)
        finally:
            if overflow:
                self._tell_overflow(number, scale)

    def _tell_overflow(self, number: int, scale: float) -> None:
        """On rank 0, say where gradients overflowed, the last layers first: there the backward met it first.

        Collective: every rank has seen the same norm.
        """
        infos, stage = self.reducer.non_finite()[:_MOST_NAMES], self._model.stage_id
        places = all_gather_object([(i.owners[0], i.name, stage) for i in infos], self._groups.control)
        if self._groups.rank != 0:
            return
        found: dict[str, str] = {}
        everywhere = [(chunk, name, stage, rank) for rank, own in enumerate(places) for chunk, name, stage in own]
        for _, name, stage, rank in sorted(everywhere, key=lambda place: -place[0]):
            found.setdefault(name, f"{name} (stage {stage}, rank {rank})")
        change = f"; loss scale {scale:g} -> {self.loss_scale:g}" if self.scaler is not None else ""
        listed = ", ".join(list(found.values())[:_MOST_NAMES])
        warnings.warn(f"step {number} skipped: gradients overflow, first in {listed}{change}", stacklevel=2)
