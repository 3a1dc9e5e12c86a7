"""Boundaries of layers inside computes, at which sharded weights are gathered, released and waited for."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from parallel3d.schedule.instructions import COMPUTE_OPS, Instruction, Op, Program
from parallel3d.schedule.lifetimes import ChunkUses, Use
from parallel3d.schedule.order import WaitGraph


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
