"""Why layouts lost, what memory buys, and what would have to change where nothing fits."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np

from parallel3d.planner.predict.links import Shape
from parallel3d.planner.search.candidate import Candidate, OutOfMemory, fullness_of, shape_of
from parallel3d.planner.search.result import Prediction, Rejected, StageMemory
from parallel3d.planner.search.search import BranchAndBound

_GIB = 2**30
_MOST = 24  # that are told


def why_not(search: BranchAndBound, shown: Sequence[Prediction]) -> tuple[Rejected, ...]:
    """The best of each shape that isn't shown, the closest first; then those that can't be had at all."""
    winner = shown[0] if shown else None
    told = {prediction.layout for prediction in shown}
    every: list[Candidate | OutOfMemory] = [*search.candidates.values(), *search.refused]
    best: dict[Shape, Candidate | OutOfMemory] = {}
    for found in sorted(every, key=_closeness):
        if found.layout.text not in told:
            best.setdefault(shape_of(found.layout), found)
    rejected = [
        Rejected(
            layout=found.layout.text,
            why=_why(found, winner),
            seconds=found.step.seconds if isinstance(found, Candidate) else None,
            peak=max(stage.reserved for stage in found.memory),
        )
        for found in best.values()
    ]
    known = {shape_of(found.layout) for found in every}
    return tuple([*rejected, *_unpredicted(search, known, winner)][:_MOST])


def _closeness(found: Candidate | OutOfMemory) -> tuple[bool, float]:
    if isinstance(found, OutOfMemory):
        return True, found.least
    return not found.fits, found.step.seconds


def _why(found: Candidate | OutOfMemory, winner: Prediction | None) -> str:
    if isinstance(found, OutOfMemory):
        return f"{does_not_fit(found.memory)}; a step would take {found.least:.3g} s or more"
    if not found.fits:
        return does_not_fit(found.memory)
    if winner is None:
        return "fits"
    step = found.step
    parts = {
        "bubble": step.bubble * step.makespan
        - winner.bubble * (winner.seconds - winner.breakdown["optimizer"])
        - (step.hosts - winner.breakdown["host"]),
        "the host's calls": step.hosts - winner.breakdown["host"],
        "communication that it waits for": step.exposed - winner.exposed_communication,
        "optimizer": step.optimizer - winner.breakdown["optimizer"],
    }
    later = step.seconds - winner.seconds
    parts["compute"] = later - sum(parts.values())
    name, seconds = max(parts.items(), key=lambda part: part[1])
    return f"{later / winner.seconds:.1%} longer: {seconds * 1e3:,.3g} ms more of {name}"


def does_not_fit(memory: Sequence[StageMemory]) -> str:
    """Which stage is too large, and for what."""
    worst = max(memory, key=lambda stage: stage.reserved / stage.capacity)
    largest = sorted(worst.parts.items(), key=lambda part: -part[1])[:2]
    parts = " and ".join(f"{nbytes / _GIB:.1f} GiB of {name}" for name, nbytes in largest)
    return (
        f"stage {worst.stage} needs {worst.reserved / _GIB:.1f} GiB of {worst.capacity / _GIB:.1f}: "
        f"{parts or 'model state'}"
    )


def _unpredicted(search: BranchAndBound, known: set[Shape], winner: Prediction | None) -> list[Rejected]:
    """One of each shape that bounds alone have ruled out."""
    found: dict[Shape, Rejected] = {}
    space = search.space
    for k in np.argsort(search.bounds.seconds, kind="stable").tolist():
        shape = (int(space.stages[k]), int(space.replicas[k]), int(space.slices[k]))
        if shape in known or shape in found:
            continue
        seconds, nbytes = float(search.bounds.seconds[k]), int(search.bounds.bytes[k])
        if not np.isfinite(seconds):
            why = search.bounds.why_not_sliced[shape[2]]
        elif nbytes > search.capacity:
            why = f"state and activations take at least {nbytes / _GIB:.1f} GiB a rank, of {search.capacity / _GIB:.1f}"
        elif winner is not None:
            why = f"can't be under {seconds:.3g} s, the compute of its layers evenly spread and its pipeline's filling"
        else:
            continue
        found[shape] = Rejected(layout=space.layout(k).text, why=why)
    return list(found.values())


def trade_off(found: Sequence[Candidate]) -> tuple[tuple[int, float, str], ...]:
    """(peak bytes, seconds, layout) of those that no other beats in both, the leanest first."""
    points = sorted((max(s.reserved for s in f.memory), f.step.seconds, f.step.layout.text) for f in found)
    front: list[tuple[int, float, str]] = []
    for point in points:
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return tuple(front)


def what_would_fit(search: BranchAndBound) -> str:
    """What binds where nothing fits, and the smallest change that fits."""
    if not search.candidates and not search.refused:
        return _state_alone(search)
    every: list[Candidate | OutOfMemory] = [*search.candidates.values(), *search.refused]
    nearest = min(every, key=lambda f: fullness_of(f.memory))
    worst = max(nearest.memory, key=lambda stage: stage.reserved / stage.capacity)
    needed = ceil(worst.reserved / _GIB)
    return (
        f"nothing fits: {nearest.layout.text} comes closest, but {does_not_fit(nearest.memory)}. The smallest change: "
        f"GPUs with {needed} GiB, {_gpus(search, worst)}, or shorter samples (--seq)"
    )


def _gpus(search: BranchAndBound, worst: StageMemory) -> str:
    have = int(search.space.stages[0] * search.space.replicas[0] * search.space.slices[0])
    return f"about {_doubled(have, have * worst.reserved / worst.capacity)} GPUs instead of {have}"


def _doubled(have: int, wanted: float) -> int:
    """So often that it suffices."""
    while have < wanted:
        have *= 2
    return have


def _state_alone(search: BranchAndBound) -> str:
    have = int(search.space.stages[0] * search.space.replicas[0] * search.space.slices[0])
    least = float(search.bounds.bytes[np.isfinite(search.bounds.seconds)].min(initial=np.inf))
    if not np.isfinite(least):
        return "nothing can be built: " + "; ".join(search.bounds.why_not_sliced.values())
    needed, doubled = ceil(least / _GIB), _doubled(have, have * least / search.capacity)
    return (
        f"nothing fits: weights, gradients, optimizer state and activations take at least {least / _GIB:.1f} GiB a rank, "
        f"however they are spread over {have} GPUs of {search.capacity / _GIB:.1f} GiB. The smallest change: about {doubled} "
        f"GPUs, or GPUs with more than {needed} GiB"
    )
