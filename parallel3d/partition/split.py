"""The exact min-max split of a chain of layers into contiguous parts.

The largest part cost, the bottleneck, sets the pace of a pipeline: here it is minimal for certain, by dynamic
programming over all bounds. DeepSpeed's `partition_balanced` minimizes max - min instead, by a recurrence that is not
exact for it. Where stages hold several chunks, their sums set the pace: see search.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import networkx as nx
import numpy as np

from parallel3d.errors import PartitionError
from parallel3d.partition.chain import FloatArray, Partition, segment_costs
from parallel3d.partition.limit import StageLimit, refusal, stage_bytes
from parallel3d.partition.search import Search


def partition_layers(
    chain: nx.DiGraph,
    num_parts: int,
    what: str = "",
    placement: Sequence[int] | None = None,
    limit: StageLimit | None = None,
    step: Callable[[Sequence[float]], float] | None = None,
    paces: Sequence[float] | None = None,
) -> Partition:
    """The split of `chain` into `num_parts` non-empty parts with the smallest bottleneck.

    The layers of one tie key count once, with the largest of their costs, on each part that holds any of them. Of all
    optimal splits it takes the smallest sum of squared part costs, then the fewest layers in the last parts.

    placement: the stage that holds each part, each its own by default. Where a stage holds several, what is made small is
    the largest sum of a stage's parts, then the largest part, then the sum of squares: exactly where there are at most
    search.MOST_SPLITS splits, else by a search from many starts, which gives the same split every time.
    limit: only splits within it count. step: the length of a step for the parts' costs, by which one is chosen of several
    splits, the more even of which have somewhat larger sums. paces: by which each part's cost is multiplied, as where stages
    lie on devices of unlike speeds.

    Raises PartitionError for a graph that is no chain, a cost that is no finite number >= 0, more parts than layers (the
    message then calls the parts `what`, such as "5 stages x 5 chunks"), or a limit that no split found keeps to.
    """
    cost = segment_costs(chain)
    num_layers = len(cost) - 1
    if num_parts < 1:
        raise PartitionError(f"{num_parts} parts asked for; ask for 1 or more")
    if num_parts > num_layers:
        raise PartitionError(
            f"{num_layers} layers can't fill {what or f'{num_parts} stages'}; each needs at least one layer: "
            f"make stages x chunks at most {num_layers}, or add layers"
        )
    placement = placement or range(num_parts)
    factors = np.asarray(paces if paces is not None else [], dtype=np.float64)
    of_parts = cost * factors[:, None, None] if paces is not None else np.broadcast_to(cost, (num_parts, *cost.shape))
    if len(set(placement)) == num_parts:
        return _cut(_one_chunk(of_parts, placement, limit), of_parts)
    found = [_cut(bounds, of_parts) for bounds in _several_chunks(of_parts, placement, limit, step is not None)]
    return min(found, key=lambda partition: step(partition.costs)) if step is not None else found[0]


def _cut(bounds: Sequence[int], of_parts: FloatArray) -> Partition:
    pairs = zip(of_parts, pairwise(bounds), strict=True)
    return Partition(tuple(bounds), tuple(float(cost[a, b]) for cost, (a, b) in pairs))


def _one_chunk(cost: FloatArray, placement: Sequence[int], limit: StageLimit | None) -> list[int]:
    """cost: [parts, n + 1, n + 1]."""
    if limit is None:
        return _certain(_matrices(cost))
    held = limit.chunk_bytes()
    bounds = _min_max([np.where(part <= limit.limit, its, np.inf) for its, part in zip(cost, held, strict=True)])
    if bounds is None:
        raise refusal(limit.limit, stage_bytes(held, _certain(list(held)), placement), exact=True)
    return bounds


# How much the largest chunk weighs beside the largest stage, in the splits among which a step's length decides.
_EVENNESS = (0.0, 0.1, 0.25, 0.5, 1.0)


def _several_chunks(
    cost: FloatArray, placement: Sequence[int], limit: StageLimit | None, several: bool
) -> list[Sequence[int]]:
    """The best split; with `several` also those for which the largest chunk weighs more, each once."""
    weights = _EVENNESS if several else _EVENNESS[:1]
    start = _certain(_matrices(cost))
    if limit is None:
        found = [Search(cost, placement, evenness=w).best([start]) for w in weights]
        return list(dict.fromkeys([*found, tuple(start)] if several else found))
    # What holds least lies within the limit if anything that is found does.
    held = limit.chunk_bytes()
    leanest = Search(held, placement).best([_certain(list(held))])
    loads = stage_bytes(held, leanest, placement)
    if max(loads) > limit.limit:
        raise refusal(limit.limit, loads, exact=Search.is_exact(cost.shape[-1] - 1, len(placement)))
    found = [Search(cost, placement, held, limit.limit, w).best([start, leanest]) for w in weights]
    return list(dict.fromkeys(found))


def _certain(cost: Sequence[FloatArray]) -> list[int]:
    bounds = _min_max(cost)
    assert bounds is not None  # no chunk is empty, and nothing else is infinite
    return bounds


def _matrices(cost: FloatArray) -> list[FloatArray]:
    """One a part: the same one for all where they are alike, for what is found of it to be found once."""
    return [cost[0]] * len(cost) if cost.strides[0] == 0 else list(cost)


def _min_max(cost: Sequence[FloatArray]) -> list[int] | None:
    """Bounds of the best split, where part k as [a, b) costs cost[k][a, b]; None where every split costs infinity."""
    num_layers = len(cost[0]) - 1
    bottleneck = _best_prefixes(np.maximum, cost, _attained(cost))[-1][-1]
    if not math.isfinite(bottleneck):
        return None
    # Scaled by a power of two: squares of whole numbers stay exact, and no square overflows.
    known: dict[int, FloatArray] = {}
    for part in cost:
        if id(part) not in known:
            scaled = np.ldexp(part, -math.frexp(bottleneck)[1])
            known[id(part)] = np.where(part <= bottleneck, scaled * scaled, np.inf)
    squares = [known[id(part)] for part in cost]
    prefixes = _best_prefixes(np.add, squares, np.inf)
    bounds = [num_layers]
    for best, part in zip(reversed(prefixes[:-1]), reversed(squares), strict=True):
        last_part = best + part[:, bounds[-1]]
        bounds.append(int(np.flatnonzero(last_part == last_part.min())[-1]))
    return bounds[::-1]


def _attained(cost: Sequence[FloatArray]) -> float:
    """The largest part of a split that is about even: no part of the best one is larger. Infinity where all together are."""
    num_layers, num_parts = len(cost[0]) - 1, len(cost)
    sums, place = cost[0][0, 1:], np.arange(num_parts + 1)
    if not math.isfinite(sums[-1]):
        return math.inf
    even = np.searchsorted(sums, place / num_parts * sums[-1])
    inner = np.maximum.accumulate(np.maximum(even - place, 0)) + place
    bounds = np.minimum(inner, num_layers - num_parts + place)
    bounds[0], bounds[-1] = 0, num_layers
    return max(float(part[a, b]) for part, (a, b) in zip(cost, pairwise(bounds.tolist()), strict=True))


def _best_prefixes(combine: np.ufunc, cost: Sequence[FloatArray], most: float) -> list[FloatArray]:
    """Row k, element b: the smallest value of layers [0, b) in k parts, costs joined by `combine` (sum or max).

    Parts that cost more than `most`, or infinity, are of no use: none of more layers than the others have is looked at.
    """
    different = {id(part): part for part in cost}
    ends = np.arange(len(cost[0]))
    useful = [np.argwhere((part <= most) & np.isfinite(part)) for part in different.values()]
    longest = max((int((pairs[:, 1] - pairs[:, 0]).max(initial=1)) for pairs in useful), default=1)
    starts = ends - np.arange(1, longest + 1)[:, None]
    inside = np.maximum(starts, 0)
    bands = {key: np.where(starts < 0, np.inf, part[inside, ends]) for key, part in different.items()}
    rows = [np.full(len(ends), np.inf)]
    rows[0][0] = 0.0
    for part in cost:
        rows.append(combine(rows[-1][inside], bands[id(part)]).min(axis=0))
    return rows
