"""Progress of a training."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from parallel3d.pipe.executor import Recorder


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
    - record: wraps each forward and backward that the script calls in the current step; None before the step has begun.
    """

    def __init__(self) -> None:
        self.global_steps = self.global_samples = self.micro_steps = 0
        self.applied = self.reduced = False
        self.losses: list[Tensor] = []
        self.counts: list[Tensor] = []
        self.record: Recorder | None = None
        self._boundary: bool | None = None  # as the script has set it; None to count
        self._first = 0  # micro_steps when the step began

    @property
    def num_backwards(self) -> int:
        """Number of micro-batches of the current step whose backward was called by the script."""
        return len(self.losses)

    def is_boundary(self, num_micro_batches: int) -> bool:
        """Return whether the current micro-batch is the last of its step: as the script has set it, else by counting."""
        if self._boundary is not None:
            return self._boundary
        return self.micro_steps - self._first + 1 >= num_micro_batches

    def set_boundary(self, is_boundary: bool) -> None:
        """Set whether the micro-batches to come end a step."""
        self._boundary = is_boundary

    def begin(self, record: Recorder) -> None:
        """Begin a step by calls, whose forwards and backwards `record` wraps."""
        self.record = record

    def set_reduced(self, reduced: bool) -> None:
        """Note whether the next backward reduces the step's gradients over the replicas."""
        self.reduced = reduced

    def add(self, loss: Tensor, count: Tensor | None) -> None:
        """Add a micro-batch whose backward was called."""
        self.losses.append(loss)
        if count is not None:
            self.counts.append(count)

    def advance(self, boundary: bool) -> None:
        """Count a call of `engine.step`, which ends the micro-batch, and at a boundary its step."""
        self.micro_steps += 1
        if boundary:
            self._first = self.micro_steps

    def finish_step(self, num_samples: int) -> None:
        """Count a step on this number of samples."""
        self.global_steps += 1
        self.global_samples += num_samples

    def set_applied(self, applied: bool) -> None:
        """Note whether the last step changed the weights."""
        self.applied = applied

    def forget(self) -> None:
        """Drop the gradients since the last step. Their micro-batches stay counted."""
        self.losses.clear()
        self.counts.clear()
        self.reduced = False

    def restart(self) -> None:
        """Begin a new step with the next micro-batch."""
        self.forget()
        self.record, self._first = None, self.micro_steps

    def state_dict(self) -> dict[str, int]:
        """Return the counters."""
        return {
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "micro_steps": self.micro_steps,
        }

    def load_state_dict(self, counters: Mapping[str, int]) -> None:
        """Set the counters that are given."""
        self.global_steps = counters.get("global_steps", self.global_steps)
        self.global_samples = counters.get("global_samples", self.global_samples)
        self.micro_steps = counters.get("micro_steps", self.micro_steps)
