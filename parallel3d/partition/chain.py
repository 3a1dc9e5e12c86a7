"""A chain of layers with costs, and its cut into contiguous parts."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from numbers import Real

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
        """Return the layers of `part`, 0 <= part < num_parts."""
        return range(self.bounds[part], self.bounds[part + 1])

    def part_of(self, layer: int) -> int:
        """Return the part that holds `layer`. Raises PartitionError if there is no such layer."""
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
        """Format a line for each part: layer range, number of layers, cost, share of the bottleneck, the layers' names."""
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


def segment_costs(
    costs: Sequence[float], names: Sequence[str] | None = None, tie_keys: Sequence[str | None] | None = None
) -> FloatArray:
    """Return [n + 1, n + 1]: element (a, b) is the cost of layers [a, b) as one part, inf where that is empty.

    Layers with the same tie key (tie_keys has one for each layer, None for no tie) count once a part, with the largest of their
    costs. Raises PartitionError if the lengths differ, or for a cost that is no finite number >= 0.
    """
    n = len(costs)
    names = [f"layer{i}" for i in range(n)] if names is None else names
    tie_keys = [None] * n if tie_keys is None else tie_keys
    if not n == len(names) == len(tie_keys):
        raise PartitionError(f"{n} costs, {len(names)} names and {len(tie_keys)} tie keys; give one of each a layer")
    for layer, cost in enumerate(costs):
        if not isinstance(cost, Real) or not math.isfinite(cost) or cost < 0:
            raise PartitionError(f"layer {layer} ({names[layer]}) costs {cost!r}; a cost must be a finite number >= 0")
    counting = np.array(costs, dtype=np.float64)
    previous = np.full(n, -1)  # the layer before with the same tie key
    for key in {key for key in tie_keys if key is not None}:
        tied = [i for i, other in enumerate(tie_keys) if other == key]
        counting[tied] = max(costs[i] for i in tied)
        previous[tied[1:]] = tied[:-1]
    start, layers = np.arange(n + 1)[:, None], np.arange(n)[None, :]
    # A tied layer counts in a part that starts at `start` only if it is the first of its key there.
    counted = np.where((layers >= start) & (previous < start), counting, 0.0)
    segments = np.full((n + 1, n + 1), np.inf)
    segments[:, 1:] = np.where(layers >= start, np.cumsum(counted, axis=1), np.inf)
    return segments


def cut(bounds: Sequence[int], segments: FloatArray) -> Partition:
    """Return the parts between these bounds. segments: as segment_costs returns them, for all parts or for each."""
    of_parts = np.broadcast_to(segments, (len(bounds) - 1, *segments.shape[-2:]))
    pairs = zip(of_parts, pairwise(bounds), strict=True)
    return Partition(tuple(bounds), tuple(float(part[a, b]) for part, (a, b) in pairs))


def _in_short(names: Sequence[str]) -> str:
    """Fold runs of names: "Embedding, 4 x Block"."""
    runs = [(name, len(list(run))) for name, run in groupby(names)]
    folded = [name if count == 1 else f"{count} x {name}" for name, count in runs]
    return ", ".join(folded[:SHOWN]) + ", ..." * (len(folded) > SHOWN)
