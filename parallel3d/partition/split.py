"""The exact min-max split of a chain of layers into contiguous parts, whose costs a method gives.

The largest part cost, the bottleneck, sets the pace of a pipeline: here it is minimal for certain, by dynamic
programming over all bounds. DeepSpeed's `partition_balanced` minimizes max - min instead, by a recurrence that is not
exact for it. Where stages hold several chunks, their sums set the pace: see search.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from parallel3d.errors import PartitionError, nearest
from parallel3d.partition.chain import SHOWN, FloatArray, Partition, cut, segment_costs
from parallel3d.partition.search import Search

# Weights of the largest chunk relative to the largest stage, in the splits from which the step's length selects one.
_EVENNESS = (0.0, 0.25)


@dataclass(frozen=True)
class StageLimit:
    """Limit to the bytes that a stage may hold.

    Layer k on chunk c always takes state[k] bytes, and activations[k] for each of the in_flight[c] micro-batches whose
    activations the chunk holds at once. Layers with the same tie key (None for no tie) hold their state once a part.
    """

    limit: float
    state: Sequence[float]
    activations: Sequence[float]
    in_flight: Sequence[int]
    tie_keys: Sequence[str | None] | None = None

    def chunk_bytes(self) -> FloatArray:
        """Return [chunks, n + 1, n + 1]: bytes of layers [a, b) as chunk c at (c, a, b), inf where that is empty."""
        state = segment_costs(self.state, tie_keys=self.tie_keys)
        activations = segment_costs(self.activations)
        held = np.array(self.in_flight, dtype=np.float64)[:, None, None]
        # Infinity (an empty part) times 0 micro-batches would be NaN.
        return state + np.where(np.isinf(activations), 0.0, activations) * held

    def check(self, bounds: Sequence[int], placement: Sequence[int]) -> None:
        """Raise PartitionError where these bounds break the limit."""
        loads = cut(bounds, self.chunk_bytes()).loads(placement)
        if max(loads) > self.limit:
            stage = int(np.argmax(loads))
            raise PartitionError(
                f"with bounds {list(bounds)} stage {stage} holds {loads[stage]:,.0f} bytes, but pipeline.max_stage_bytes is "
                f"{self.limit:,.0f}; set it to {math.ceil(loads[stage])}, or leave the bounds to a method such as 'parameters'"
            )


def partition_layers(
    segments: FloatArray,
    num_parts: int,
    what: str = "",
    placement: Sequence[int] | None = None,
    limit: StageLimit | None = None,
    step: Callable[[Sequence[float]], float] | None = None,
    paces: Sequence[float] | None = None,
) -> Partition:
    """Split a chain of layers into `num_parts` non-empty parts with the smallest bottleneck.

    Among optimal splits it prefers the smallest sum of squared part costs, then the fewest layers in the last parts.

    - segments: costs of all possible parts, see segment_costs.
    - placement: the stage that holds each part; by default each part has its own. If a stage holds several parts, the objective
      is the largest sum of a stage's parts, then the largest part, then the sum of squares. The minimum is exact for at most
      search.MOST_SPLITS splits, and otherwise found by a search from many starts, which gives the same split every time.
    - limit: only splits within it count. step: returns the length of a step for the parts' costs. It chooses among several
      splits, of which the more even ones have somewhat larger sums.
    - paces: factor of each part's cost, for stages on devices of unlike speeds.

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
    cost: FloatArray = np.broadcast_to(segments, (num_parts, *segments.shape))
    if paces is not None:
        cost = segments * np.asarray(paces, dtype=np.float64)[:, None, None]
    held, most, starts = None, math.inf, []
    if limit is not None:
        held, most = limit.chunk_bytes(), limit.limit
        starts = [_leanest(held, most, placement)]
    if len(set(placement)) == num_parts:  # each stage holds one part
        return cut(_min_max(cost if held is None else np.where(held <= most, cost, np.inf)), cost)
    starts = [_min_max(cost), *starts]
    weights = _EVENNESS if step is not None else _EVENNESS[:1]
    found = [Search(cost, placement, held, most, w).best(starts) for w in weights]
    if step is None:
        return cut(found[0], cost)
    if limit is None:
        found.append(tuple(starts[0]))
    return min((cut(bounds, cost) for bounds in dict.fromkeys(found)), key=lambda partition: step(partition.costs))


def _leanest(held: FloatArray, limit: float, placement: Sequence[int]) -> Sequence[int]:
    """Return the split whose fullest stage holds least: it is within the limit if any that is found is.

    held: bytes of each part, see StageLimit.chunk_bytes. Raises PartitionError if that stage holds more than `limit`.
    """
    single, bounds = len(set(placement)) == len(placement), _min_max(held)
    if not single:
        bounds = list(Search(held, placement).best([bounds]))
    loads = cut(bounds, held).loads(placement)
    stage = int(np.argmax(loads))
    if loads[stage] <= limit:
        return bounds
    exact = single or Search.is_exact(held.shape[-1] - 1, len(placement))
    least = "the smallest limit that works is" if exact else "the smallest limit found to work is"
    raise PartitionError(
        f"no split keeps every stage within pipeline.max_stage_bytes = {limit:,.0f}: at the lowest peak, stage {stage} holds "
        f"{loads[stage]:,.0f} bytes; {least} {math.ceil(loads[stage])}. Set that, use more stages, a higher ZeRO stage, "
        "smaller micro-batches or activation_checkpoint_interval, or leave the key out"
    )


