"""Lifetimes of sharded weights (ZeRO-3): when each unit is gathered, and when its memory is released, also inside computes.

A unit is the weights of one layer. The future of a program is known, so Belady's rule (doi:10.1147/sj.52.0078) decides which
unit to release if there is no room: the one whose next use is farthest. That needs the fewest gathers.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat, takewhile, zip_longest
from typing import NamedTuple

from parallel3d.errors import ScheduleError
from parallel3d.schedule.instructions import COMPUTE_OPS, LIFETIME_OPS, Instruction, Op, Program
from parallel3d.schedule.order import WaitGraph

Use = tuple[int, ...]  # the units that a layer needs at the same time while it runs
NEVER = 1 << 60


@dataclass(frozen=True)
class ChunkUses:
    """Units that each run of a layer needs, in the order of the runs in a chunk's forward, and of those in its backward.

    A backward recomputes a group of layers first. BACKWARD_WEIGHT needs no weights.
    """

    forward: tuple[Use, ...] = ()
    backward: tuple[Use, ...] = ()

    def of(self, op: Op) -> tuple[Use, ...]:
        """Return the uses of a compute instruction of this kind."""
        if op is Op.FORWARD:
            return self.forward
        return self.backward if op in (Op.BACKWARD, Op.BACKWARD_INPUT) else ()


@dataclass(frozen=True)
class LiveLimits:
    """Limits of the gathered weights of a rank, in elements.

    - live: most elements of weights that are gathered at any time.
    - ahead: most elements that are gathered before the layer that uses them is the next one to run.
    - reuse: a unit is released at once if its next use is more than this number of elements of other uses away.
    """

    live: int
    ahead: int
    reuse: int = NEVER

    def fit(self, sizes: Mapping[int, int], uses: Sequence[Use]) -> LiveLimits:
        """Return the limits with room for the largest use. Raises ScheduleError if `live` has no room for two units."""
        largest = max((sum(sizes[u] for u in use) for use in uses), default=0)
        two = sum(heapq.nlargest(2, (sizes[u] for u in set(chain(*uses)))))
        if self.live < max(two, largest):
            raise ScheduleError(
                f"{self.live:,} elements of weights may be live, but a rank's two largest layers have {max(two, largest):,}; "
                "set zero_optimization.stage3_max_live_parameters to that number or more"
            )
        return LiveLimits(self.live, min(self.ahead, self.live - largest), self.reuse)


def live_choices(ranks: Sequence[Mapping[int, int]]) -> list[int]:
    """Return limits of live elements to choose from, ascending: room for the 2, 3, 4, ... largest units.

    ranks: unit -> elements, of each rank of a pipeline.
    """
    largest = [sorted(own.values(), reverse=True) for own in ranks]
    counts = range(2, max(2, *map(len, largest)) + 1)
    return sorted({max(1, *(sum(own[:n]) for own in largest)) for n in counts})


class _Residency(NamedTuple):
    """Time in which a unit is gathered, from its first use to its last: numbers of a rank's runs of layers."""

    unit: int
    first: int
    last: int


@dataclass(frozen=True)
class Lifetimes:
    """Sharded weights of a pipeline's layers.

    - uses: of each chunk. sizes: unit -> number of elements.
    """

    uses: Sequence[ChunkUses]
    sizes: Mapping[int, int]
    limits: LiveLimits

    def add_to(self, program: Program, freed: Sequence[Sequence[int]] = ()) -> Program:
        """Put the GATHER_PARAMS and RELEASE_PARAMS of units right before the compute in which they happen.

        freed: for each rank and each of its runs, the elements that may be live, or gathered ahead, beyond the limits; its last
        number holds for all runs to come. Raises ScheduleError if `limits.live` is too small.
        """
        every = zip_longest(program.instructions, freed, fillvalue=())
        return program.with_instructions([self._with_lifetimes(rank, more) for rank, more in every])

    def _with_lifetimes(self, instructions: Sequence[Instruction], freed: Sequence[int]) -> list[Instruction]:
        runs = [self.uses[i.chunk].of(i.op) if i.op in COMPUTE_OPS else () for i in instructions]
        every_run = list(chain(*runs))
        limits = self.limits.fit(self.sizes, every_run)
        more = [*freed, *repeat(freed[-1] if freed else 0, len(every_run) - len(freed))]
        events = deque(_events(every_run, self.sizes, limits, more))
        out: list[Instruction] = []
        end = 0
        for i, its in zip(instructions, runs, strict=True):
            start, end = end, end + len(its)
            while its and events and _is_inside(events[0], start, end):
                run, op, unit = events.popleft()
                out.append(Instruction(op, i.chunk, i.micro_batch, unit, run))
            out.append(i)
        return out


def _is_inside(event: tuple[int, Op, int], start: int, end: int) -> bool:
    """Return whether an event happens in a compute of these runs. At its end units are released, but none is gathered."""
    run, op, _ = event
    return start <= run < end or (run == end and op is Op.RELEASE_PARAMS)


