"""A step as the user's own calls: forward and backward of each micro-batch, then step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from parallel3d.engine.update import LossShare, WeightUpdate
from parallel3d.errors import ConfigError, ExecutionError
from parallel3d.optim.precision import Precision
from parallel3d.pipe.executor import Recorder, loss_gradient, no_record, split_loss
from parallel3d.pipe.module import PipelineModule
from parallel3d.rng import EnterLayer
from parallel3d.schedule.instructions import Instruction, Op


def check_metrics(scheduler: Any, lr_kwargs: Mapping[str, Any]) -> None:
    """Raise ConfigError, before a step changes anything, if the schedule's own step will lack what it steps on."""
    if isinstance(scheduler, ReduceLROnPlateau) and "metrics" not in lr_kwargs:
        raise ConfigError(
            "ReduceLROnPlateau steps on a metric, which engine.step({'metrics': ...}) alone can give it: call that after "
            "engine.backward(loss), or give another schedule"
        )


class StepByCalls:
    """The micro-batches of one step, as far as the user has come. module: what forward calls, the model or what it wraps.

    micro_steps: calls of `step` so far, one a micro-batch; record: wraps each forward and backward of the step under way,
    None before it has begun; look_at_loss: called with each micro-batch's.
    """

    def __init__(self, model: PipelineModule, module: nn.Module, update: WeightUpdate, precision: Precision):
        self._model, self._module = model, module
        self._update, self._precision = update, precision
        self.micro_steps = 0
        self.look_at_loss: Callable[[Tensor], None] = lambda loss: None
        self.record: Recorder | None = None
        self._first = 0  # micro_steps at the step's beginning
        self._boundary: bool | None = None
        self._synchronizes = True
        self._reduced = False
        self._losses: list[Tensor] = []
        self._counts: list[Tensor] = []

    @property
    def num_backwards(self) -> int:
        """Micro-batches whose backward has run since the last step at a boundary."""
        return len(self._losses)

    def is_boundary(self, num_micro_batches: int) -> bool:
        """Whether the micro-batch under way is the last of its step: as set, or by counting."""
        if self._boundary is not None:
            return self._boundary
        return self.micro_steps - self._first + 1 >= num_micro_batches

    def set_boundary(self, is_boundary: bool) -> None:
        """Say so for the micro-batches to come, instead of counting."""
        self._boundary = is_boundary

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], enter: EnterLayer) -> Any:
        """The module's output for these inputs; enter: called before each layer.

        Raises ConfigError where it is split over stages or chunks.
        """
        if len(self._model.placement) > 1:
            raise ConfigError(
                f"the model is cut into {len(self._model.placement)} chunks, which run by engine.train_batch(data_iter) and "
                "engine.eval_batch(data_iter) alone; use these, or one stage of one chunk for engine(...)"
            )
        self._model.wait_for_weights(self._model)
        args, kwargs = self._precision.cast((args, kwargs))
        with self._recording(Op.FORWARD), self._precision.autocasting(self._model.device):
            if self._module is self._model:
                return self._model(*args, **kwargs, enter=enter)
            enter(0)
            return self._module(*args, **kwargs)

    def _recording(self, op: Op) -> AbstractContextManager[None]:
        return (self.record or no_record)(Instruction(op, 0, self.num_backwards))

    def backward(self, loss: Any, weight: float, last: bool, retain_graph: bool = False) -> None:
        """Gradients of `loss` times `weight`; reduced now if it is the step's last, or in every micro-batch.

        Where it fails, the step begins anew: nobody knows which of its gradients have been added.
        """
        try:
            total, count = split_loss(loss)
        except ValueError as error:
            raise ConfigError(f"engine.backward: {error}") from None
        self.look_at_loss(total)
        if not self._losses:
            self._reduced = False
            self._update.reducer.start_step()
        reduces = self._reduces(last)
        seed = loss_gradient(total, weight * self._update.loss_scale)
        try:
            with self._recording(Op.BACKWARD), self._update.reducer.backward(reduces):
                torch.autograd.backward(total, seed, retain_graph=retain_graph)
        except BaseException:
            self.restart()
            raise
        self._losses.append(total.detach().double() * weight)
        if count is not None:
            self._counts.append(count * weight)

    def _reduces(self, last: bool) -> list[Instruction]:
        every_time = self._update.policy.reduce_per_micro_batch
        if not self._synchronizes and every_time:
            raise ConfigError(
                "no_sync holds gradients back, but they are reduced in every micro-batch and never held whole; set "
                "zero_optimization.reduce_per_micro_batch to false, or leave no_sync out"
            )
        if self._reduced and not every_time:
            raise ExecutionError(
                "engine.backward: the gradients of this step are already summed over the replicas, and would be summed once "
                "more; give one call the sum of a micro-batch's losses, or run all but the step's last inside engine.no_sync()"
            )
        self._reduced = False
        if not self._synchronizes or not (last or every_time):
            return []
        self._reduced = True
        return [
            Instruction(Op.REDUCE_GRADS, 0, 0, bucket)
            for bucket in range(len(self._update.reducer.buckets.get((0,), ())))
        ]

    def finish(self) -> LossShare:
        """At a boundary: this rank's share of the batch's loss."""
        if not self._losses:
            raise ExecutionError("engine.step() found no gradient: call engine.backward(loss) before it")
        if not self._reduced:
            raise ExecutionError(
                "engine.step() found gradients that are not reduced over the replicas: the last engine.backward(loss) ran "
                "inside no_sync, or not at an accumulation boundary; run the last one outside, at the boundary"
            )
        share = LossShare.of(self._losses, self._counts, self._model.groups, self._model.device)
        self.restart()
        return share

    def advance(self, boundary: bool) -> None:
        """A micro-batch is done; at a boundary, its step is too."""
        self.micro_steps += 1
        if boundary:
            self._first = self.micro_steps

    def forget(self) -> None:
        """Drop the gradients since the last step; its micro-batches stay counted."""
        self._losses.clear()
        self._counts.clear()
        self._reduced = False

    def restart(self) -> None:
        """The micro-batch to come is the first of a step."""
        self.forget()
        self.record, self._first = None, self.micro_steps

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside add to this rank's gradients and reduce nothing."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before
