"""Progress of a training, and steps by the script's own calls: forward and backward of each micro-batch, then step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.optim.lr_scheduler import ReduceLROnPlateau

from parallel3d.autograd.fp8 import Fp8
from parallel3d.autograd.recipes import Value
from parallel3d.autograd.sink import accumulates
from parallel3d.engine.loss import LossShare
from parallel3d.engine.update import WeightUpdate
from parallel3d.errors import ConfigError, ExecutionError
from parallel3d.optim.precision import Precision
from parallel3d.pipe.batch import TrainingData
from parallel3d.pipe.executor import Recorder, loss_gradient, no_record, split_loss
from parallel3d.pipe.module import PipelineModule
from parallel3d.rng import EnterLayer
from parallel3d.schedule.instructions import Instruction, Op

_COUNTERS = ("global_steps", "global_samples", "micro_steps")


class StepProgress:
    """Counters of a training and the state of the current step, for train_batch and for engine(x), backward and step.

    - global_steps: number of steps so far, skipped ones included.
    - global_samples: number of samples trained on so far, over all replicas.
    - micro_steps: number of calls of `engine.step` so far, one for each micro-batch.
    - applied: whether the last step changed the weights.
    - losses: float64 scalars, one for each micro-batch of the current step whose backward was called by the script, each
      multiplied by the weight of its gradient.
    - counts: the counts of a loss function that returns (sum, count), multiplied by the same weights.
    - reduced: whether the gradients of the current step are reduced over the replicas.
    - num_begun: number of steps by calls that have begun.
    - record: wraps each forward and backward that the script calls in the current step; None before the step has begun.
    """

    def __init__(self) -> None:
        self.global_steps = self.global_samples = self.micro_steps = 0
        self.applied = self.reduced = False
        self.num_begun = 0
        self.losses: list[Tensor] = []
        self.counts: list[Tensor] = []
        self.record: Recorder | None = None
        self._boundary: bool | None = None  # set by the script; None: count micro-batches
        self._first = 0  # micro_steps when the step began
        self._forwards: tuple[int, int] = 0, 0  # num_backwards at the last forward, and forwards since that backward

    @property
    def num_backwards(self) -> int:
        """Number of micro-batches of the current step whose backward was called by the script."""
        return len(self.losses)

    def is_boundary(self, num_micro_batches: int) -> bool:
        """Return whether the current micro-batch is the last of its step: as set by the script, or else by its number."""
        if self._boundary is not None:
            return self._boundary
        return self.micro_steps - self._first + 1 >= num_micro_batches

    def set_boundary(self, is_boundary: bool) -> None:
        """Set whether the following micro-batches end a step."""
        self._boundary = is_boundary

    def begin(self, record: Recorder) -> None:
        """Begin a step by calls, whose forwards and backwards `record` wraps."""
        self.record = record
        self.num_begun += 1

    def begin_forward(self) -> int:
        """Begin a forward by a call, and return the number of those since the last backward, or since the step began."""
        micro_batch, number = self._forwards
        number = number if micro_batch == self.num_backwards else 0
        self._forwards = self.num_backwards, number + 1
        return number

    def advance(self, boundary: bool) -> None:
        """Count a call of `engine.step`, which ends the micro-batch, and at a boundary its step."""
        self.micro_steps += 1
        if boundary:
            self._first = self.micro_steps
        else:
            self.applied = False

    def finish_step(self, num_samples: int, applied: bool) -> None:
        """Count a step on this number of samples. applied: whether it changed the weights."""
        self.global_steps += 1
        self.global_samples += num_samples
        self.applied = applied

    def forget(self) -> None:
        """Drop the gradients since the last step. Their micro-batches stay counted."""
        self.losses.clear()
        self.counts.clear()
        self.reduced = False

    def restart(self) -> None:
        """Begin a new step with the next micro-batch."""
        self.forget()
        self.applied, self.record, self._first, self._forwards = False, None, self.micro_steps, (0, 0)

    def state_dict(self) -> dict[str, int]:
        """Return the counters."""
        return {name: getattr(self, name) for name in _COUNTERS}

    def load_state_dict(self, counters: Mapping[str, int]) -> None:
        """Set the counters that are given."""
        vars(self).update({name: counters[name] for name in _COUNTERS if name in counters})


def check_metrics(scheduler: Any, lr_kwargs: Mapping[str, Any]) -> None:
    """Raise ConfigError, before a step changes anything, if the learning-rate schedule needs a metric that is not given."""
    if isinstance(scheduler, ReduceLROnPlateau) and "metrics" not in lr_kwargs:
        raise ConfigError(
            "ReduceLROnPlateau steps on a metric, which only engine.step({'metrics': ...}) can give it: call that after "
            "engine.backward(loss), or give another schedule"
        )


class StepByCalls:
    """Runs the micro-batches of a step one by one, as the script calls them.

    - module: the module that `forward` calls: the model itself, or the module that it wraps.
    - data: has the number of micro-batches of a step.
    - attending: makes contexts for backwards, in which layers may be recomputed.
    - on_loss: called with the loss of each micro-batch, if given.
    - fp8: keeps casts of weights to fp8 during a step.
    """

    def __init__(
        self,
        model: PipelineModule,
        module: nn.Module,
        update: WeightUpdate,
        precision: Precision,
        progress: StepProgress,
        data: TrainingData,
        attending: Callable[[], AbstractContextManager[None]],
        on_loss: Callable[[Tensor], None] | None,
        fp8: Fp8,
    ):
        self._model, self._module, self._data, self._attending, self._fp8 = model, module, data, attending, fp8
        self._update, self._precision, self._progress = update, precision, progress
        self._on_loss = on_loss
        self._synchronizes = True
        self._around: ExitStack | None = None  # contexts of the backward that runs now
        self._scaled = False  # the backward under way began at a loss that `scale` returned
        self._loss: Tensor | None = None  # of the last forward, if the module returns it

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], enter: EnterLayer) -> Any:
        """Return the module's output for these inputs. enter: called before each layer.

        Raises ConfigError for a module that is split over stages or chunks, ExecutionError while its weights are on the host.
        """
        self.check_whole()
        self._update.parking.check("lp_params")
        self._model.wait_for_weights(self._model)
        begun = self._progress.record is not None
        self._fp8.keep((self._progress.num_begun, self._update.num_writes) if begun else None)
        args, kwargs = self._precision.cast((args, kwargs))
        with self._recording(Op.FORWARD), self._precision.autocasting(self._model.device):
            if self._module is self._model:
                output = self._model(*args, **kwargs, enter=enter)
            else:
                enter(0)
                output = self._module(*args, **kwargs)
        loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
        self._loss = loss.detach() if isinstance(loss, Tensor) and loss.numel() == 1 else None
        return output

    def check_whole(self) -> None:
        """Raise ConfigError for a module that is split over stages or chunks."""
        if len(self._model.placement) > 1:
            raise ConfigError(
                f"the model is cut into {len(self._model.placement)} chunks, which only engine.train_batch(data_iter) and "
                "engine.eval_batch(data_iter) can run; use these, or build one stage of one chunk for engine(...), "
                "engine.backward and engine.step"
            )

    def _recording(self, op: Op) -> AbstractContextManager[None]:
        return (self._progress.record or no_record)(Instruction(op, 0, self._progress.num_backwards))

    def _weight(self, averages: bool = True) -> float:
        """Return the factor of a micro-batch's gradients. averages: over a step's micro-batches, not only over replicas."""
        return 1.0 / ((self._data.sizes.num_micro_batches if averages else 1) * self._model.groups.data.size)

    def backward(self, loss: Any, retain_graph: bool = False, averages: bool = True) -> None:
        """Add the gradients of `loss`, see engine.backward.

        They are reduced over the replicas at a boundary, or after every micro-batch with reduce_per_micro_batch. After an
        exception the step starts over, because it is unknown which of its gradients were added.
        """
        progress, weight = self._progress, self._weight(averages)
        try:
            total, count = split_loss(loss)
        except ValueError as error:
            raise ConfigError(f"engine.backward: {error}") from None
        if self._on_loss is not None:
            self._on_loss(total)
        seed = loss_gradient(total, weight * self._update.loss_scale)
        self._around = self._begin_backward()
        try:
            with self._around:
                torch.autograd.backward(total, seed, retain_graph=retain_graph)
        except BaseException:
            progress.restart()
            raise
        finally:
            self._around = None
        progress.losses.append(total.detach().double() * weight)
        if count is not None:
            progress.counts.append(count * weight)

    def _begin_backward(self, factor: float = 1.0) -> ExitStack:
        """Begin a backward, whose gradients are multiplied by `factor`; the result ends it."""
        reducer, reduces = self._update.reducer, self._reduces()
        if not self._progress.losses:
            reducer.start_step()
        with ExitStack() as around:
            for context in (self._attending(), self._recording(Op.BACKWARD), reducer.backward(reduces, factor)):
                around.enter_context(context)
            return around.pop_all()

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale, for the script's own `backward()`."""
        if loss.numel() != 1:
            raise ConfigError(f"engine.scale takes a scalar tensor, the loss; its shape is {list(loss.shape)}")
        scaled = loss * self._update.loss_scale
        if scaled.requires_grad:
            scaled.register_hook(self._note_scaled)
        return scaled

    def _note_scaled(self, _: Tensor) -> None:
        def forget() -> None:
            self._scaled = False

        self._scaled = True
        Variable._execution_engine.queue_callback(forget)

    def begin_own(self, parameter: nn.Parameter) -> None:
        """Begin the backward that brings a parameter's gradient next, if the script itself runs it, as by loss.backward().

        This method and a callback at the backward's end do what `backward` does around it. Gradients are multiplied as they
        arrive.
        """
        progress = self._progress
        if self._around is not None or progress.record is None or not accumulates(get_gradient_edge(parameter).node):
            return
        if self._update.scaler is not None and not self._scaled:
            raise ExecutionError(
                "loss.backward(): Loss scaling is required with float16; write engine.scale(loss).backward(), or "
                "engine.backward(loss)"
            )
        weight = self._weight()
        self._around = self._begin_backward(weight)
        Variable._execution_engine.queue_callback(lambda: self._end_own(weight))

    def _end_own(self, weight: float) -> None:
        assert self._around is not None
        self._around.close()
        self._around = None
        loss = self._unknown_loss() if self._loss is None else self._loss.double()
        self._progress.losses.append(loss * weight)

    def _unknown_loss(self) -> Tensor:
        return torch.full((), torch.nan, dtype=torch.float64, device=self._model.device)  # waits for no copy

    def drop_unfinished(self) -> None:
        """Start the step over if a backward that the script ran itself has not ended: it raised an exception.

        Raises ExecutionError inside a backward.
        """
        if torch._C._current_graph_task_id() != -1:
            raise ExecutionError(
                "engine(...) was called inside a backward, as by torch.utils.checkpoint around it, and would draw other random "
                "numbers; checkpoint parts of the module, or set activation_checkpointing"
            )
        self._scaled = False
        if self._around is not None:
            with suppress(ExecutionError), self._around:
                raise ExecutionError("a backward did not end")
            self._around = None
            self._progress.restart()

    def _reduces(self) -> list[Instruction]:
        every_time = self._update.policy.reduce_per_micro_batch
        is_last = self._progress.is_boundary(self._data.sizes.num_micro_batches)
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
        self._progress.reduced = self._synchronizes and (is_last or every_time)
        if not self._progress.reduced:
            return []
        num_buckets = len(self._update.reducer.buckets.get((0,), ()))
        return [Instruction(Op.REDUCE_GRADS, 0, 0, bucket) for bucket in range(num_buckets)]

    def _take_grads(self) -> None:
        """Reduce the gradients that the script has put into the parameters' `.grad`, as a micro-batch of unknown loss.

        They are what a backward of the loss times the loss scale would leave, on this replica.
        """
        reducer, progress = self._update.reducer, self._progress
        if given := reducer.sink.foreign_grads():
            reducer.start_step()
            with reducer.backward(self._reduces(), 1.0 / self._model.groups.data.size), torch.no_grad():
                for parameter, gradient in given.items():
                    reducer.sink.add(parameter, Value(gradient.detach()))
            progress.losses.append(self._unknown_loss())

    def finish(self) -> tuple[LossShare, int]:
        """End the step at a boundary. Returns this rank's share of the batch's loss, and its number of micro-batches."""
        progress = self._progress
        if not progress.losses:
            self._take_grads()
        if not progress.losses:
            raise ExecutionError("engine.step() found no gradient: call engine.backward(loss) before it")
        if not progress.reduced:
            raise ExecutionError(
                "engine.step() found gradients that are not reduced over the replicas: the last engine.backward(loss) ran "
                "inside no_sync, or not at an accumulation boundary; run the last one outside, at the boundary"
            )
        share = LossShare.of(progress.losses, progress.counts, self._model.groups, self._model.device)
        num_micro_batches = progress.num_backwards
        progress.restart()
        self._fp8.keep(None)
        return share, num_micro_batches

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Make backwards in this context add to this rank's gradients without reducing them."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before
