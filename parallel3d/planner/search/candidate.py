"""Evaluation of a layout: its step and memory, with ranks placed and layers split with care, and with schedule "auto"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from operator import attrgetter

from parallel3d.config.layout import Layout
from parallel3d.errors import ScheduleError
from parallel3d.planner.network.placement import place
from parallel3d.planner.predict.costs import StepPrediction, fullness_of
from parallel3d.planner.predict.links import Shape
from parallel3d.planner.predict.predict import Predictor
from parallel3d.planner.predict.traffic import traffic_of
from parallel3d.planner.search.result import Prediction, StageMemory
from parallel3d.schedule.auto import Measured, make_plan
from parallel3d.schedule.instructions import Op, Program
from parallel3d.schedule.memory import bytes_in_flight
from parallel3d.schedule.zero_bubble import DEFAULT_MAX_IN_FLIGHT

# Share of a device's memory up to which a split is looked for by which the layout fits; with more chunks of all stages, or
# more ranks, that takes too long.
_NEARLY, _MOST_CHUNKS, _MOST_RANKS = 1.4, 16, 64
_MOST_SEARCHED = 32  # chunks of all stages that are split with more care
# (chunks, placement) that "auto" may have -> the named schedule of split backwards.
_NAMED = {(1, "loop"): "zb-h1", (2, "v"): "zbv", (2, "loop"): "zb-looped", (4, "loop"): "zb-looped"}
# Chunks of all stages x micro-batches: planning a longer pipeline takes longer than the rest of the plan.
_QUICK = 160


def shape_of(layout: Layout) -> Shape:
    """Return the ranks along pipe, data, model."""
    return layout.stages, layout.replicas, layout.slices


@dataclass(frozen=True)
class OutOfMemory:
    """Layout that isn't predicted, because it doesn't fit. least: seconds that it would hardly be below."""

    layout: Layout
    predictor: Predictor
    least: float
    fits = False

    @cached_property
    def memory(self) -> tuple[StageMemory, ...]:
        """Memory of the stages that may be the fullest."""
        return tuple(self.predictor.rough_memory(self.layout))

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key, see StepPrediction."""
        return True, self.least


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
) -> StepPrediction:
    """Predict a layout.

    If it nearly fits, and its chunks are few, its layers are split so that it does, if possible.

    - places, bounds: see Predictor.predict.
    - best: seconds of a step that fits already; no split is looked for by which a longer one fits.
    """
    step = predictor.predict(layout, places, bounds)
    if not 1.0 < fullness_of(step.memory) < _fullest_to_split(layout) or step.seconds >= best:
        return step
    within = predictor.split_within(step)
    if within is None or within == step.split.bounds:
        return step
    other = predictor.predict(layout, places, within)
    return other if other.fits else step


def improve(predictor: Predictor, step: StepPrediction) -> StepPrediction:
    """Put a layout's ranks where `place` does, and split its layers with more care, if that makes the step shorter."""
    layout = step.layout
    places = place(predictor.network, shape_of(layout), traffic_of(predictor, step))
    found = [step]
    if places != tuple(range(layout.world_size)):
        found.append(evaluate(predictor, layout, places))
    if layout.chunks > 1 and layout.stages * layout.chunks <= _MOST_SEARCHED:
        links = min(found, key=attrgetter("rank")).split.links
        bounds = predictor.split_carefully(layout, links)
        found.append(evaluate(predictor, layout, links.ranks.ravel().tolist(), bounds))
    return min(found, key=attrgetter("rank"))


def prediction_of(predictor: Predictor, step: StepPrediction) -> Prediction:
    """Return a prediction as results list it."""
    layout, seconds = step.layout, step.seconds
    gpus, samples = predictor.network.cluster.gpus, layout.micro_batch * layout.micro_batches * layout.replicas
    low, high = predictor.calibration.interval(seconds)
    peak = sum(gpus[place].device.peak_flops for place in step.split.links.ranks.ravel())
    # A backward is twice a forward, whatever attention recomputes.
    flops = 3 * samples * sum(layer.forward.flops for layer in predictor.profile(layout.units).layers())
    return Prediction(
        **dict(layout),
        layout=layout.text,
        seconds=seconds,
        low=low,
        high=high,
        tokens_per_second=samples * predictor.model.seq / seconds,
        mfu=flops / seconds / peak,
        bubble=step.bubble,
        exposed_communication=step.exposed,
        breakdown=step.breakdown(),
        bounds=step.split.bounds,
        memory=step.memory,
    )


def is_quick(layout: Layout) -> bool:
    """Whether "auto" is planned for the layout's chunks in some tenths of a second."""
    return layout.stages * layout.chunks * layout.micro_batches <= _QUICK


def with_auto(predictor: Predictor, step: StepPrediction) -> StepPrediction | None:
    """Predict schedule "auto" on the chunks and devices of a prediction.

    Return None for a single stage, for a placement of chunks that "auto" doesn't have, or if no micro-batch fits.
    """
    layout, places = step.layout, step.split.links.ranks.ravel().tolist()
    named = _NAMED.get((layout.chunks, layout.placement))
    if layout.stages == 1 or named is None:
        return None
    start = evaluate(predictor, layout.model_copy(update={"schedule": named}), places)
    try:
        program = _auto_program(predictor, start)
    except ScheduleError:
        return None
    auto = layout.model_copy(update={"schedule": "auto"})
    return predictor.predict(auto, places, start.split.bounds, program)


def _auto_program(predictor: Predictor, step: StepPrediction) -> Program:
    """Plan by the times and bytes of a prediction of the same chunks. Raises ScheduleError if no micro-batch fits."""
    layout, micro_batches, placement = step.layout, step.layout.micro_batches, step.program.placement
    chunks = predictor.memory_model(layout.units).chunk_bytes(placement, step.split.bounds, layout)
    held = tuple(max(1.0, c.saved + c.received + c.loaded) for c in chunks)
    deferred = tuple(max(1.0, c.deferred) for c in chunks)
    room = []
    for stage, memory in enumerate(step.memory):
        own = {c: chunks[c] for c, s in enumerate(placement) if s == stage}
        activations = max(bytes_in_flight(step.program.instructions[stage], own))
        # Bytes of the device that activations may take.
        others = memory.reserved - memory.allocated + memory.phases["backward"] - activations
        room.append(float(memory.capacity - others))
    cost = step.cost.cost()
    sends = {i for rank in step.program.instructions for i in rank if i.op is Op.SEND_ACTIVATION}
    transfer = max(map(cost, sends), default=0.0)
    measured = Measured.of(placement, cost, held, deferred, DEFAULT_MAX_IN_FLIGHT, room, transfer)
    return make_plan(placement, micro_batches, measured).program(micro_batches)