def _events(
    uses: Sequence[Use], sizes: Mapping[int, int], limits: LiveLimits, freed: Sequence[int]
) -> list[tuple[int, Op, int]]:
    """Return (run before which it happens, GATHER_PARAMS or RELEASE_PARAMS, unit) in the order of a rank's list."""
    residencies = sorted(_residencies(uses, sizes, limits, freed), key=lambda r: r.first)
    starts = _starts(residencies, sizes, limits, freed)
    releases = [(r.last + 1, Op.RELEASE_PARAMS, r.unit) for r in residencies]
    gathers = [(start, Op.GATHER_PARAMS, r.unit) for r, start in zip(residencies, starts, strict=True)]
    return sorted(releases + gathers, key=lambda event: event[0])  # stable: what is released before a run comes first


def _starts(
    residencies: Sequence[_Residency], sizes: Mapping[int, int], limits: LiveLimits, freed: Sequence[int]
) -> Iterator[int]:
    """Yield the run before which each unit is gathered: as early as there is room, one after the other."""
    changes = [0] * (len(freed) + 1)
    for residency in residencies:
        changes[residency.first] += sizes[residency.unit]
        changes[residency.last + 1] -= sizes[residency.unit]
    live, ahead = list(accumulate(changes)), [0] * len(freed)
    start = 0
    released: dict[int, int] = {}  # unit -> the run before which its last residency so far ends
    for unit, first, last in residencies:
        earliest, size = max(start, released.get(unit, 0)), sizes[unit]
        start = first
        while start > earliest:
            before = start - 1
            if live[before] + size > limits.live + freed[before] or ahead[before] + size > limits.ahead + freed[before]:
                break
            live[before], ahead[before] = live[before] + size, ahead[before] + size
            start = before
        released[unit] = last + 1
        yield start


def _residencies(
    uses: Sequence[Use], sizes: Mapping[int, int], limits: LiveLimits, freed: Sequence[int]
) -> Iterator[_Residency]:
    """Yield the times in which units are gathered, by Belady's rule in the room that gathering ahead leaves."""
    everything = sum(sizes[u] for u in set(chain(*uses)))
    room = limits.live if everything <= limits.live else limits.live - limits.ahead
    passed = list(accumulate((sum(sizes[u] for u in use) for use in uses), initial=0))
    following: list[dict[int, int]] = [{} for _ in uses]  # of each use: unit -> its next use
    later: dict[int, int] = {}
    for run in range(len(uses) - 1, -1, -1):
        following[run] = {u: later.get(u, NEVER) for u in uses[run]}
        later |= dict.fromkeys(uses[run], run)
    held: dict[int, tuple[int, int, int]] = {}  # unit -> first use, last use so far, next use
    for run, use in enumerate(uses):
        for unit in use:
            first = held[unit][0] if unit in held else run
            held[unit] = first, run, following[run][unit]
        while sum(sizes[u] for u in held) > room + freed[run]:
            # If several units are used next at the same time, release the largest, so that others may stay.
            unit = max((u for u in held if u not in use), key=lambda u: (held[u][2], sizes[u], u))
            yield _Residency(unit, *held.pop(unit)[:2])
        for unit in use:
            first, last, then = held[unit]
            if then == NEVER or passed[then] - passed[run + 1] > limits.reuse:
                del held[unit]
                yield _Residency(unit, first, last)


def peak_live(instructions: Iterable[Instruction], sizes: Mapping[int, int], freed: Sequence[int] = ()) -> int:
    """Return the most that is gathered at any time of a rank's list, less what is freed at that time; see `Lifetimes.add_to`.

    sizes: unit -> elements, bytes, or another number, in which `freed` is given, too.
    """
    own = [(i.run, i.op, i.bucket) for i in instructions if i.run is not None]
    more = [*freed, *repeat(freed[-1] if freed else 0, own[-1][0] + 1 - len(freed) if own else 0)]
    most = live = 0
    for (run, op, unit), (following, *_) in zip(own, [*own[1:], *own[-1:]], strict=True):
        if unit is not None:
            live += sizes[unit] if op is Op.GATHER_PARAMS else -sizes[unit]
            if following > run:  # what is released at a boundary leaves room for what is gathered there
                most = max(most, live - min(more[run:following]))
    return most


def lifetimes_before(instructions: Sequence[Instruction], position: int) -> Sequence[Instruction]:
    """Return the GATHER_PARAMS and RELEASE_PARAMS of units that belong to the compute at `position`: those right before it."""
    before = (instructions[k] for k in range(position - 1, -1, -1))
    return list(takewhile(lambda i: i.op in LIFETIME_OPS and i.run is not None, before))[::-1]


