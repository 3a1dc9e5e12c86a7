"""Costs -> timeline: when each instruction of a program runs, the bubble, the activations held."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter
from itertools import pairwise
from operator import attrgetter
from statistics import median
from typing import NamedTuple

from parallel3d.schedule.instructions import COMPUTE_OPS, RECV_OPS, Instruction, Op, Program, depends_on, reduces_behind
from parallel3d.schedule.lowering import with_communication
from parallel3d.schedule.order import blocks_host, line_of, transfer_of, wait_graph

Cost = Callable[[Instruction], float]

_UNIT = {Op.FORWARD: 1.0, Op.BACKWARD: 2.0, Op.BACKWARD_INPUT: 1.0, Op.BACKWARD_WEIGHT: 1.0}


def unit_cost(i: Instruction) -> float:
    """The papers' units: forward = 1, backward = 2, each half of a split backward = 1, all else free."""
    return _UNIT.get(i.op, 0.0)


_DECODER = {Op.FORWARD: 1.0, Op.BACKWARD: 2.1, Op.BACKWARD_INPUT: 1.26, Op.BACKWARD_WEIGHT: 0.84}


def decoder_cost(i: Instruction) -> float:
    """In forwards, what a transformer's layers take where attention is a small part of them; all else is free."""
    return _DECODER.get(i.op, 0.0)


