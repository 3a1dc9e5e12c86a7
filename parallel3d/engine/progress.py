"""How far training is."""

from __future__ import annotations

from torch import Tensor

from parallel3d.pipe.executor import Recorder


class StepProgress:
    """How far training is, and the step under way: shared by train_batch and by engine(x), backward and step.

    global_steps: steps so far, skipped ones included.
    global_samples: samples trained on so far, over all replicas.
    micro_steps: calls of `step` so far, one a micro-batch.
    applied: whether the last step changed the weights.
    losses: of the micro-batches of the step under way whose backward was called, with the weights of their gradients;
        float64 scalars.
    counts: what a loss function that counts has counted of them, with the same weights.
    reduced: whether the gradients of the step under way are reduced over the replicas.
    boundary: what the script has set about the micro-batches to come; None to count.
    record: wraps each forward and backward that the script calls in the step under way; None before the step has begun.
    """

    def __init__(self) -> None:
        self.global_steps = self.global_samples = self.micro_steps = 0
        self.applied = self.reduced = False
        self.losses: list[Tensor] = []
        self.counts: list[Tensor] = []
        self.boundary: bool | None = None
        self.record: Recorder | None = None
        self._first = 0  # micro_steps when the step began

    @property
    def num_backwards(self) -> int:
        """Number of micro-batches of the step under way whose backward was called."""
        return len(self.losses)

    def is_boundary(self, num_micro_batches: int) -> bool:
        """Whether the micro-batch under way is the last of its step: as the script has set it, or by counting."""
        if self.boundary is not None:
            return self.boundary
        return self.micro_steps - self._first + 1 >= num_micro_batches

    def advance(self, boundary: bool) -> None:
        """End a micro-batch, and its step at a boundary."""
        self.micro_steps += 1
        if boundary:
            self._first = self.micro_steps

    def forget(self) -> None:
        """Drop the gradients since the last step. Their micro-batches stay counted."""
        self.losses.clear()
        self.counts.clear()
        self.reduced = False

    def restart(self) -> None:
        """Begin a new step with the next micro-batch."""
        self.forget()
        self.record, self._first = None, self.micro_steps
