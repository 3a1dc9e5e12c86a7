"""Layers -> stages: the exact min-max split of a chain of layers into contiguous parts.

The largest part cost, the bottleneck, sets the pace of a pipeline: here it is minimal for certain, by dynamic
programming over all bounds. DeepSpeed's `partition_balanced` minimizes max - min instead, by a recurrence that is not
exact for it.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from numbers import Real
from typing import Any

import networkx as nx
import numpy as np
import numpy.typing as npt

from parallel3d.errors import PartitionError, nearest

# "uniform", "parameters", "type:REGEX", bounds [0, ..., n] or {"weights": [one number a layer]}
Method = str | Sequence[int] | Mapping[str, Sequence[float]]

_FloatArray = npt.NDArray[np.float64]
_SHOWN = 4  # layers or runs of equal layers that a message or a table row names before it abbreviates


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


def partition_layers(chain: nx.DiGraph, num_parts: int, what: str = "") -> Partition:
    """The split of `chain` into `num_parts` non-empty parts with the smallest bottleneck.

    The layers of one tie key count once, with the largest of their costs, on each part that holds any of them. Of all
    optimal splits it takes the smallest sum of squared part costs, then the fewest layers in the last parts.
    Raises PartitionError for a graph that is no chain, a cost that is no finite number >= 0, or more parts than layers
    (the message then calls the parts `what`, such as "5 stages x 5 chunks").
    """
    cost = _segment_costs(chain)
    num_layers = len(cost) - 1
    if num_parts < 1:
        raise PartitionError(f"{num_parts} parts asked for; ask for 1 or more")
    if num_parts > num_layers:
        raise PartitionError(
            f"{num_layers} layers can't fill {what or f'{num_parts} stages'}; each needs at least one layer: "
            f"make stages x chunks at most {num_layers}, or add layers"
        )
    bottleneck = _best_prefixes(np.maximum, cost, num_parts)[-1][-1]
    # Scaled by a power of two: squares of whole numbers stay exact, and no square overflows.
    scaled = np.ldexp(cost, -math.frexp(bottleneck)[1])
    squares = np.where(cost <= bottleneck, scaled * scaled, np.inf)
    prefixes = _best_prefixes(np.add, squares, num_parts)
    bounds = [num_layers]
    for best in reversed(prefixes[:-1]):
        last_part = best + squares[:, bounds[-1]]
        bounds.append(int(np.flatnonzero(last_part == last_part.min())[-1]))
    return _partition(bounds[::-1], cost)


def resolve_partition(
    method: Method,
    chain_costs: Sequence[float],
    names: Sequence[str],
    tie_keys: Sequence[str | None],
    num_parts: int,
    type_names: Sequence[str] = (),
    what: str = "",
) -> Partition:
    """Split layers into `num_parts` by `method`; PartitionError, with values and remedy, if that can't be done.

    "uniform": every layer costs 1. "parameters": `chain_costs`, ties counted once a part. "type:REGEX": a layer whose
    class name (`type_names`, else `names`) matches, case ignored, costs 1, any other 0. {"weights": [...]}: these,
    without ties. Bounds [0, ..., n]: as given, costed as "parameters" are. `what` is as in `partition_layers`.
    """
    if isinstance(method, str):
        return partition_layers(_named_chain(method, chain_costs, names, tie_keys, type_names), num_parts, what)
    if isinstance(method, Mapping):
        return partition_layers(layer_chain(_weights(method, names), names), num_parts, what)
    if isinstance(method, (list, tuple)):
        _check_bounds(method, names, num_parts)
        return _partition(method, _segment_costs(layer_chain(chain_costs, names, tie_keys)))
    raise _unknown_method(method)


def _named_chain(
    method: str,
    chain_costs: Sequence[float],
    names: Sequence[str],
    tie_keys: Sequence[str | None],
    type_names: Sequence[str],
) -> nx.DiGraph:
    kind, colon, pattern = method.partition(":")
    match kind.lower(), colon:
        case "uniform", "":
            return layer_chain([1.0] * len(names), names)
        case "parameters", "":
            return layer_chain(chain_costs, names, tie_keys)
        case "type", ":":
            return layer_chain(_type_costs(pattern, type_names or names), names)
        case _:
            raise _unknown_method(method)


def _unknown_method(method: object) -> PartitionError:
    word = method.lower().partition(":")[0] if isinstance(method, str) else ""
    hint = nearest(word, ("uniform", "parameters", "type")).replace("type", "type:REGEX")
    return PartitionError(
        f"unknown partition method {method!r}.{hint} Use 'uniform', 'parameters', 'type:REGEX', "
        'bounds such as [0, 3, 8], or {"weights": [one number a layer]}'
    )


def _type_costs(pattern: str, type_names: Sequence[str]) -> list[float]:
    try:
        regex = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise PartitionError(f"'type:{pattern}' is no regular expression: {error}; correct the pattern") from error
    costs = [1.0 if regex.search(name) else 0.0 for name in type_names]
    if not any(costs):
        present = ", ".join(dict.fromkeys(type_names))
        raise PartitionError(f"'type:{pattern}' matches none of the {len(costs)} layers; their classes are {present}")
    return costs


def _weights(method: Mapping[str, Sequence[float]], names: Sequence[str]) -> Sequence[float]:
    if set(method) != {"weights"}:
        raise PartitionError(f'partition {dict(method)!r} has keys {list(method)}; write {{"weights": [...]}}')
    weights = method["weights"]
    if not isinstance(weights, (list, tuple)):
        raise PartitionError(f"weights are {weights!r}; give a list of {len(names)} numbers, one a layer")
    if len(weights) != len(names):
        raise PartitionError(f"{len(weights)} weights for {len(names)} layers; give one weight a layer")
    return weights


def _check_bounds(bounds: Sequence[int], names: Sequence[str], num_parts: int) -> None:
    shown, n = f"bounds {list(bounds)}", len(names)
    if not all(isinstance(bound, int) for bound in bounds):
        raise PartitionError(f"{shown} must be whole numbers, each the first layer of a part")
    if len(bounds) != num_parts + 1:
        raise PartitionError(
            f"{shown} make {max(len(bounds) - 1, 0)} parts, but there are {num_parts}; give {num_parts + 1} bounds"
        )
    for part, (first, end) in enumerate(pairwise(bounds)):
        if first >= end:
            raise PartitionError(f"{shown} give part {part} no layer; each bound must be larger than the one before")
    if bounds[0] < 0 or bounds[-1] > n:
        raise PartitionError(f"{shown} reach outside layers 0 to {n - 1}; start at 0 and end at {n}")
    left_out = [*range(bounds[0]), *range(bounds[-1], n)]
    if left_out:
        listed = ", ".join(f"{i} ({names[i]})" for i in left_out[:_SHOWN]) + ", ..." * (len(left_out) > _SHOWN)
        raise PartitionError(f"{shown} leave out {len(left_out)} of {n} layers: {listed}; start at 0 and end at {n}")


def _segment_costs(chain: nx.DiGraph) -> _FloatArray:
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


def _best_prefixes(combine: np.ufunc, cost: _FloatArray, num_parts: int) -> list[_FloatArray]:
    """Row k, element b: the smallest value of layers [0, b) in k parts, costs joined by `combine` (sum or max)."""
    rows = [np.full(len(cost), np.inf)]
    rows[0][0] = 0.0
    for _ in range(num_parts):
        rows.append(combine(rows[-1][:, None], cost).min(axis=0))
    return rows


def _partition(bounds: Sequence[int], segment_costs: _FloatArray) -> Partition:
    costs = (float(segment_costs[a, b]) for a, b in pairwise(bounds))
    return Partition(tuple(bounds), tuple(costs))


def _in_short(names: Sequence[str]) -> str:
    """Names with runs folded: "Embedding, 4 x Block"."""
    runs = [(name, len(list(run))) for name, run in groupby(names)]
    folded = [name if count == 1 else f"{count} x {name}" for name, count in runs]
    return ", ".join(folded[:_SHOWN]) + ", ..." * (len(folded) > _SHOWN)
