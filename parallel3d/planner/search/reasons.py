"""Why layouts lost, what memory buys, and what would have to change if nothing fits."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2

import numpy as np

from parallel3d.planner.formats import duration
from parallel3d.planner.network.placement import Grid
from parallel3d.planner.predict.costs import StepPrediction
from parallel3d.planner.search.bounds import Bounds, groups_of
from parallel3d.planner.search.result import Prediction, Rejected, StageMemory, fullness_of
from parallel3d.planner.search.search import BranchAndBound, OutOfMemory

_GIB = 2**30
_MOST = 24  # rejected layouts that are listed


def why_not(search: BranchAndBound, shown: Sequence[Prediction]) -> tuple[Rejected, ...]:
    """Return the best layout of each shape that isn't shown, the closest first; then shapes that bounds have ruled out."""
    winner, texts = shown[0] if shown else None, {prediction.layout for prediction in shown}
    best: dict[Grid, StepPrediction | OutOfMemory] = {}
    for evaluated in sorted(search.evaluated.values(), key=lambda each: each.rank):
        if evaluated.layout.text not in texts:
            best.setdefault(evaluated.layout.shape, evaluated)
    rejected = [
        Rejected(
            layout=evaluated.layout.text,
            why=_why(evaluated, winner),
            seconds=evaluated.seconds if isinstance(evaluated, StepPrediction) else None,
            peak=max(stage.reserved for stage in evaluated.memory),
        )
        for evaluated in list(best.values())[:_MOST]
    ]
    known = {*best, *(prediction.shape for prediction in shown)}
    return tuple([*rejected, *_ruled_out(search, known, winner)][:_MOST])


def _why(evaluated: StepPrediction | OutOfMemory, winner: Prediction | None) -> str:
    if isinstance(evaluated, OutOfMemory):
        return f"{_does_not_fit(evaluated.memory)}; a step would take {duration(evaluated.least)} or more"
    if not evaluated.fits:
        return _does_not_fit(evaluated.memory)
    if winner is None:
        return "fits"
    longer = {part: seconds - winner.breakdown[part] for part, seconds in evaluated.breakdown().items()}
    name = max(longer, key=lambda part: longer[part])
    return f"{evaluated.seconds / winner.seconds - 1:.1%} longer: {longer[name] * 1e3:,.3g} ms more of {name}"


def _does_not_fit(memory: Sequence[StageMemory]) -> str:
    """Say which stage is too large, and what takes the most of it."""
    worst = max(memory, key=lambda stage: stage.fullest)
    _, needed, capacity = worst.fullest
    parts = {"offloaded state": worst.host} if needed == worst.host else worst.parts
    largest = sorted(parts.items(), key=lambda part: -part[1])[:2]
    names = " and ".join(f"{nbytes / _GIB:.1f} GiB of {name}" for name, nbytes in largest)
    place = " of its host's memory" if needed == worst.host else ""
    return (
        f"stage {worst.stage} needs {needed / _GIB:.1f} GiB of {capacity / _GIB:.1f}{place}: {names or 'model state'}"
    )


def _ruled_out(search: BranchAndBound, known: set[Grid], winner: Prediction | None) -> list[Rejected]:
    """Return one layout of each shape of which none was evaluated."""
    found: list[Rejected] = []
    space, bounds, shares = search.space, search.bounds, search.bounds.least_shares()
    groups = groups_of(space.stages, space.replicas, space.tensor_ranks)
    for k in sorted((int(own[bounds.seconds[own].argmin()]) for own in groups), key=lambda k: bounds.seconds[k]):
        layout, seconds = space.layout(k), bounds.seconds[k]
        if layout.shape in known:
            continue
        if not np.isfinite(seconds):
            why = bounds.why_not_sharded[layout.tensor_ranks]
        elif shares[k] > 1.0:
            why = _at_least(bounds, k)[0]
        elif winner is not None:
            why = f"can't be under {duration(seconds)}, its compute and reductions evenly spread, and its pipeline's filling"
        else:
            continue
        found.append(Rejected(layout=layout.text, why=why))
    return found


def trade_off(found: Sequence[StepPrediction]) -> tuple[tuple[int, float, str], ...]:
    """Return (peak bytes, seconds, layout) of the candidates that no other one beats in both, the leanest first."""
    points = sorted((max(s.reserved for s in c.memory), c.seconds, c.layout.text) for c in found)
    front: list[tuple[int, float, str]] = []
    for point in points:
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return tuple(front)


def what_would_fit(search: BranchAndBound) -> tuple[str, int]:
    """Describe, if nothing fits, the limiting memory and the smallest change that fits; also return the bytes a rank lacks."""
    have = int(search.space.shapes[0].prod())
    if search.evaluated:
        nearest = min(search.evaluated.values(), key=lambda each: fullness_of(each.memory))
        worst = max(nearest.memory, key=lambda stage: stage.fullest)
        share, needed, capacity = worst.fullest
        owner = "hosts" if needed == worst.host else "GPUs"
        return (
            f"nothing fits: {nearest.layout.text} comes closest, but {_does_not_fit(nearest.memory)}. The smallest change: "
            f"{owner} with {ceil(needed / _GIB)} GiB, about {_doubled(have, share)} GPUs instead of {have}, or shorter samples "
            "(--seq)"
        ), needed - capacity
    bounds = search.bounds
    possible = np.flatnonzero(np.isfinite(bounds.seconds))
    if not len(possible):
        reasons = "; ".join(bounds.why_not_sharded.values())
        return f"nothing can be built on {have} GPUs: {reasons}; or give another number of GPUs, or --global-batch", 0
    text, needed, capacity = _at_least(bounds, int(possible[bounds.least_shares(possible).argmin()]))
    return (
        f"nothing fits: {text}, however they are spread over {have} GPUs. The smallest change: about "
        f"{_doubled(have, needed / capacity)} GPUs, or more than {ceil(needed / _GIB)} GiB"
    ), needed - capacity


def _at_least(bounds: Bounds, k: int) -> tuple[str, int, int]:
    """Say what a layout needs by its bounds, of the memory that it fills most; also return these bytes, and its capacity."""
    needed, capacity, what = round(bounds.bytes[k]), bounds.capacity, "state and activations take"
    if bounds.host[k] / bounds.host_capacity > needed / capacity:
        needed, capacity = round(bounds.host[k]), bounds.host_capacity
        what = "masters and optimizer state in host memory take"
    return f"{what} at least {needed / _GIB:.1f} GiB a rank, of {capacity / _GIB:.1f}", needed, capacity


def _doubled(gpus: int, times: float) -> int:
    """Return a number of GPUs, doubled until it is at least this many times as large."""
    return gpus * 2 ** max(0, ceil(log2(times)))
