"""Timing of programs: when each instruction runs for given costs, the makespan and the bubble."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from operator import attrgetter
from statistics import median
from typing import NamedTuple

from parallel3d.schedule.instructions import COMPUTE_OPS, Instruction, Op, Program, reduces_after
from parallel3d.schedule.lifetimes import Boundaries, ChunkUses
from parallel3d.schedule.lowering import with_communication
from parallel3d.schedule.order import WaitGraph

Cost = Callable[[Instruction], float]

_UNIT = {Op.FORWARD: 1.0, Op.BACKWARD: 2.0, Op.BACKWARD_INPUT: 1.0, Op.BACKWARD_WEIGHT: 1.0}


def unit_cost(i: Instruction) -> float:
    """Return times in the papers' units: forward 1, backward 2, each half of a split backward 1, all else free."""
    return _UNIT.get(i.op, 0.0)


_DECODER = {Op.FORWARD: 1.0, Op.BACKWARD: 2.1, Op.BACKWARD_INPUT: 1.26, Op.BACKWARD_WEIGHT: 0.84}


def decoder_cost(i: Instruction) -> float:
    """Return times of transformer layers in forwards, where attention is a small part of them; all else is free."""
    return _DECODER.get(i.op, 0.0)


class Span(NamedTuple):
    """One instruction as it ran, or would run, on a rank; times in seconds, or in units of the cost function.

    It is a tuple, and a list in JSON, because a step has hundreds of thousands of them.
    """

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
        """Make a timeline of spans in any order and from any clock that the ranks share."""
        ordered = sorted(spans, key=attrgetter("rank", "start", "end"))
        zero = min(map(attrgetter("start"), ordered), default=0.0)
        if zero != 0.0:
            ordered = [Span(s.rank, s.instruction, s.start - zero, s.end - zero) for s in ordered]
        return Timeline(tuple(ordered), num_ranks)

    @property
    def makespan(self) -> float:
        """Time from the start of the first instruction to the end of the last."""
        return max((s.end for s in self.spans), default=0.0)

    @property
    def bubble(self) -> float:
        """Share of ranks x makespan in which no forward or backward runs."""
        busy = sum(s.end - s.start for s in self.spans if s.instruction.op in COMPUTE_OPS)
        whole = self.num_ranks * self.makespan
        return 1.0 - busy / whole if whole > 0 else 0.0


_ENDING = (Op.BACKWARD, Op.BACKWARD_INPUT)  # kinds that end a micro-batch's pass over a chunk


class Length(NamedTuple):
    """Length of a program.

    pace: the least time that each further micro-batch adds. By Little's law (doi:10.1287/opre.9.3.383) that is the time which
    a micro-batch takes forward and back, divided by the number of micro-batches in flight, on the chunk where it is largest.
    """

    makespan: float
    pace: float


class CriticalPath(NamedTuple):
    """The critical path of a program.

    host: seconds of a rank's host at its beginning.
    instructions: (instruction, seconds that it contributes), in order. Each starts when the one before it ends or releases
        it; a backward that releases a reduction contributes its time until then.
    """

    host: float
    instructions: list[tuple[Instruction, float]]


