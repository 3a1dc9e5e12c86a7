"""A predicted layout with the memory it takes, and in the words of results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallel3d.config.run_layout import RunLayout
from parallel3d.planner.outlook import Outlook
from parallel3d.planner.predict import Predictor
from parallel3d.planner.result import Prediction, StageMemory
from parallel3d.planner.timing import Shape

_NEARLY = 1.4  # full
# Of all stages, and of rough predictions: to split more chunks within limits takes too long.
_MOST_CHUNKS, _MOST_RANKS = 16, 64


@dataclass(frozen=True)
class Found:
    """A layout that was predicted, and how full its fullest device gets: more than 1 doesn't fit."""

    outlook: Outlook
    memory: tuple[StageMemory, ...]

    @property
    def fullness(self) -> float:
        """Of the fullest device."""
        return max(stage.reserved / stage.capacity for stage in self.memory)

    @property
    def fits(self) -> bool:
        """Whether it fits into every device."""
        return self.fullness <= 1.0

    @property
    def shape(self) -> Shape:
        """Ranks along pipe, data, model."""
        layout = self.outlook.layout
        return layout.stages, layout.replicas, layout.slices


def find(
    predictor: Predictor,
    layout: RunLayout,
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
    chunks_are_few = layout.stages * (layout.chunks or 1) <= _MOST_CHUNKS
    is_worth_it = chunks_are_few and (exactly or layout.world_size <= _MOST_RANKS)
    if layout.stages == 1 or not is_worth_it or not 1.0 < found.fullness < _NEARLY:
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
        **Prediction.fields_of(found.outlook.layout),
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