def _min_max(cost: FloatArray) -> list[int]:
    """Return the bounds of the best split, where part k as [a, b) costs cost[k, a, b]. One of finite cost must exist."""
    bottleneck = _best_prefixes(np.maximum, cost)[-1, -1]
    # Scaled by a power of two: squares of whole numbers stay exact, and no square overflows.
    own = cost if cost.strides[0] else cost[:1]  # parts of equal cost are one matrix
    scaled = np.ldexp(np.where(own <= bottleneck, own, np.inf), -math.frexp(bottleneck)[1])
    squares = np.broadcast_to(scaled * scaled, cost.shape)
    prefixes = _best_prefixes(np.add, squares)
    bounds = [cost.shape[-1] - 1]
    for best, part in zip(prefixes[-2::-1], squares[::-1], strict=True):
        last_part = best + part[:, bounds[-1]]
        bounds.append(int(np.flatnonzero(last_part == last_part.min())[-1]))
    return bounds[::-1]


def _best_prefixes(combine: np.ufunc, cost: FloatArray) -> FloatArray:
    """Return rows: row k, element b is the smallest value of layers [0, b) in k parts, costs joined by `combine`.

    It is infinite where the other parts would have too few layers.
    """
    parts, size = len(cost), cost.shape[-1]
    rows = np.full((parts + 1, size), np.inf)
    rows[0, 0] = 0.0
    for k, part in enumerate(cost):
        # The bounds before and after the part leave a layer for each of the others.
        before, after = slice(k, k + size - parts), slice(k + 1, k + 1 + size - parts)
        rows[k + 1, after] = combine(rows[k, before, None], part[before, after]).min(axis=0)
    return rows


# A name of METHODS, "type:REGEX", bounds [0, ..., n] or {"weights": [one number a layer]}
Method = str | Sequence[int] | Mapping[str, Sequence[float]]

# Methods whose costs the caller measures or counts with a sample of the inputs.
MEASURED = ("flops", "profile")
_NAMED = ("uniform", "parameters", "type", *MEASURED)


def resolve_partition(
    method: Method,
    chain_costs: Sequence[float],
    names: Sequence[str],
    tie_keys: Sequence[str | None],
    num_parts: int,
    what: str = "",
    placement: Sequence[int] | None = None,
    limit: StageLimit | None = None,
    step: Callable[[Sequence[float]], float] | None = None,
) -> Partition:
    """Split layers into `num_parts` by `method`; PartitionError, with values and remedy, if that can't be done.

    "uniform": every layer costs 1. "parameters": `chain_costs`, ties counted once a part. "flops", "profile": `chain_costs`,
    without ties: each place computes. "type:REGEX": a layer whose class name (in `names`) matches, case ignored, costs 1, any
    other 0. {"weights": [...]}: these, without ties. Bounds [0, ..., n]: as given, costed as "parameters" are; a `limit` must
    hold for them. `what`, `placement`, `limit` and `step` are as in `partition_layers`; `step` decides where costs are times:
    "flops", "profile" and weights.
    """
    if isinstance(method, (list, tuple)):
        _check_bounds(method, names, num_parts)
        if limit is not None:
            limit.check(method, placement or range(num_parts))
        return cut(method, segment_costs(chain_costs, names, tie_keys))
    if isinstance(method, Mapping):
        costs, kind = _weights(method, names), "weights"
    else:
        kind, colon, pattern = method.partition(":") if isinstance(method, str) else ("", "", "")
        kind = kind.lower()
        if kind not in _NAMED or (kind == "type") != bool(colon):
            hint = nearest(kind, _NAMED).replace("type", "type:REGEX")
            raise PartitionError(
                f"unknown partition method {method!r}.{hint} Use 'uniform', 'parameters', 'type:REGEX', 'flops', "
                "'profile', bounds such as [0, 3, 8], or {\"weights\": [one number a layer]}"
            )
        costs = _type_costs(pattern, names) if kind == "type" else chain_costs
        if kind == "uniform":
            costs = [1.0] * len(names)
    segments = segment_costs(costs, names, tie_keys if kind == "parameters" else None)
    are_times = kind in (*MEASURED, "weights")
    return partition_layers(segments, num_parts, what, placement, limit, step if are_times else None)


def _type_costs(pattern: str, names: Sequence[str]) -> list[float]:
    try:
        regex = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise PartitionError(f"'type:{pattern}' is not a regular expression: {error}; correct the pattern") from error
    costs = [1.0 if regex.search(name) else 0.0 for name in names]
    if not any(costs):
        present = ", ".join(dict.fromkeys(names))
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
        raise PartitionError(
            f"{shown} reach outside layers 0 to {n - 1}; start at 0 and end at {n}. If they count half blocks, build the "
            "layers so: models.from_hf(..., config=config)"
        )
    left_out = [*range(bounds[0]), *range(bounds[-1], n)]
    if left_out:
        listed = ", ".join(f"{i} ({names[i]})" for i in left_out[:SHOWN]) + ", ..." * (len(left_out) > SHOWN)
        raise PartitionError(f"{shown} leave out {len(left_out)} of {n} layers: {listed}; start at 0 and end at {n}")
