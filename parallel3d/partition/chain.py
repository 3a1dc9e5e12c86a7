"""A chain of layers with costs, and its cut into contiguous parts."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from numbers import Real
from typing import Any

import networkx as nx
import numpy as np
import numpy.typing as npt

from parallel3d.errors import PartitionError

FloatArray = npt.NDArray[np.float64]
SHOWN = 4  # layers or runs of equal layers that a message or a table row names before it abbreviates


@dataclass(frozen=True)
class Partition:
    """Contiguous parts of a chain: part i holds layers [bounds[i], bounds[i + 1]) and costs costs[i]."""

    bounds: tuple[int, ...]
    costs: tuple[float, ...]

    @property
    def num_parts(self) -> int:
        """Number of parts, each of at least one layer."""
        return len(self.costs)

    @property
    def bottleneck(self) -> float:
        """The largest part cost."""
        return max(self.costs)

    def layers(self, part: int) -> range:
        """The layers of `part`, 0 <= part < num_parts."""
        return range(self.bounds[part], self.bounds[part + 1])

    def part_of(self, layer: int) -> int:
        """The part that holds `layer`; PartitionError if there is no such layer."""
        if layer not in range(self.bounds[-1]):
            raise PartitionError(f"no layer {layer}: the chain has layers 0 to {self.bounds[-1] - 1}")
        return bisect_right(self.bounds, layer) - 1

    def loads(self, placement: Sequence[int]) -> tuple[float, ...]:
        """Return the total cost of each stage, if part i is on stage placement[i]."""
        loads = [0.0] * (max(placement) + 1)
        for stage, cost in zip(placement, self.costs, strict=True):
            loads[stage] += cost
        return tuple(loads)

    def table(self, names: Sequence[str], label: str = "stage") -> str:
        """One line a part: layer range, number of layers, cost, share of the bottleneck, the layers' names in short."""
        rows = [(label, "layers", "count", "cost", "of max", "")]
        for part, cost in enumerate(self.costs):
            held = self.layers(part)
            span = f"{held[0]}-{held[-1]}" if len(held) > 1 else f"{held[0]}"
            share = f"{cost / self.bottleneck:.0%}" if self.bottleneck else "-"
            shown = f"{cost:,.0f}" if float(cost).is_integer() else f"{cost:.6g}"
            rows.append((f"{part}", span, f"{len(held)}", shown, share, _in_short([names[i] for i in held])))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = (
            "  ".join(cell.rjust(w) for cell, w in zip(row[:-1], widths, strict=False)) + "  " + row[-1] for row in rows
        )
        return "\n".join(line.rstrip() for line in lines)


def layer_chain(
    costs: Sequence[float], names: Sequence[str] | None = None, tie_keys: Sequence[str | None] | None = None
) -> nx.DiGraph:
    """The graph 0 -> 1 -> ... -> n-1 whose nodes carry cost, name and tie; PartitionError if the lengths differ."""
    names = [f"layer{i}" for i in range(len(costs))] if names is None else names
    tie_keys = [None] * len(costs) if tie_keys is None else tie_keys
    if not len(costs) == len(names) == len(tie_keys):
        raise PartitionError(
            f"{len(costs)} costs, {len(names)} names and {len(tie_keys)} tie keys; give one of each a layer"
        )
    chain: nx.DiGraph = nx.DiGraph()
    for i, (cost, name, tie) in enumerate(zip(costs, names, tie_keys, strict=True)):
        chain.add_node(i, cost=cost, name=name, tie=tie)
    chain.add_edges_from(pairwise(range(len(costs))))
    return chain


def segment_costs(chain: nx.DiGraph) -> FloatArray:
    """[n + 1, n + 1]: element (a, b) is the cost of layers [a, b) as one part, inf where that is empty."""
    n = chain.number_of_nodes()
    if set(chain.nodes) != set(range(n)) or set(chain.edges) != {(i, i + 1) for i in range(n - 1)}:
        raise PartitionError(f"a graph of {n} nodes that is not the chain 0 -> 1 -> ... ; make it with layer_chain()")
    costs = [_checked_cost(i, chain.nodes[i]) for i in range(n)]
    by_tie: dict[str, list[int]] = {}
    for i in range(n):
        if chain.nodes[i]["tie"] is not None:
            by_tie.setdefault(chain.nodes[i]["tie"], []).append(i)
    previous = np.full(n, -1)  # the layer before i with the same tie key
    for tied in by_tie.values():
        shared = max(costs[i] for i in tied)
        for before, i in zip([-1, *tied], tied, strict=False):
            costs[i], previous[i] = shared, before
    start, layer = np.arange(n + 1)[:, None], np.arange(n)[None, :]
    # A tied layer counts in a part that starts at `start` only if it is the first of its key there.
    counted = np.where((layer >= start) & (previous < start), np.array(costs), 0.0)
    segments = np.full((n + 1, n + 1), np.inf)
    segments[:, 1:] = np.where(layer >= start, np.cumsum(counted, axis=1), np.inf)
    return segments


def _checked_cost(layer: int, node: Mapping[str, Any]) -> float:
    cost = node["cost"]
    if not isinstance(cost, Real) or not math.isfinite(cost) or cost < 0:
        raise PartitionError(f"layer {layer} ({node['name']}) costs {cost!r}; a cost must be a finite number >= 0")
    return float(cost)


def cut(bounds: Sequence[int], costs: FloatArray) -> Partition:
    """The parts between these bounds, with `segment_costs` of the chain."""
    return Partition(tuple(bounds), tuple(float(costs[a, b]) for a, b in pairwise(bounds)))


def _in_short(names: Sequence[str]) -> str:
    """Names with runs folded: "Embedding, 4 x Block"."""
    runs = [(name, len(list(run))) for name, run in groupby(names)]
    folded = [name if count == 1 else f"{count} x {name}" for name, count in runs]
    return ", ".join(folded[:SHOWN]) + ", ..." * (len(folded) > SHOWN)
