"""`deepspeed.runtime.pipe.schedule`: DeepSpeed's schedules as lists of instructions, for scripts that read or draw them.

The engine runs its own programs, which the configuration's pipeline.schedule chooses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator


class PipeInstruction:
    """One instruction of a stage; its arguments are attributes."""

    def __init__(self, **kwargs: object):
        self.name, self.kwargs = type(self).__name__, kwargs
        vars(self).update(kwargs)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.kwargs.items())})"


class OptimizerStep(PipeInstruction):
    """Update the weights."""


class ReduceGrads(PipeInstruction):
    """Reduce the gradients over the replicas."""


class ReduceTiedGrads(PipeInstruction):
    """Reduce the gradients of tied layers over the stages that hold them."""


class BufferOpInstruction(PipeInstruction):
    """An instruction on the buffer of a micro-batch."""

    def __init__(self, buffer_id: int, **kwargs: object):
        self.buffer_id = buffer_id
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Load inputs, or labels."""


class ForwardPass(BufferOpInstruction):
    """Run the stage's layers."""


class BackwardPass(BufferOpInstruction):
    """Run the backward of the stage's layers."""


class SendActivation(BufferOpInstruction):
    """Send outputs to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Receive inputs from the previous stage."""


class SendGrad(BufferOpInstruction):
    """Send the inputs' gradients to the previous stage."""


class RecvGrad(BufferOpInstruction):
    """Receive the outputs' gradients from the next stage."""


class PipeSchedule(ABC):
    """The instructions of one stage for one batch, step by step: both ends of a transfer are in the same step."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int):
        self.micro_batches = self.num_micro_batches = micro_batches
        self.stages = self.num_stages = stages
        self.stage_id = self.stage = stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1
        self.is_first_stage, self.is_last_stage = stage_id == 0, stage_id == stages - 1

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each step."""

    def num_pipe_buffers(self) -> int:
        """Return the number of buffers that the micro-batches take in turn."""
        return self.micro_batches

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        return self.steps()

    def _placed(
        self, total: int, kinds: Iterable[tuple[type[BufferOpInstruction], int, int, bool]]
    ) -> list[list[PipeInstruction]]:
        """Return the instructions of `total` steps. kinds: (type, first step, steps to the next micro-batch, whether any)."""
        steps: list[list[PipeInstruction]] = [[] for _ in range(total)]
        for kind, first, pace, is_any in kinds:
            for m in range(self.micro_batches if is_any else 0):
                steps[first + pace * m].append(kind(m % self.num_pipe_buffers()))
        return steps


class InferenceSchedule(PipeSchedule):
    """Only forwards; each stage is one step later than the one before."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each of the micro_batches + stages - 1 steps."""
        send = (SendActivation, self.stage_id + 1, 1, not self.is_last_stage)
        receive = (RecvActivation, self.stage_id, 1, not self.is_first_stage)
        transfers = [receive, send] if self.stage_id % 2 else [send, receive]
        load = (LoadMicroBatch, self.stage_id, 1, self.is_first_stage or self.is_last_stage)
        kinds = [load, *transfers, (ForwardPass, self.stage_id, 1, True)]
        yield from self._placed(self.micro_batches + self.stages - 1, kinds)

    def num_pipe_buffers(self) -> int:
        """Return 2: one to compute on, and one to send."""
        return 2


class TrainSchedule(PipeSchedule):
    """1F1B: a stage runs forwards in every second step and, from its first gradient on, backwards in the others."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each of the 2 (micro_batches + stages - 1) steps."""
        forward, backward = self.stage_id, 2 * self.stages - 1 - self.stage_id  # steps of micro-batch 0
        kinds = [
            (SendGrad, backward + 1, 2, not self.is_first_stage),
            (RecvActivation, forward, 2, not self.is_first_stage),
            (RecvGrad, backward, 2, not self.is_last_stage),
            (SendActivation, forward + 1, 2, not self.is_last_stage),
            (LoadMicroBatch, forward, 2, self.is_first_stage or self.is_last_stage),
            (ForwardPass, forward, 2, True),
            (BackwardPass, backward, 2, True),
        ]
        steps = self._placed(2 * (self.micro_batches + self.stages - 1), kinds)
        steps[-1] += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
        yield from steps

    def num_pipe_buffers(self) -> int:
        """Return the most micro-batches between their forward and their backward, and at least 2."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))


class DataParallelSchedule(PipeSchedule):
    """A single stage, whose micro-batches follow each other."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each micro-batch."""
        for m in range(self.micro_batches):
            last = [ReduceGrads(), OptimizerStep()] if m == self.micro_batches - 1 else []
            yield [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0), *last]

    def num_pipe_buffers(self) -> int:
        """Return 1."""
        return 1
