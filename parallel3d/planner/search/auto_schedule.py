"""Schedule "auto" in a plan: the program that the runtime would plan by measured times, planned by predicted ones."""

from __future__ import annotations

from parallel3d.config.layout import Layout
from parallel3d.errors import ScheduleError
from parallel3d.planner.predict.predict import Predictor
from parallel3d.planner.search.candidate import Candidate, evaluate
from parallel3d.schedule.auto import Measured, make_plan
from parallel3d.schedule.instructions import Op, Program
from parallel3d.schedule.memory import bytes_in_flight
from parallel3d.schedule.zero_bubble import DEFAULT_MAX_IN_FLIGHT

# (chunks, placement) that "auto" may have -> the named schedule of split backwards.
_NAMED = {(1, "loop"): "zb-h1", (2, "v"): "zbv", (2, "loop"): "zb-looped", (4, "loop"): "zb-looped"}
# Chunks of all stages x micro-batches: planning a longer pipeline takes longer than the rest of the plan.
_QUICK = 160


def is_quick(layout: Layout) -> bool:
    """Whether "auto" is planned for the layout's chunks in some tenths of a second."""
    return layout.stages * layout.chunks * layout.micro_batches <= _QUICK


def with_auto(predictor: Predictor, candidate: Candidate) -> Candidate | None:
    """Predict schedule "auto" on a candidate's chunks and devices.

    Return None for a single stage, for a placement of chunks that "auto" doesn't have, or if no micro-batch fits.
    """
    layout, places = candidate.layout, candidate.step.links.ranks.ravel().tolist()
    named = _NAMED.get((layout.chunks, layout.placement))
    if layout.stages == 1 or named is None:
        return None
    start = evaluate(predictor, layout.model_copy(update={"schedule": named}), places)
    try:
        program = _plan(predictor, start)
    except ScheduleError:
        return None
    auto = layout.model_copy(update={"schedule": "auto"})
    step = predictor.predict(auto, places, bounds=start.step.bounds, compute=program)
    return Candidate(step, predictor.memory(step))


def _plan(predictor: Predictor, start: Candidate) -> Program:
    """Plan by the times and bytes of a prediction of the same chunks. Raises ScheduleError if no micro-batch fits."""
    step, micro_batches = start.step, start.layout.micro_batches
    chunks, placement = predictor.chunk_bytes(step), step.program.placement
    held = tuple(max(1.0, c.saved + c.received + c.loaded) for c in chunks)
    deferred = tuple(max(1.0, c.deferred) for c in chunks)
    room = []
    for stage, memory in enumerate(start.memory):
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
