"""Costs -> timeline: when each instruction of a program runs, the bubble, the activations held."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from graphlib import TopologicalSorter
from statistics import median

from parallel3d.schedule.graph import Node, transfer_of, wait_graph
from parallel3d.schedule.instructions import COMPUTE_OPS, Instruction, Op, Program, reduces_behind
from parallel3d.schedule.lowering import with_communication

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
        ordered = sorted(spans, key=lambda s: (s.rank, s.start, s.end))
        zero = min((s.start for s in ordered), default=0.0)
        moved = (Span(s.rank, s.instruction, s.start - zero, s.end - zero) for s in ordered)
        return Timeline(tuple(moved), num_ranks)

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


class Simulation:
    """A program, with or without communication, made ready to be timed for any number of costs.

    The k-th of n reductions behind a backward is released when k/n of that backward is through: buckets fill in order.
    Raises graphlib.CycleError for a program that deadlocks; validate() says so in words.
    """

    def __init__(self, program: Program) -> None:
        self.program = with_communication(program)
        graph = wait_graph(self.program)
        order = list(TopologicalSorter(graph).static_order())
        place = {node: k for k, node in enumerate(order)}
        releases = _releases(self.program)
        # Of each node: what is done there, if anything; what it waits for; the backward that releases it before its end.
        self._steps: list[tuple[Instruction | None, list[int], tuple[int, float] | None]] = []
        for node in order:
            instruction = node if isinstance(node, Instruction) else None
            release, waits = None, graph[node]
            if node in releases:
                backward, share = releases[node]
                release = (place[backward], share)
                waits = [w for w in waits if isinstance(w, Instruction) and w != backward]
            self._steps.append((instruction, [place[w] for w in waits], release))
        lists = enumerate(self.program.instructions)
        self._spans = [(rank, i, place[transfer_of(i)]) for rank, instructions in lists for i in instructions]

    def run(self, cost: Cost) -> Timeline:
        """cost(instruction) in any unit, of a transfer by its SEND."""
        start, end = self._times(cost)
        spans = [Span(rank, i, start[k], end[k]) for rank, i, k in self._spans]
        return Timeline.of(spans, self.program.num_ranks)

    def makespan(self, cost: Cost) -> float:
        """Of `run`'s timeline, in less time."""
        return max(self._times(cost)[1], default=0.0)

    def critical_path(self, cost: Cost) -> list[tuple[Instruction, float]]:
        """The instructions, in order, that determine the makespan: each starts when the one before it ends, or releases it.

        With each the seconds by which it moves the end: of a backward that releases a reduction the share until then.
        """
        start, end = self._times(cost)
        path: list[tuple[Instruction, float]] = []
        until = max(end, default=0.0)
        k = end.index(until) if end else -1
        while k >= 0:
            instruction, waits, release = self._steps[k]
            if instruction is not None and until > start[k]:
                path.append((instruction, until - start[k]))
            until = start[k]
            last = max(waits, key=lambda w: end[w], default=-1)
            if release is not None and (last < 0 or end[last] < until):
                k = release[0]
            else:
                k = last
        return path[::-1]

    def _times(self, cost: Cost) -> tuple[list[float], list[float]]:
        """When each node starts and ends."""
        start, end = [0.0] * len(self._steps), [0.0] * len(self._steps)
        for k, (instruction, waits, release) in enumerate(self._steps):
            begin = 0.0
            for w in waits:
                if end[w] > begin:
                    begin = end[w]
            if release is not None:
                backward, share = release
                begin = max(begin, start[backward] + share * (end[backward] - start[backward]))
            start[k] = begin
            end[k] = begin if instruction is None else begin + cost(instruction)
        return start, end


def simulate(program: Program, cost: Cost = unit_cost) -> Timeline:
    """Time a program once, see Simulation."""
    return Simulation(program).run(cost)


def _releases(program: Program) -> dict[Node, tuple[Instruction, float]]:
    """REDUCE_GRADS -> the backward that launches it, and the share of that backward after which its bucket is full."""
    releases: dict[Node, tuple[Instruction, float]] = {}
    for instructions in program.instructions:
        for position, i in enumerate(instructions):
            reduces = reduces_behind(instructions, position)
            for k, reduce in enumerate(reduces, start=1):
                releases[reduce] = (i, k / len(reduces))
    return releases


def measured_cost(timeline: Timeline) -> Cost:
    """The median duration of each kind of compute on each chunk of a measured timeline; all else is free."""
    durations: dict[tuple[Op, int], list[float]] = {}
    for s in timeline.spans:
        if s.instruction.op in COMPUTE_OPS:
            durations.setdefault((s.instruction.op, s.instruction.chunk), []).append(s.end - s.start)
    medians = {kind: median(values) for kind, values in durations.items()}
    return lambda i: medians.get((i.op, i.chunk), 0.0)
