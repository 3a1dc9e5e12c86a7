"""A predicted layout with the memory it takes, and in the words of results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from parallel3d.config.layout import Layout
from parallel3d.planner.predict.links import Shape
from parallel3d.planner.predict.predict import Predictor
from parallel3d.planner.predict.step_prediction import StepPrediction
from parallel3d.planner.search.result import Prediction, StageMemory

_NEARLY = 1.4  # full
# Of all stages, and of rough predictions: to split more chunks within limits takes too long.
_MOST_CHUNKS, _MOST_RANKS = 16, 64


def fullness_of(memory: Sequence[StageMemory]) -> float:
    """Of the fullest device: more than 1 doesn't fit."""
    return max(stage.reserved / stage.capacity for stage in memory)


@dataclass(frozen=True)
class Refused:
    """A layout that isn't predicted, since it doesn't fit. least: seconds that it would hardly take less than."""

    layout: Layout
    predictor: Predictor
    least: float

    @cached_property
    def memory(self) -> tuple[StageMemory, ...]:
        """See Predictor.rough_memory."""
        return tuple(self.predictor.rough_memory(self.layout))

    @property
    def fullness(self) -> float:
        """Of the fullest device."""
        return fullness_of(self.memory)


@dataclass(frozen=True)
class Found:
    """A layout that was predicted, and what it takes."""

    outlook: StepPrediction
    memory: tuple[StageMemory, ...]

    @property
    def layout(self) -> Layout:
        """That was predicted."""
        return self.outlook.layout

    @property
    def fullness(self) -> float:
        """Of the fullest device."""
        return fullness_of(self.memory)

    @property
    def fits(self) -> bool:
        """Whether it fits into every device."""
        return self.fullness <= 1.0

    @property
    def shape(self) -> Shape:
        """Ranks along pipe, data, model."""
        return shape_of(self.layout)


def shape_of(layout: Layout) -> Shape:
    """Ranks along pipe, data, model."""
    return layout.stages, layout.replicas, layout.slices


def refuse(predictor: Predictor, layout: Layout, least: float) -> Refused | None:
    """A layout that `find` would say not to fit, by the same memory; None for one that may."""
    most = _fullest_to_split(layout, exactly=False)
    is_too_large = any(fullness_of([stage]) > most for stage in predictor.rough_memory(layout))
    return Refused(layout, predictor, least) if is_too_large else None


def _fullest_to_split(layout: Layout, exactly: bool) -> float:
    """How full a layout may be, for that it is worth looking for a split of the layers by which it does fit."""
    chunks_are_few = layout.stages * layout.chunks <= _MOST_CHUNKS
    is_worth_it = chunks_are_few and (exactly or layout.world_size <= _MOST_RANKS)
    return _NEARLY if layout.stages > 1 and is_worth_it else 1.0


def find(
    predictor: Predictor,
    layout: Layout,
    places: Sequence[int] | None = None,
    exactly: bool = False,
    whole: bool = False,
    bounds: Sequence[int] | None = None,
) -> Found:
    """A prediction (see Predictor.predict) with its memory; one that doesn't fit, but nearly, with its layers split so that it
    does, where that can be and the chunks are few.
    """
    outlook = predictor.predict(layout, places, exactly, whole, bounds)
    found = Found(outlook, predictor.memory(outlook))
    if not 1.0 < found.fullness < _fullest_to_split(layout, exactly):
        return found
    within = predictor.split_within(outlook, found.memory)
    if within is None or within == outlook.bounds:
        return found
    outlook = predictor.predict(layout, places, exactly, whole, within)
    other = Found(outlook, predictor.memory(outlook))
    return other if other.fits else found


def prediction_of(predictor: Predictor, found: Found, global_batch: int) -> Prediction:
    """In the words of results. global_batch: samples of a step."""
    outlook = found.outlook
    seconds, model, profile = outlook.seconds, predictor.model, predictor.profile
    low, high = predictor.calibration.interval(seconds)
    gpus = predictor.network.cluster.gpus
    peak = sum(gpus[place].device.peak_flops for place in outlook.links.ranks.ravel())
    # A backward is twice a forward, whatever attention recomputes.
    flops = 3 * global_batch * sum(layer.forward.flops for layer in profile.layers())
    return Prediction(
        **dict(found.layout),
        layout=found.layout.text,
        seconds=seconds,
        low=low,
        high=high,
        tokens_per_second=global_batch * model.seq / seconds,
        mfu=flops / seconds / peak,
        bubble=outlook.bubble,
        exposed_communication=outlook.exposed,
        breakdown=outlook.breakdown(),
        bounds=outlook.bounds,
        memory=found.memory,
    )
