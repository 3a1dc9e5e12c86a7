"""A step as the user's own calls: forward and backward of each micro-batch, then step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.engine.update import WeightUpdate
from parallel3d.errors import ConfigError, ExecutionError
from parallel3d.pipe.module import PipelineModule
from parallel3d.precision import Precision
from parallel3d.schedule.instructions import Instruction, Op


class StepByCalls:
    """The micro-batches of one step, as far as the user has come. module: what forward calls, the model or what it wraps.

    micro_steps: calls of `step` so far, one a micro-batch.
    """

    def __init__(self, model: PipelineModule, module: nn.Module, update: WeightUpdate, precision: Precision):
        self._model, self._module = model, module
        self._update, self._precision = update, precision
        self.micro_steps = 0
        self._boundary: bool | None = None
        self._synchronizes = True
        self._reduced = False
        self._losses: list[Tensor] = []

    @property
    def num_backwards(self) -> int:
        """Micro-batches whose backward has run since the last step at a boundary."""
        return len(self._losses)

    def is_boundary(self, num_micro_batches: int) -> bool:
        """Whether the micro-batch under way is the last of its step: as set, or by counting."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % num_micro_batches == 0

    def set_boundary(self, is_boundary: bool) -> None:
        """Say so for the micro-batches to come, instead of counting."""
        self._boundary = is_boundary

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output for these inputs. Raises ConfigError where it is split over stages or chunks."""
        if len(self._model.placement) > 1:
            raise ConfigError(
                f"the model is cut into {len(self._model.placement)} chunks, which run by engine.train_batch(data_iter) and "
                "engine.eval_batch(data_iter) alone; use these, or one stage of one chunk for engine(...)"
            )
        self._model.wait_for_weights(self._model)
        args, kwargs = self._precision.cast((args, kwargs))
        with self._precision.autocasting(self._model.device):
            return self._module(*args, **kwargs)

    def backward(self, loss: Tensor, weight: float, last: bool) -> None:
        """Gradients of `loss` times `weight`; reduced now if it is the step's last, or in every micro-batch."""
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(f"engine.backward needs a loss of one element, not {shape}; average it first")
        if not self._losses:
            self._update.reducer.start_step()
        reduces = self._reduces(last)
        with self._update.reducer.backward(reduces):
            torch.autograd.backward(loss, torch.full_like(loss, weight * self._update.loss_scale))
        self._losses.append(loss.detach().double().reshape(()) * weight)

    def _reduces(self, last: bool) -> list[Instruction]:
        every_time = self._update.policy.reduce_per_micro_batch
        if not self._synchronizes and every_time:
            raise ConfigError(
                "no_sync holds gradients back, but they are reduced in every micro-batch and never held whole; set "
                "zero_optimization.reduce_per_micro_batch to false, or leave no_sync out"
            )
        if self._reduced and not every_time:
            raise ExecutionError(
                "engine.backward(loss) was called again, but this step's gradients are reduced over the replicas already: add "
                "its losses and call it once, or call the earlier ones in engine.no_sync()"
            )
        self._reduced = False
        if not self._synchronizes or not (last or every_time):
            return []
        self._reduced = True
        return [
            Instruction(Op.REDUCE_GRADS, 0, 0, bucket)
            for bucket in range(len(self._update.reducer.buckets.get((0,), ())))
        ]

    def finish(self) -> Tensor:
        """At a boundary: this rank's share of the batch's mean loss, [] in float64."""
        if not self._losses:
            raise ExecutionError("engine.step() found no gradient: call engine.backward(loss) before it")
        if not self._reduced:
            raise ExecutionError(
                "engine.step() found gradients that are not reduced over the replicas: the last engine.backward(loss) ran "
                "inside no_sync, or not at an accumulation boundary; run the last one outside, at the boundary"
            )
        loss = torch.stack(self._losses).sum()
        self.forget()
        return loss

    def forget(self) -> None:
        """Drop the gradients since the last step."""
        self._losses.clear()
        self._reduced = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside add to this rank's gradients and reduce nothing."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before
