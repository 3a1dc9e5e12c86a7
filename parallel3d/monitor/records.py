"""Records of steps: when each part ran on each rank, and the times of instructions and transfers that follow from them.

Times come from the host's clock on the CPU and from events on CUDA; nothing synchronizes while a step runs.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch

from parallel3d.clock import Clock
from parallel3d.comm.collectives import Awaited, Group, Work, all_gather_integers, all_gather_object
from parallel3d.schedule.instructions import COMPUTE_OPS, Instruction, Op, depends_on
from parallel3d.schedule.timing import Cost, Span, Timeline, measured_cost

_CLOCK_ROUNDS = 10


@dataclass(frozen=True)
class StepRecord:
    """One step on one rank, in seconds of a clock that all ranks share.

    - begin, end: of train_batch; reduced: when the gradients of the batch were reduced.
    - spans: of the instructions.
    - waits: of instructions for what other ranks send, before they ran.
    - reductions: from the launch of each REDUCE_GRADS until it was done, as far as the backend tells.
    - gathers: from the launch of each bucket's GATHER_PARAMS, at the step's end, until it was done; empty if one was still
      under way on the CPU when the record was read.
    """

    begin: float
    reduced: float
    end: float
    spans: tuple[Span, ...]
    waits: tuple[Span, ...]
    reductions: tuple[Span, ...] = ()
    gathers: tuple[Span, ...] = ()


class StepRecorder:
    """Recorder of one step on this rank, which begins now.

    - stage: the rank's position along the pipeline.
    - side: on CUDA, a stream on which nothing else runs. A span lasts from when the current stream reaches the instruction
      to when it has passed it.
    """

    def __init__(self, stage: int, clock: Clock, side: torch.cuda.Stream | None = None):
        self._stage, self._clock, self._side = stage, clock, side
        # Field of StepRecord -> (instruction, mark of its begin, mark of its end once it is there).
        self._marks: dict[str, list[tuple[Instruction, Any, list[Any]]]] = {
            name: [] for name in ("spans", "waits", "reductions", "gathers")
        }
        self._begin = clock.mark()
        self._reduced = self._end = self._begin
        self._record: StepRecord | None = None

    def running(self, instruction: Instruction) -> AbstractContextManager[None]:
        """Time the block as `instruction`."""
        return self._time("spans", instruction)

    def waiting(self, instruction: Instruction) -> AbstractContextManager[None]:
        """Time the block as the wait of `instruction` for other ranks."""
        return self._time("waits", instruction)

    @contextmanager
    def _time(self, name: str, instruction: Instruction) -> Iterator[None]:
        begin = self._clock.mark()
        yield
        self._marks[name].append((instruction, begin, [self._clock.mark()]))

    def launched(self, instruction: Instruction, work: Work) -> None:
        """Record a reduction or gather that has just been launched, until it is done."""
        if isinstance(work, Awaited):
            end: list[Any] = []
            name = "gathers" if instruction.op is Op.GATHER_PARAMS else "reductions"
            self._marks[name].append((instruction, self._clock.mark(), end))
            work.when_done(lambda: end.append(self._clock.mark()), self._side)

    def reduced(self) -> None:
        """Record that the gradients are reduced."""
        self._reduced = self._clock.mark()

    def finish(self) -> None:
        """Record that the step is over."""
        self._end = self._clock.mark()

    def read(self, offset: float = 0.0) -> StepRecord:
        """Return the record, its times `offset` seconds later; waits for the device the first time."""
        if self._record is None:
            if self._side is not None:
                self._side.synchronize()
            marks = {name: [row for row in rows if row[2]] for name, rows in self._marks.items()}
            if len(marks["gathers"]) < len(self._marks["gathers"]):
                marks["gathers"] = []
            pairs = [mark for rows in marks.values() for _, begin, [end] in rows for mark in (begin, end)]
            times = iter([t + offset for t in self._clock.read([self._begin, self._reduced, self._end, *pairs])])
            begin, reduced, end = next(times), next(times), next(times)
            spans = [
                tuple(Span(self._stage, i, next(times), next(times)) for i, _, _ in rows) for rows in marks.values()
            ]
            self._record = StepRecord(begin, reduced, end, *spans)
            self._marks.clear()
        return self._record


def clock_offset(control: Group) -> float:
    """Return seconds to add to this rank's `time.monotonic` to get that of the group's first rank; 0 on one host. Collective.

    Hosts' clocks start anywhere. No rank leaves an exchange before all have entered it, which bounds the difference from both
    sides; the error is at most the time that the fastest of several exchanges takes.
    """
    if len(set(all_gather_object(socket.gethostname(), control))) == 1:
        return 0.0
    rounds = []
    for _ in range(_CLOCK_ROUNDS):
        entered = time.monotonic()
        all_gather_integers([0], control)
        rounds.append((entered, time.monotonic()))
    return offset_between(rounds, all_gather_object(rounds, control)[0])


def offset_between(mine: Sequence[tuple[float, float]], theirs: Sequence[tuple[float, float]]) -> float:
    """Return what to add to my times to get theirs, from when each entered and left the same exchanges."""
    pairs = list(zip(mine, theirs, strict=True))
    at_least = max(entered - my_exit for (_, my_exit), (entered, _) in pairs)
    at_most = min(left - my_entry for (my_entry, _), (_, left) in pairs)
    return (at_least + at_most) / 2


# Instruction with micro_batch 0, standing for those of all micro-batches -> the seconds that each took.
Samples = dict[Instruction, list[float]]

_SENDS = {Op.FORWARD: Op.SEND_ACTIVATION, Op.BACKWARD: Op.SEND_GRADIENT, Op.BACKWARD_INPUT: Op.SEND_GRADIENT}


def instruction_cost(steps: Sequence[Sequence[StepRecord]]) -> Cost:
    """Return the median time of each kind of compute on each chunk. steps: of each step, the records of all ranks."""
    spans = [span for records in steps for record in records for span in record.spans]
    return measured_cost(Timeline.of(spans, num_ranks=1))


def compute_times(steps: Sequence[Sequence[StepRecord]]) -> Samples:
    """Return all times of each kind of compute on each chunk. steps: of each step, the records of all ranks."""
    samples: Samples = {}
    for span in (span for records in steps for record in records for span in record.spans):
        if span.instruction.op in COMPUTE_OPS:
            samples.setdefault(span.instruction._replace(micro_batch=0), []).append(span.end - span.start)
    return samples


def transfer_times(pipelines: Sequence[Sequence[StepRecord]]) -> Samples:
    """Return the times of sends: from when a tensor is computed to when a rank that waits for it has it, for all such waits.

    pipelines: of each step and pipeline, the records of its ranks. A rank that had other work tells nothing of a transfer.
    """
    samples: Samples = {}
    for records in pipelines:
        computed = {s.instruction: s for record in records for s in record.spans if s.instruction.op in COMPUTE_OPS}
        for wait in (w for record in records for w in record.waits):
            for source in (computed[d] for d in depends_on(wait.instruction) if d in computed):
                if source.rank != wait.rank and wait.start < source.end < wait.end:
                    sent = Instruction(_SENDS[wait.instruction.op], source.instruction.chunk, 0)
                    samples.setdefault(sent, []).append(wait.end - source.end)
    return samples


def transfer_time(pipelines: Sequence[Sequence[StepRecord]]) -> float:
    """Return the median of all `transfer_times`, or 0."""
    return median([s for samples in transfer_times(pipelines).values() for s in samples] or [0.0])


def collective_times(
    replicas: Sequence[Sequence[StepRecord]], which: Literal["reductions", "gathers"] = "reductions"
) -> Samples:
    """Return the times of each bucket's REDUCE_GRADS or GATHER_PARAMS: from when its last rank is ready until it is done.

    replicas: of each step, and of each group of ranks that reduce together, their records. A rank is ready when it has
    launched the collective and has finished those that it launched before.
    """
    samples: Samples = {}
    for records in replicas:
        ready: dict[Instruction, float] = {}
        done: dict[Instruction, float] = {}
        for record in records:
            before = float("-inf")
            for span in sorted(getattr(record, which), key=lambda s: s.start):
                i = span.instruction
                ready[i] = max(ready.get(i, before), span.start, before)
                before = max(before, span.end)
                done[i] = max(done.get(i, span.end), span.end)
        for i, start in ready.items():
            samples.setdefault(i._replace(micro_batch=0), []).append(max(done[i] - start, 0.0))
    return samples


def traffic_times(
    replicas: Sequence[Sequence[StepRecord]], num_chunks: int
) -> tuple[tuple[float, ...], tuple[tuple[float, ...], ...]]:
    """Return the median seconds of each chunk's gather, and of each of its buckets' reductions, by `collective_times`."""
    samples = {**collective_times(replicas, "gathers"), **collective_times(replicas)}
    gather, reductions = [0.0] * num_chunks, [[0.0] * 0 for _ in range(num_chunks)]
    for i, times in sorted(samples.items(), key=lambda item: item[0].bucket or 0):
        if i.op is Op.GATHER_PARAMS:
            gather[i.chunk] += median(times)
        else:
            reductions[i.chunk].append(median(times))
    return tuple(gather), tuple(map(tuple, reductions))