@dataclass(frozen=True, slots=True)
class Span:
    """One instruction as it ran, or would run, on a rank; times in seconds, or in units of the cost function."""

    rank: int
    instruction: Instruction
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Spans of one step over all ranks of a pipeline, simulated or measured; times start at 0."""

    spans: tuple[Span, ...]
    num_ranks: int

    @staticmethod
    def of(spans: Iterable[Span], num_ranks: int) -> Timeline:
        """Spans in any order and from any clock that the ranks share."""
        ordered = sorted(spans, key=attrgetter("rank", "start", "end"))
        zero = min(map(attrgetter("start"), ordered), default=0.0)
        if zero != 0.0:
            ordered = [Span(s.rank, s.instruction, s.start - zero, s.end - zero) for s in ordered]
        return Timeline(tuple(ordered), num_ranks)

    @property
    def makespan(self) -> float:
        """From the start of the first instruction to the end of the last."""
        return max((s.end for s in self.spans), default=0.0)

    @property
    def bubble(self) -> float:
        """Share of ranks x makespan in which no forward or backward runs."""
        busy = sum(s.end - s.start for s in self.spans if s.instruction.op in COMPUTE_OPS)
        whole = self.num_ranks * self.makespan
        return 1.0 - busy / whole if whole > 0 else 0.0


_ENDING = (Op.BACKWARD, Op.BACKWARD_INPUT)  # of a micro-batch's way


class Length(NamedTuple):
    """How long a program takes. pace: by how much each micro-batch more makes it longer at least, since no more are in flight
    than on their way forward and back: by Little's law (doi:10.1287/opre.9.3.383) how long the first one takes over how many
    there are, on whichever chunk that is the most.
    """

    makespan: float
    pace: float


class CriticalPath(NamedTuple):
    """The critical path of a program.

    host: seconds of a rank's host at its beginning.
    instructions: in order, each of which starts when the one before it ends or releases it, with the seconds that it
        contributes: of a backward that releases a reduction, the share until then.
    """

    host: float
    instructions: list[tuple[Instruction, float]]


class Simulation:
    """A program, with or without communication, made ready to be timed for any number of costs.

    The k-th of n reductions behind a backward is released when k/n of that backward is through: buckets fill in order.
    Raises graphlib.CycleError for a program that deadlocks; validate() says so in words.
    """

    def __init__(self, program: Program) -> None:
        self.program = with_communication(program)
        numbers, self._whats = _numbered(self.program)
        self._lists = [[numbers[i] for i in instructions] for instructions in self.program.instructions]
        # Of each thing that is done, by its number: what it waits for; the backward that releases it before its end.
        self._waits = _waits(self.program, self._lists, numbers, len(self._whats))
        self._releases: list[tuple[int, float] | None] = [None] * len(self._whats)
        self._order = _sorted(self._waits, self.program)
        for number, (backward, share) in _releases(self.program, numbers).items():
            self._releases[number] = backward, share
            self._waits[number] = [w for w in self._waits[number] if w != backward]

    def run(self, cost: Cost, host: Cost | None = None) -> Timeline:
        """cost(instruction) in any unit, of a transfer by its SEND. host: how long each rank's host, which begins with the
        program and waits for nothing, is busy to call what an instruction computes, that ends no earlier than that.
        """
        start, end, _ = self._times(cost, host)
        lists = enumerate(zip(self.program.instructions, self._lists, strict=True))
        spans = [
            Span(rank, i, start[k], end[k])
            for rank, (instructions, numbers) in lists
            for i, k in zip(instructions, numbers, strict=True)
        ]
        return Timeline.of(spans, self.program.num_ranks)

    def makespan(self, cost: Cost) -> float:
        """Return the makespan of `run`'s timeline, in less time."""
        return max(self._times(cost)[1], default=0.0)

    def length(self, cost: Cost, host: Cost | None = None) -> Length:
        """Its makespan, and what it says of micro-batches that the program could have had besides. host: see run()."""
        start, end, _ = self._times(cost, host)
        pace = max(((end[last] - start[first]) / flight for first, last, flight in self._loops), default=0.0)
        return Length(max(end, default=0.0), pace)

    @cached_property
    def _loops(self) -> list[tuple[int, int, int]]:
        """(first forward, that micro-batch's backward, most micro-batches in between) of each chunk.

        Without the chunks that may hold more micro-batches than the program has.
        """
        loops = []
        for instructions, numbers in zip(self.program.instructions, self._lists, strict=True):
            first: dict[int, int] = {}  # chunk -> the first micro-batch
            begun: dict[int, int] = {}
            ends: dict[int, int] = {}
            flight: dict[int, int] = {}
            most: dict[int, int] = {}
            for (op, chunk, m, _), number in zip(instructions, numbers, strict=True):
                if op is Op.FORWARD:
                    first.setdefault(chunk, m)
                    begun.setdefault(chunk, number)
                    flight[chunk] = flight.get(chunk, 0) + 1
                elif op in _ENDING:
                    most[chunk] = max(most.get(chunk, 0), flight[chunk])
                    flight[chunk] -= 1
                    if m == first[chunk]:
                        ends[chunk] = number
            loops += [(begun[c], ends[c], most[c]) for c in ends if most[c] < self.program.num_micro_batches]
        return loops

    def critical_path(self, cost: Cost, host: Cost | None = None) -> CriticalPath:
        """Return what determines the makespan. host: see run()."""
        start, end, called = self._times(cost, host)
        path: list[tuple[Instruction, float]] = []
        until = max(end, default=0.0)
        k = end.index(until) if end else -1
        while k >= 0:
            if called and called[k] >= until:
                return CriticalPath(until, path[::-1])
            if until > start[k]:
                path.append((self._whats[k], until - start[k]))
            until, release = start[k], self._releases[k]
            last = max(self._waits[k], key=lambda w: end[w], default=-1)
            if release is not None and (last < 0 or end[last] < until):
                k = release[0]
            else:
                k = last
        return CriticalPath(0.0, path[::-1])

    def _times(self, cost: Cost, host: Cost | None = None) -> tuple[list[float], list[float], list[float]]:
        """When each thing starts and ends, by its number, and by when it is called at the earliest, if that is said."""
        waits, releases = self._waits, self._releases
        called = [] if host is None else self._called(host)
        costs = list(map(cost, self._whats))
        start, end = [0.0] * len(waits), [0.0] * len(waits)
        for k in self._order:
            begin = 0.0
            for w in waits[k]:
                if end[w] > begin:
                    begin = end[w]
            release = releases[k]
            if release is not None:
                backward, share = release
                begin = max(begin, start[backward] + share * (end[backward] - start[backward]))
            start[k] = begin
            begin += costs[k]
            end[k] = called[k] if called and called[k] > begin else begin
        return start, end, called

    def _called(self, host: Cost) -> list[float]:
        called = [0.0] * len(self._whats)
        for numbers in self._lists:
            busy = 0.0
            for k in numbers:
                if self._whats[k].op in COMPUTE_OPS:
                    busy += host(self._whats[k])
                    called[k] = busy
        return called


def simulate(program: Program, cost: Cost = unit_cost) -> Timeline:
    """Time a program once, see Simulation."""
    return Simulation(program).run(cost)


Numbers = dict[tuple[Op, int, int, int | None], int]  # of instructions, which are such tuples