class Boundaries:
    """Splits the computes of a program at their boundaries, in the graph of its waits.

    Each compute that contains a gather, or waits for one, becomes several nodes of the graph: one without length for its start,
    one for each part between two boundaries that matter, the last of which is the compute's own node.

    - uses: the units that each chunk's runs of layers need. Without them a compute has one run, which needs all gathers so far.

    shares: node -> share of the instruction's time that it takes, where that is not all of it; first: compute's node -> the
    node of its start.
    """

    def __init__(self, graph: WaitGraph, program: Program, uses: Sequence[ChunkUses]):
        self._graph, self._uses = graph, uses
        self.shares: dict[int, float] = {}
        self.first: dict[int, int] = {}
        self._parts: dict[int, list[tuple[float, int]]] = {}  # compute -> (share of it that is done then, node)
        if any(i.run is not None for i in graph.nodes):
            for instructions, numbers in zip(program.instructions, graph.lists, strict=True):
                self._split(instructions, numbers)

    def within(self, compute: int, share: float) -> tuple[int, float]:
        """Return the node in which a share of a compute is done, and the share of that node's time until then."""
        parts = self._parts.get(compute)
        if parts is None:
            return compute, share
        done, node = parts[bisect_left(parts, (share - 1e-12, -1))]
        length = self.shares[node]
        return node, min(1.0, (share - done + length) / length)

    def _split(self, instructions: Sequence[Instruction], numbers: Sequence[int]) -> None:
        line = _Line(self._graph)
        coming: deque[tuple[Instruction, int]] = deque()
        start = 0  # number of the compute's first run, of all on the rank
        for i, number in zip(instructions, numbers, strict=True):
            if i.run is not None:
                coming.append((i, number))
                self.shares |= {number: 0.0} if i.op is Op.RELEASE_PARAMS else {}
            elif i.op in COMPUTE_OPS:
                runs = self._uses[i.chunk].of(i.op) if self._uses else (line.units(coming),)
                cut = _Cut(self._graph, number, len(runs), line)
                for boundary, use in enumerate(runs):
                    while coming and (not self._uses or (coming[0][0].run or 0) <= start + boundary):
                        line.put(*coming.popleft(), after=cut.reach(boundary))
                    cut.wait(boundary, line.take(use))
                line.run_beside(number)
                while coming:
                    line.put(*coming.popleft(), after=number)
                start += len(runs)
                self._keep(number, cut)

    def _keep(self, compute: int, cut: _Cut) -> None:
        if cut.nodes:
            parts = cut.close()
            self.first[compute] = cut.nodes[0]
            self.shares |= {node: share for share, node in parts}
            done, self._parts[compute] = 0.0, []
            for share, node in parts[1:]:
                done += share
                self._parts[compute].append((done, node))


class _Line:
    """The gathers of a rank, which run one after the other on a communicator of their own."""

    def __init__(self, graph: WaitGraph):
        self._waits, self._beside = graph.waits, graph.beside
        self._last: list[int] = []
        self._arriving: dict[int, int] = {}  # unit -> its gather, until a run has waited for it

    def units(self, coming: Sequence[tuple[Instruction, int]]) -> Use:
        """Return the units of these gathers and of those that nothing has waited for."""
        units = (i.bucket for i, _ in coming if i.op is Op.GATHER_PARAMS and i.bucket is not None)
        return tuple(dict.fromkeys((*self._arriving, *units)))

    def put(self, i: Instruction, number: int, after: int) -> None:
        """Let a GATHER_PARAMS or RELEASE_PARAMS start when the node `after` ends."""
        self._waits[number] = [after]
        if i.op is Op.GATHER_PARAMS and i.bucket is not None:
            self._waits[number] += self._last
            self.run_beside(number)
            self._last, self._arriving[i.bucket] = [number], number

    def run_beside(self, node: int) -> None:
        """Note the last gather that may still run when a node begins."""
        for gather in self._last:
            self._beside[node] = gather

    def take(self, use: Use) -> list[int]:
        """Return the gathers that a run waits for."""
        return [self._arriving.pop(unit) for unit in use if unit in self._arriving]


class _Cut:
    """Cut of a compute instruction, of `runs` runs, into parts. nodes: its new nodes, in order."""

    def __init__(self, graph: WaitGraph, compute: int, runs: int, line: _Line):
        self._graph, self._compute, self._runs, self._line = graph, compute, runs, line
        self._done = 0
        self._shares: list[float] = []
        self._stalls: list[int] = []
        self.nodes: list[int] = []

    def reach(self, boundary: int) -> int:
        """Return the node that ends when a boundary is reached: before the run of this number."""
        if not self.nodes:
            self._add(0.0, self._graph.waits[self._compute])
        if boundary > self._done:
            self._add((boundary - self._done) / self._runs, [self.nodes[-1], *self._stalls])
            self._done, self._stalls = boundary, []
        return self.nodes[-1]

    def _add(self, share: float, waits: list[int]) -> None:
        self.nodes.append(len(self._graph.nodes))
        self._line.run_beside(self.nodes[-1])
        self._shares.append(share)
        self._graph.nodes.append(self._graph.nodes[self._compute])
        self._graph.waits.append(waits)

    def wait(self, boundary: int, gathers: list[int]) -> None:
        """Let the run after a boundary wait for gathers."""
        if gathers:
            self.reach(boundary)
            self._stalls += gathers

    def close(self) -> list[tuple[float, int]]:
        """Make the compute's own node the last part; return (share of the compute, node) of all parts."""
        self._graph.waits[self._compute] = [self.nodes[-1], *self._stalls]
        shares = [*self._shares, (self._runs - self._done) / self._runs]
        return list(zip(shares, [*self.nodes, self._compute], strict=True))
