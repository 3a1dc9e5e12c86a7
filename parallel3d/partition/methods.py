"""Partition methods: what each layer of a model costs, by the name of a method."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from parallel3d.errors import PartitionError, nearest
from parallel3d.partition.chain import SHOWN, Partition, cut, segment_costs
from parallel3d.partition.split import StageLimit, partition_layers

# A name of METHODS, "type:REGEX", bounds [0, ..., n] or {"weights": [one number a layer]}
Method = str | Sequence[int] | Mapping[str, Sequence[float]]

# Costs that the caller finds out from a sample of the inputs.
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
        raise PartitionError(f"'type:{pattern}' is no regular expression: {error}; correct the pattern") from error
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
