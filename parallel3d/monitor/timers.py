"""When each part of a step ran: the host's clock on the CPU, events on CUDA, with no synchronization while the step runs."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from parallel3d.clock import Clock
from parallel3d.comm.collectives import Awaited, Group, Work, all_gather_integers, all_gather_object
from parallel3d.schedule.instructions import Instruction, Op, Program
from parallel3d.schedule.simulate import Span

_ROUNDS = 10


@dataclass(frozen=True)
class StepRecord:
    """One step on one rank, in seconds of a clock that all ranks share.

    begin, end: of train_batch; reduced: when the gradients of the batch were reduced; spans: of the instructions; waits: how
    long instructions waited for what other ranks send, before they ran; reductions: from the launch of each REDUCE_GRADS
    until it was done, as far as the backend tells; gathers: as much of each bucket's GATHER_PARAMS, which the step ends with;
    none where one was still under way on the CPU when the record was read.
    """

    begin: float
    reduced: float
    end: float
    spans: tuple[Span, ...]
    waits: tuple[Span, ...]
    reductions: tuple[Span, ...] = ()
    gathers: tuple[Span, ...] = ()


class StepRecorder:
    """Records one step on this rank, which begins now. stage: the rank's position along the pipeline.

    On CUDA a span lasts from when the stream reaches the instruction to when it has passed it, and `beside` is a stream on
    which nothing else runs.
    """

    def __init__(self, stage: int, clock: Clock, beside: torch.cuda.Stream | None = None):
        self._stage, self._clock, self._beside = stage, clock, beside
        self._running: list[tuple[Instruction, Any, Any]] = []
        self._waiting: list[tuple[Instruction, Any, Any]] = []
        self._launched: list[tuple[Instruction, Any, list[Any]]] = []  # its end, once it is there
        self._begin = clock.mark()
        self._reduced = self._end = self._begin
        self._record: StepRecord | None = None
        self.program: Program | None = None

    @contextmanager
    def running(self, instruction: Instruction) -> Iterator[None]:
        """Time what runs inside as `instruction`."""
        begin = self._clock.mark()
        yield
        self._running.append((instruction, begin, self._clock.mark()))

    @contextmanager
    def waiting(self, instruction: Instruction) -> Iterator[None]:
        """Time what runs inside as the wait of `instruction` for other ranks."""
        begin = self._clock.mark()
        yield
        self._waiting.append((instruction, begin, self._clock.mark()))

    def launched(self, instruction: Instruction, work: Work) -> None:
        """A reduction or a gather has just been launched."""
        if isinstance(work, Awaited):
            end: list[Any] = []
            self._launched.append((instruction, self._clock.mark(), end))
            work.when_done(lambda: end.append(self._clock.mark()), self._beside)

    def reduced(self) -> None:
        """The gradients are reduced."""
        self._reduced = self._clock.mark()

    def finish(self) -> None:
        """The step is over."""
        self._end = self._clock.mark()

    def read(self, offset: float = 0.0) -> StepRecord:
        """What was recorded, `offset` seconds later; waits for the device, the first time."""
        if self._record is None:
            if self._beside is not None:
                self._beside.synchronize()
            gathered = all(end for instruction, _, end in self._launched if instruction.op is Op.GATHER_PARAMS)
            done = [
                (instruction, begin, end[0])
                for instruction, begin, end in self._launched
                if end and (gathered or instruction.op is not Op.GATHER_PARAMS)
            ]
            rows = [*self._running, *self._waiting, *done]
            marks = [self._begin, self._reduced, self._end, *(mark for _, *ends in rows for mark in ends)]
            begin, reduced, end, *times = (t + offset for t in self._clock.read(marks))
            spans = [
                Span(self._stage, instruction, *ends)
                for (instruction, _, _), ends in zip(rows, zip(times[::2], times[1::2], strict=True), strict=True)
            ]
            ran, waited = len(self._running), len(self._running) + len(self._waiting)
            reductions = tuple(s for s in spans[waited:] if s.instruction.op is not Op.GATHER_PARAMS)
            gathers = tuple(s for s in spans[waited:] if s.instruction.op is Op.GATHER_PARAMS)
            parts = (tuple(spans[:ran]), tuple(spans[ran:waited]), reductions, gathers)
            self._record = StepRecord(begin, reduced, end, *parts)
            self._running, self._waiting, self._launched = [], [], []
        return self._record


def clock_offset(control: Group) -> float:
    """Seconds to add to this rank's `time.monotonic` to have that of the group's first rank; 0 on one host. Collective.

    Hosts' clocks start anywhere. Nobody leaves an exchange before all have entered it, which bounds the difference from
    both sides; the error is no larger than the time that the fastest of some exchanges takes.
    """
    if len(set(all_gather_object(socket.gethostname(), control))) == 1:
        return 0.0
    rounds = []
    for _ in range(_ROUNDS):
        entered = time.monotonic()
        all_gather_integers([0], control)
        rounds.append((entered, time.monotonic()))
    return offset_between(rounds, all_gather_object(rounds, control)[0])


def offset_between(mine: Sequence[tuple[float, float]], theirs: Sequence[tuple[float, float]]) -> float:
    """What to add to my times to have theirs, from when each entered and left the same exchanges."""
    pairs = list(zip(mine, theirs, strict=True))
    at_least = max(entered - my_exit for (_, my_exit), (entered, _) in pairs)
    at_most = min(left - my_entry for (my_entry, _), (_, left) in pairs)
    return (at_least + at_most) / 2
