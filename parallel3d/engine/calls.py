"""Steps by the script's own calls: forward and backward of each micro-batch, then step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from parallel3d.engine.progress import StepProgress
from parallel3d.engine.update import LossShare, WeightUpdate
from parallel3d.errors import ConfigError, ExecutionError
from parallel3d.optim.precision import Precision
from parallel3d.pipe.executor import loss_gradient, no_record, split_loss
from parallel3d.pipe.module import PipelineModule
from parallel3d.rng import EnterLayer
from parallel3d.schedule.instructions import Instruction, Op


def check_metrics(scheduler: Any, lr_kwargs: Mapping[str, Any]) -> None:
    """Raise ConfigError, before a step changes anything, if the learning-rate schedule needs a metric that is not given."""
    if isinstance(scheduler, ReduceLROnPlateau) and "metrics" not in lr_kwargs:
        raise ConfigError(
            "ReduceLROnPlateau steps on a metric, which only engine.step({'metrics': ...}) can give it: call that after "
            "engine.backward(loss), or give another schedule"
        )


class StepByCalls:
    """Runs the micro-batches of a step one by one, as the script calls them.

    - module: called by forward: the model itself, or the module that it wraps.
    - on_loss: called with the loss of each micro-batch, if given.
    """

    def __init__(
        self,
        model: PipelineModule,
        module: nn.Module,
        update: WeightUpdate,
        precision: Precision,
        progress: StepProgress,
        on_loss: Callable[[Tensor], None] | None,
    ):
        self._model, self._module = model, module
        self._update, self._precision, self._progress = update, precision, progress
        self._on_loss = on_loss
        self._synchronizes = True

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], enter: EnterLayer) -> Any:
        """Return the module's output for these inputs. enter: called before each layer.

        Raises ConfigError for a module that is split over stages or chunks.
        """
        if len(self._model.placement) > 1:
            raise ConfigError(
                f"the model is cut into {len(self._model.placement)} chunks, which only engine.train_batch(data_iter) and "
                "engine.eval_batch(data_iter) can run; use these, or build one stage of one chunk for engine(...)"
            )
        self._model.wait_for_weights(self._model)
        args, kwargs = self._precision.cast((args, kwargs))
        with self._recording(Op.FORWARD), self._precision.autocasting(self._model.device):
            if self._module is self._model:
                return self._model(*args, **kwargs, enter=enter)
            enter(0)
            return self._module(*args, **kwargs)

    def _recording(self, op: Op) -> AbstractContextManager[None]:
        return (self._progress.record or no_record)(Instruction(op, 0, self._progress.num_backwards))

    def backward(self, loss: Any, weight: float, last: bool, retain_graph: bool = False) -> None:
        """Add the gradients of `loss` times `weight`; reduce them now if it is the step's last, or in every micro-batch.

        After an exception the step starts over: it is unknown which of its gradients were added.
        """
        progress = self._progress
        try:
            total, count = split_loss(loss)
        except ValueError as error:
            raise ConfigError(f"engine.backward: {error}") from None
        if self._on_loss is not None:
            self._on_loss(total)
        if not progress.losses:
            self._update.reducer.start_step()
        seed = loss_gradient(total, weight * self._update.loss_scale)
        reduces = self._reduces(last)
        try:
            with self._recording(Op.BACKWARD), self._update.reducer.backward(reduces):
                torch.autograd.backward(total, seed, retain_graph=retain_graph)
        except BaseException:
            progress.restart()
            raise
        progress.add(total.detach().double() * weight, None if count is None else count * weight)

    def _reduces(self, last: bool) -> list[Instruction]:
        every_time = self._update.policy.reduce_per_micro_batch
        if not self._synchronizes and every_time:
            raise ConfigError(
                "no_sync delays the reduction of gradients, but they are reduced in every micro-batch and never kept whole; "
                "set zero_optimization.reduce_per_micro_batch to false, or leave no_sync out"
            )
        if self._progress.reduced and not every_time:
            raise ExecutionError(
                "engine.backward: the gradients of this step are already summed over the replicas, and would be summed once "
                "more; give one call the sum of a micro-batch's losses, or run all but the step's last inside engine.no_sync()"
            )
        self._progress.set_reduced(self._synchronizes and (last or every_time))
        if not self._progress.reduced:
            return []
        num_buckets = len(self._update.reducer.buckets.get((0,), ()))
        return [Instruction(Op.REDUCE_GRADS, 0, 0, bucket) for bucket in range(num_buckets)]

    def finish(self) -> LossShare:
        """End the step at a boundary. Returns this rank's share of the batch's loss."""
        progress = self._progress
        if not progress.losses:
            raise ExecutionError("engine.step() found no gradient: call engine.backward(loss) before it")
        if not progress.reduced:
            raise ExecutionError(
                "engine.step() found gradients that are not reduced over the replicas: the last engine.backward(loss) ran "
                "inside no_sync, or not at an accumulation boundary; run the last one outside, at the boundary"
            )
        share = LossShare.of(progress.losses, progress.counts, self._model.groups, self._model.device)
        progress.restart()
        return share

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backwards add to this rank's gradients and reduce nothing."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before
