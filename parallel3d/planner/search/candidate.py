"""Layouts that the search has evaluated, with the memory they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from parallel3d.config.layout import Layout
from parallel3d.planner.network.placement import place
from parallel3d.planner.predict.links import Shape
from parallel3d.planner.predict.predict import Predictor
from parallel3d.planner.predict.step_prediction import StepPrediction
from parallel3d.planner.predict.traffic import traffic_of
from parallel3d.planner.search.result import Prediction, StageMemory

# A layout of half blocks counts as this much longer than it is: it has to be worth building other layers.
WORTH_HALVES = 0.998
# Share of a device's memory up to which a split is looked for by which the layout fits; with more chunks of all stages, or
# more ranks, that takes too long.
_NEARLY, _MOST_CHUNKS, _MOST_RANKS = 1.4, 16, 64
_MOST_SEARCHED = 32  # chunks of all stages that are split with more care


def fullness_of(memory: Sequence[StageMemory]) -> float:
    """Return the reserved share of the fullest device's memory; more than 1 doesn't fit."""
    return max(stage.reserved / stage.capacity for stage in memory)


def shape_of(layout: Layout) -> Shape:
    """Return the ranks along pipe, data, model."""
    return layout.stages, layout.replicas, layout.slices


@dataclass(frozen=True)
class OutOfMemory:
    """Layout that isn't predicted, because it doesn't fit. least: seconds that it would hardly be below."""

    layout: Layout
    predictor: Predictor
    least: float

    @cached_property
    def memory(self) -> tuple[StageMemory, ...]:
        """Memory of the stages that may be the fullest."""
        return tuple(self.predictor.rough_memory(self.layout))

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key, see Candidate."""
        return True, self.least


@dataclass(frozen=True)
class Candidate:
    """Layout whose step was predicted."""

    step: StepPrediction
    memory: tuple[StageMemory, ...]

    @property
    def layout(self) -> Layout:
        """Layout that was predicted."""
        return self.step.layout

    @property
    def fits(self) -> bool:
        """Whether it fits into every device."""
        return fullness_of(self.memory) <= 1.0

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key: what fits comes first, then the shorter step."""
        return not self.fits, self.step.seconds / (WORTH_HALVES if self.layout.units else 1.0)


def out_of_memory(predictor: Predictor, layout: Layout, least: float) -> OutOfMemory | None:
    """Return a layout that doesn't fit by its rough memory, and that no other split of its layers makes fit, else None."""
    is_too_large = any(fullness_of([stage]) > _fullest_to_split(layout) for stage in predictor.rough_memory(layout))
    return OutOfMemory(layout, predictor, least) if is_too_large else None


def _fullest_to_split(layout: Layout) -> float:
    """Return how full a layout may be, for that it is worth looking for a split of the layers by which it does fit."""
    is_worth_it = layout.stages * layout.chunks <= _MOST_CHUNKS and layout.world_size <= _MOST_RANKS
    return _NEARLY if layout.stages > 1 and is_worth_it else 1.0


def evaluate(
    predictor: Predictor,
    layout: Layout,
    places: Sequence[int] | None = None,
    bounds: Sequence[int] | None = None,
    best: float = inf,
) -> Candidate:
    """Predict a layout with its memory.

    If it nearly fits, and its chunks are few, its layers are split so that it does, if possible.

    - places, bounds: see Predictor.predict.
    - best: seconds of a step that fits already; no split is looked for by which a longer one fits.
    """
    step = predictor.predict(layout, places, bounds)
    candidate = Candidate(step, predictor.memory(step))
    if not 1.0 < fullness_of(candidate.memory) < _fullest_to_split(layout) or step.seconds >= best:
        return candidate
    within = predictor.split_within(step, candidate.memory)
    if within is None or within == step.bounds:
        return candidate
    step = predictor.predict(layout, places, within)
    other = Candidate(step, predictor.memory(step))
    return other if other.fits else candidate


def improve(predictor: Predictor, candidate: Candidate) -> Candidate:
    """Put a candidate's ranks where `place` does, and split its layers with more care, if that makes the step shorter."""
    layout = candidate.layout
    places = place(predictor.network, shape_of(layout), traffic_of(predictor, candidate.step))
    found = [candidate]
    if places != tuple(range(layout.world_size)):
        found.append(evaluate(predictor, layout, places))
    if layout.chunks > 1 and layout.stages * layout.chunks <= _MOST_SEARCHED:
        links = min(found, key=lambda c: c.rank).step.links
        bounds = predictor.split_carefully(layout, links)
        found.append(evaluate(predictor, layout, links.ranks.ravel().tolist(), bounds))
    return min(found, key=lambda c: c.rank)


def prediction_of(predictor: Predictor, candidate: Candidate, global_batch: int) -> Prediction:
    """Return a candidate as results list it. global_batch: samples of a step."""
    step, seconds, gpus = candidate.step, candidate.step.seconds, predictor.network.cluster.gpus
    low, high = predictor.calibration.interval(seconds)
    peak = sum(gpus[place].device.peak_flops for place in step.links.ranks.ravel())
    # A backward is twice a forward, whatever attention recomputes.
    flops = 3 * global_batch * sum(layer.forward.flops for layer in predictor.profile(candidate.layout.units).layers())
    return Prediction(
        **dict(candidate.layout),
        layout=candidate.layout.text,
        seconds=seconds,
        low=low,
        high=high,
        tokens_per_second=global_batch * predictor.model.seq / seconds,
        mfu=flops / seconds / peak,
        bubble=step.bubble,
        exposed_communication=step.exposed,
        breakdown=step.breakdown(),
        bounds=step.bounds,
        memory=candidate.memory,
    )