def _numbered(program: Program) -> tuple[Numbers, list[Instruction]]:
    """A number for each thing that is done, and what that is: a transfer is one for both ends, a collective for all ranks."""
    numbers: Numbers = {}
    sends: dict[tuple[Op, int], Instruction] = {}  # of each kind of RECV
    whats: list[Instruction] = []
    for instructions in program.instructions:
        for i in instructions:
            if i in numbers:
                continue
            what = i
            if i.op in RECV_OPS:
                if (i.op, i.chunk) not in sends:
                    sends[i.op, i.chunk] = transfer_of(i)
                op, chunk, _, _ = sends[i.op, i.chunk]
                what = Instruction(op, chunk, i.micro_batch)
            number = numbers.setdefault(what, len(whats))
            if number == len(whats):
                whats.append(what)
            numbers[i] = number
    return numbers, whats


def _waits(program: Program, lists: Sequence[Sequence[int]], numbers: Numbers, count: int) -> list[list[int]]:
    """Return what each numbered thing waits for, as wait_graph() has it. lists: the program's, as numbers.

    A host reaches what it posts once it has passed what blocks it before: each thing waits for the last one that blocks
    each of its hosts.
    """
    waits: list[list[int]] = [[] for _ in range(count)]
    kinds = {(op, chunk) for op, chunk, _, _ in numbers}
    last_in_line: dict[object, int] = {}
    for rank, instructions in enumerate(program.instructions):
        passed: int | None = None
        # What holds of an instruction holds of those of other micro-batches: the rules are asked once for all.
        rules: dict[tuple[Op, int], tuple[object, list[tuple[Op, int, bool]]]] = {}
        for i, number in zip(instructions, lists[rank], strict=True):
            op, chunk, m, _ = i
            rule = rules.get((op, chunk))
            if rule is None:
                line = None if blocks_host(op) else line_of(program, rank, i)
                needs = [] if op in RECV_OPS else [need for need in _needs(op, chunk) if need[:2] in kinds]
                rule = rules[op, chunk] = line, needs
            line, needs = rule
            before = waits[number]
            if passed is not None:
                before.append(passed)
            if line is None:
                passed = number
            else:
                last = last_in_line.get(line)
                if last is not None:
                    before.append(last)
                last_in_line[line] = number
            for need, at, is_own in needs:
                found = numbers.get((need, at, m if is_own else 0, None))
                if found is not None:
                    before.append(found)
    return waits


def _needs(op: Op, chunk: int) -> list[tuple[Op, int, bool]]:
    """depends_on() of any micro-batch: (op, chunk, whether of the same micro-batch rather than of the first)."""
    return [(d.op, d.chunk, d.micro_batch != 0) for d in depends_on(Instruction(op, chunk, 1))]


def _sorted(waits: Sequence[Sequence[int]], program: Program) -> list[int]:
    """Numbers so that each comes behind all that it waits for."""
    waiting: list[list[int]] = [[] for _ in waits]
    missing = [len(before) for before in waits]
    for number, before in enumerate(waits):
        for w in before:
            waiting[w].append(number)
    order = [number for number, count in enumerate(missing) if count == 0]
    for number in order:
        for later in waiting[number]:
            missing[later] -= 1
            if missing[later] == 0:
                order.append(later)
    if len(order) < len(waits):
        TopologicalSorter(wait_graph(program)).prepare()  # raises CycleError with the cycle
    return order


def _releases(program: Program, numbers: Numbers) -> dict[int, tuple[int, float]]:
    """REDUCE_GRADS -> the backward that launches it, and the share of that backward after which its bucket is full."""
    releases: dict[int, tuple[int, float]] = {}
    for instructions in program.instructions:
        for position, (i, following) in enumerate(pairwise(instructions)):
            if following.op is not Op.REDUCE_GRADS:
                continue
            reduces = reduces_behind(instructions, position)
            for k, reduce in enumerate(reduces, start=1):
                releases[numbers[reduce]] = (numbers[i], k / len(reduces))
    return releases


def measured_cost(timeline: Timeline) -> Cost:
    """The median duration of each kind of compute on each chunk of a measured timeline; all else is free."""
    durations: dict[tuple[Op, int], list[float]] = {}
    for s in timeline.spans:
        if s.instruction.op in COMPUTE_OPS:
            durations.setdefault((s.instruction.op, s.instruction.chunk), []).append(s.end - s.start)
    medians = {kind: median(values) for kind, values in durations.items()}
    return lambda i: medians.get((i.op, i.chunk), 0.0)
