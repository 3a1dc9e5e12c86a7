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


def simulate(program: Program, cost: Cost = unit_cost) -> Timeline:
    """Time a program, with or without communication; cost(instruction) in any unit, of a transfer by its SEND.

    The k-th of n reductions behind a backward is released when k/n of that backward is through: buckets fill in order.
    Raises graphlib.CycleError for a program that deadlocks; validate() says so in words.
    """
    program = with_communication(program)
    graph = wait_graph(program)
    releases = _releases(program)
    start: dict[Node, float] = {}
    end: dict[Node, float] = {}
    for node in TopologicalSorter(graph).static_order():
        if isinstance(node, tuple):
            end[node] = max((end[w] for w in graph[node]), default=0.0)
            continue
        if node in releases:
            backward, share = releases[node]
            ahead = [end[w] for w in graph[node] if isinstance(w, Instruction) and w != backward]
            start[node] = max([start[backward] + share * (end[backward] - start[backward]), *ahead])
        else:
            start[node] = max((end[w] for w in graph[node]), default=0.0)
        end[node] = start[node] + cost(node)
    spans = []
    for rank, instructions in enumerate(program.instructions):
        for i in instructions:
            node = transfer_of(i)
            spans.append(Span(rank, i, start[node], end[node]))
    return Timeline.of(spans, program.num_ranks)


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
