"""Schedule "auto" on the chunks of a layout, planned from predicted times by the code that plans it from measured ones."""

from __future__ import annotations

from collections.abc import Sequence

from parallel3d.config.layout import Layout
from parallel3d.errors import ScheduleError
from parallel3d.planner.predict.costs import StepPrediction
from parallel3d.planner.predict.predict import Predictor
from parallel3d.planner.search.search import evaluate
from parallel3d.schedule.auto import Measured, make_plan
from parallel3d.schedule.builders import DEFAULT_MAX_IN_FLIGHT
from parallel3d.schedule.instructions import Op, Program
from parallel3d.schedule.memory import bytes_in_flight

# (chunks, placement) that "auto" may have -> the named schedule of split backwards.
_NAMED = {(1, "loop"): "zb-h1", (2, "v"): "zbv", (2, "loop"): "zb-looped", (4, "loop"): "zb-looped"}
# Chunks of all stages x micro-batches: planning a longer pipeline takes longer than the rest of the plan.
_QUICK = 160


def is_quick(layout: Layout) -> bool:
    """Whether "auto" is planned for the layout's chunks in some tenths of a second."""
    return layout.stages * layout.chunks * layout.micro_batches <= _QUICK


def with_auto(predictor: Predictor, layout: Layout, places: Sequence[int] | None = None) -> StepPrediction | None:
    """Predict schedule "auto" on the chunks of a layout. places: see Predictor.predict.

    Return None for a single stage, for a placement of chunks that "auto" doesn't have, or if no micro-batch fits.
    """
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
    chunks = predictor.memory_model(layout.units).chunk_bytes(step.split)
    held = tuple(max(1.0, c.saved + c.received + c.loaded) for c in chunks)
    deferred = tuple(max(1.0, c.deferred) for c in chunks)
    room = []
    for stage, memory in enumerate(step.memory):
        own = {c: chunks[c] for c, s in enumerate(placement) if s == stage}
        activations = max(bytes_in_flight(step.program.instructions[stage], own))
        # Bytes of the device that activations may take.
        others = memory.reserved - memory.allocated + memory.phases["backward"] - activations
        room.append(float(memory.capacity - others - max(c.output for c in own.values())))
    cost = step.cost.cost()
    sends = {i for rank in step.program.instructions for i in rank if i.op is Op.SEND_ACTIVATION}
    transfer = max(map(cost, sends), default=0.0)
    measured = Measured.of(placement, cost, held, deferred, DEFAULT_MAX_IN_FLIGHT, room, transfer)
    return make_plan(placement, micro_batches, measured).program(micro_batches)
