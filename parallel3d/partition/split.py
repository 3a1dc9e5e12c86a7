"""The exact min-max split of a chain of layers into contiguous parts.

The largest part cost, the bottleneck, sets the pace of a pipeline: here it is minimal for certain, by dynamic
programming over all bounds. DeepSpeed's `partition_balanced` minimizes max - min instead, by a recurrence that is not
exact for it. Where stages hold several chunks, their sums set the pace: see search.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from parallel3d.errors import PartitionError
from parallel3d.partition.chain import FloatArray, Partition, cut
from parallel3d.partition.limit import StageLimit, refusal
from parallel3d.partition.search import Search


def partition_layers(
    segments: FloatArray,
    num_parts: int,
    what: str = "",
    placement: Sequence[int] | None = None,
    limit: StageLimit | None = None,
    step: Callable[[Sequence[float]], float] | None = None,
    paces: Sequence[float] | None = None,
) -> Partition:
    """The split of a chain of layers into `num_parts` non-empty parts with the smallest bottleneck.

    Of all optimal splits it takes the smallest sum of squared part costs, then the fewest layers in the last parts.

    segments: costs of all possible parts, see segment_costs.
    placement: the stage that holds each part, each its own by default. Where a stage holds several, what is made small is
    the largest sum of a stage's parts, then the largest part, then the sum of squares: exactly where there are at most
    search.MOST_SPLITS splits, else by a search from many starts, which gives the same split every time.
    limit: only splits within it count. step: the length of a step for the parts' costs, by which one is chosen of several
    splits, the more even of which have somewhat larger sums. paces: by which each part's cost is multiplied, as where stages
    lie on devices of unlike speeds.

    Raises PartitionError for more parts than layers (the message then calls the parts `what`, such as "5 stages x 5 chunks"),
    or a limit that no split found keeps to.
    """
    num_layers = len(segments) - 1
    if num_parts < 1:
        raise PartitionError(f"{num_parts} parts asked for; ask for 1 or more")
    if num_parts > num_layers:
        raise PartitionError(
            f"{num_layers} layers can't fill {what or f'{num_parts} stages'}; each needs at least one layer: "
            f"make stages x chunks at most {num_layers}, or add layers"
        )
    placement = placement or range(num_parts)
    of_parts: FloatArray = np.broadcast_to(segments, (num_parts, *segments.shape))
    if paces is not None:
        of_parts = segments * np.asarray(paces, dtype=np.float64)[:, None, None]
    if len(set(placement)) == num_parts:
        return cut(_one_chunk(of_parts, placement, limit), of_parts)
    found = [cut(bounds, of_parts) for bounds in _several_chunks(of_parts, placement, limit, step is not None)]
    return min(found, key=lambda partition: step(partition.costs)) if step is not None else found[0]


def _one_chunk(cost: FloatArray, placement: Sequence[int], limit: StageLimit | None) -> list[int]:
    """cost: [parts, n + 1, n + 1]."""
    if limit is None:
        return _certain(cost)
    held = limit.chunk_bytes()
    bounds = _min_max(np.where(held <= limit.limit, cost, np.inf))
    if bounds is None:
        raise refusal(limit.limit, cut(_certain(held), held).loads(placement), exact=True)
    return bounds


# How much the largest chunk weighs beside the largest stage, in the splits among which a step's length decides.
_EVENNESS = (0.0, 0.1, 0.25, 0.5, 1.0)


def _several_chunks(
    cost: FloatArray, placement: Sequence[int], limit: StageLimit | None, several: bool
) -> list[Sequence[int]]:
    """The best split; with `several` also those for which the largest chunk weighs more, each once."""
    weights = _EVENNESS if several else _EVENNESS[:1]
    start = _certain(cost)
    if limit is None:
        found = [Search(cost, placement, evenness=w).best([start]) for w in weights]
        return list(dict.fromkeys([*found, tuple(start)] if several else found))
    # What holds least lies within the limit if anything that is found does.
    held = limit.chunk_bytes()
    leanest = Search(held, placement).best([_certain(held)])
    loads = cut(leanest, held).loads(placement)
    if max(loads) > limit.limit:
        raise refusal(limit.limit, loads, exact=Search.is_exact(cost.shape[-1] - 1, len(placement)))
    found = [Search(cost, placement, held, limit.limit, w).best([start, leanest]) for w in weights]
    return list(dict.fromkeys(found))


def _certain(cost: FloatArray) -> list[int]:
    bounds = _min_max(cost)
    assert bounds is not None  # no chunk is empty, and nothing else is infinite
    return bounds


def _different(cost: FloatArray) -> FloatArray:
    """One matrix where those of all parts are the same memory, for what is found of it to be found once."""
    return cost[:1] if cost.strides[0] == 0 else cost


def _min_max(cost: FloatArray) -> list[int] | None:
    """Bounds of the best split, where part k as [a, b) costs cost[k, a, b]; None where every split costs infinity."""
    bottleneck = _best_prefixes(np.maximum, cost, _attained(cost))[-1][-1]
    if not math.isfinite(bottleneck):
        return None
    # Scaled by a power of two: squares of whole numbers stay exact, and no square overflows.
    scaled = np.ldexp(_different(cost), -math.frexp(bottleneck)[1])
    squares = np.broadcast_to(np.where(_different(cost) <= bottleneck, scaled * scaled, np.inf), cost.shape)
    prefixes = _best_prefixes(np.add, squares, np.inf)
    bounds = [cost.shape[-1] - 1]
    for best, part in zip(reversed(prefixes[:-1]), squares[::-1], strict=True):
        last_part = best + part[:, bounds[-1]]
        bounds.append(int(np.flatnonzero(last_part == last_part.min())[-1]))
    return bounds[::-1]


def _attained(cost: FloatArray) -> float:
    """The largest part of a split that is about even: no part of the best one is larger. Infinity where all together are."""
    num_layers, num_parts = cost.shape[-1] - 1, len(cost)
    sums, place = cost[0][0, 1:], np.arange(num_parts + 1)
    if not math.isfinite(sums[-1]):
        return math.inf
    even = np.searchsorted(sums, place / num_parts * sums[-1])
    inner = np.maximum.accumulate(np.maximum(even - place, 0)) + place
    bounds = np.minimum(inner, num_layers - num_parts + place)
    bounds[0], bounds[-1] = 0, num_layers
    return cut(bounds.tolist(), cost).bottleneck


def _best_prefixes(combine: np.ufunc, cost: FloatArray, most: float) -> list[FloatArray]:
    """Row k, element b: the smallest value of layers [0, b) in k parts, costs joined by `combine` (sum or max).

    Parts that cost more than `most`, or infinity, are of no use: none of more layers than the others have is looked at.
    """
    different, ends = _different(cost), np.arange(cost.shape[-1])
    _, first, end = np.nonzero((different <= most) & np.isfinite(different))
    starts = ends - np.arange(1, (end - first).max(initial=1) + 1)[:, None]
    inside = np.maximum(starts, 0)
    bands = np.broadcast_to(np.where(starts < 0, np.inf, different[:, inside, ends]), (len(cost), *starts.shape))
    rows = [np.full(len(ends), np.inf)]
    rows[0][0] = 0.0
    for band in bands:
        rows.append(combine(rows[-1][inside], band).min(axis=0))
    return rows