class Simulation:
    """Timer of one program, with or without communication, for any number of cost functions.

    The k-th of n reductions after a backward is released when k/n of that backward is done: buckets fill in order.

    uses: the units of sharded weights that each chunk's runs of layers need. The n runs of a compute take equal times. A unit's
    gather starts when its boundary between two runs is reached and the rank's gathers before it are done; the first run that
    needs the unit waits for it. Releases are free. Without `uses` a compute waits for all gathers before it in the list.

    overlap: factor by which a compute and a gather of a unit are slower while both run on a rank.

    Raises graphlib.CycleError for a program that deadlocks; validate() explains the deadlock.
    """

    def __init__(self, program: Program, uses: Sequence[ChunkUses] = (), overlap: float = 1.0) -> None:
        self.program = with_communication(program)
        graph = WaitGraph(self.program)
        boundaries = Boundaries(graph, self.program, uses)
        self._sharded, self._slower = bool(uses), overlap - 1.0
        self._shares, self._first, self._beside = boundaries.shares, boundaries.first, graph.beside
        self._order, self._waits, self._nodes, self._lists = graph.order(), graph.waits, graph.nodes, graph.lists
        # REDUCE_GRADS -> the backward that launches it, and the share of that backward after which its bucket is full.
        self._releases: list[tuple[int, float] | None] = [None] * len(graph.nodes)
        for instructions, numbers in zip(self.program.instructions, self._lists, strict=True):
            launching = (k for k, (_, i) in enumerate(pairwise(instructions)) if i.op is Op.REDUCE_GRADS)
            for position in launching:
                backward, count = numbers[position], len(reduces_after(instructions, position))
                for k, reduce in enumerate(numbers[position + 1 : position + 1 + count], start=1):
                    self._releases[reduce] = boundaries.within(backward, k / count)
                    self._waits[reduce] = [w for w in self._waits[reduce] if w != backward]

    def run(self, cost: Cost, host: Cost | None = None) -> Timeline:
        """Return when each instruction runs.

        - cost: time of an instruction in any unit; a transfer's is that of its SEND.
        - host: time that a rank's host needs to call the operators of an instruction. The host begins with the program and
          never waits; an instruction ends no earlier than its calls.
        """
        start, end, _ = self._times(cost, host)
        lists = enumerate(zip(self.program.instructions, self._lists, strict=True))
        spans = [
            Span(rank, i, start[self._first.get(k, k)], end[k])
            for rank, (instructions, numbers) in lists
            for i, k in zip(instructions, numbers, strict=True)
        ]
        return Timeline.of(spans, self.program.num_ranks)

    def makespan(self, cost: Cost) -> float:
        """Return the makespan of `run`'s timeline, in less time."""
        return max(self._times(cost)[1], default=0.0)

    def length(self, cost: Cost, host: Cost | None = None) -> Length:
        """Return the makespan, and how much each further micro-batch would add at least. host: see run()."""
        start, end, _ = self._times(cost, host)
        if self._sharded:
            times = [start[self._first.get(k, k)] for k in self._rounds]
            return Length(max(end), max((b - a for a, b in pairwise(times)), default=0.0) / self.program.num_ranks)
        pace = max(
            ((end[last] - start[self._first.get(first, first)]) / flight for first, last, flight in self._loops),
            default=0.0,
        )
        return Length(max(end, default=0.0), pace)

    @cached_property
    def _rounds(self) -> list[int]:
        """Forwards on the last chunk: of the last micro-batch, and of those that are whole rounds of the ranks before it."""
        chunk, p, m = self.program.num_chunks - 1, self.program.num_ranks, self.program.num_micro_batches
        rank = self.program.placement[chunk]
        numbers = dict(zip(self.program.instructions[rank], self._lists[rank], strict=True))
        return [numbers[Instruction(Op.FORWARD, chunk, k)] for k in range(m - 1, max(p - 2, 0), -p)][::-1]

    @cached_property
    def _loops(self) -> list[tuple[int, int, int]]:
        """The (first forward, that micro-batch's backward, most micro-batches in flight) of each chunk.

        Leaves out chunks that could hold more micro-batches than the program has.
        """
        loops = []
        for instructions, numbers in zip(self.program.instructions, self._lists, strict=True):
            own: dict[int, list[tuple[Instruction, int]]] = {}
            for i, number in zip(instructions, numbers, strict=True):
                if i.op is Op.FORWARD or i.op in _ENDING:
                    own.setdefault(i.chunk, []).append((i, number))
            for passes in own.values():
                most = max(accumulate(1 if i.op is Op.FORWARD else -1 for i, _ in passes))
                (first, begun), *_ = passes
                ends = (number for i, number in passes if i.op in _ENDING and i.micro_batch == first.micro_batch)
                if most < self.program.num_micro_batches and (end := next(ends, None)) is not None:
                    loops.append((begun, end, most))
        return loops

    def critical_path(self, cost: Cost, host: Cost | None = None) -> CriticalPath:
        """Return the critical path, which determines the makespan. host: see run()."""
        start, end, called = self._times(cost, host)
        path: list[tuple[Instruction, float]] = []
        until = max(end, default=0.0)
        k = end.index(until) if end else -1
        while k >= 0:
            if called and called[k] >= until:
                return CriticalPath(until, path[::-1])
            if until > start[k]:
                path.append((self._nodes[k], until - start[k]))
            until, release = start[k], self._releases[k]
            k = max(self._waits[k], key=lambda w: end[w], default=-1)
            if release is not None and (k < 0 or end[k] < until):
                k = release[0]
        return CriticalPath(0.0, path[::-1])

    def _times(self, cost: Cost, host: Cost | None = None) -> tuple[list[float], list[float], list[float]]:
        """Return when each node starts, when it ends, and, with `host`, when it is called at the earliest."""
        waits, releases, beside = self._waits, self._releases, self._beside if self._slower > 0 else {}
        called = [] if host is None else self._called(host)
        costs = list(map(cost, self._nodes))
        for k, share in self._shares.items():
            costs[k] *= share
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
            if k in beside and self._nodes[k].op in COMPUTE_OPS:
                begin += self._slow_down(start, end, beside[k], begin, costs[k])
            begin += costs[k]
            end[k] = called[k] if called and called[k] > begin else begin
        return start, end, called

    def _slow_down(self, start: list[float], end: list[float], last: int, begin: float, length: float) -> float:
        """Let gathers that still run when a compute begins end later; return by how much the compute is longer.

        last: the last gather before the compute; length: of the compute without them.
        """
        longer = self._slower * max(0.0, min(length, end[last] - begin))
        gather: int | None = last
        while gather is not None and end[gather] > begin:
            for times in (start, end):
                times[gather] += self._slower * max(0.0, min(length, times[gather] - begin))
            gather = self._beside.get(gather)
        return longer

    def _called(self, host: Cost) -> list[float]:
        called = [0.0] * len(self._nodes)
        for numbers in self._lists:
            busy = 0.0
            for k in numbers:
                if self._nodes[k].op in COMPUTE_OPS:
                    busy += host(self._nodes[k])
                    called[k] = busy
        return called


def simulate(program: Program, cost: Cost = unit_cost, uses: Sequence[ChunkUses] = ()) -> Timeline:
    """Time a program once, as Simulation does."""
    return Simulation(program, uses).run(cost)


def measured_cost(timeline: Timeline) -> Cost:
    """Return a cost: the median duration of each kind of compute on each chunk of a timeline; all else is free."""
    durations: dict[tuple[Op, int], list[float]] = {}
    for s in timeline.spans:
        if s.instruction.op in COMPUTE_OPS:
            durations.setdefault((s.instruction.op, s.instruction.chunk), []).append(s.end - s.start)
    medians = {kind: median(values) for kind, values in durations.items()}
    return lambda i: medians.get((i.op, i.chunk), 0.0)
