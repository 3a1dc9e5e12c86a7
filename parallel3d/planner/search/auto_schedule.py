"""Schedule "auto" in a plan: the program that the runtime would find by what it measures, found by what is predicted."""

from __future__ import annotations

from collections.abc import Sequence

from parallel3d.config.layout import Layout
from parallel3d.errors import ScheduleError
from parallel3d.planner.predict.predict import Predictor
from parallel3d.planner.search.found import Found, find
from parallel3d.schedule.auto import Measured, make_plan
from parallel3d.schedule.instructions import Op, Program
from parallel3d.schedule.memory import ChunkBytes, bytes_in_flight
from parallel3d.schedule.zero_bubble import DEFAULT_MAX_IN_FLIGHT

# The named schedule that splits backwards, of each placement that "auto" may have.
_NAMED = {(1, "loop"): "zb-h1", (2, "v"): "zbv", (2, "loop"): "zb-looped", (4, "loop"): "zb-looped"}
# Chunks of all stages x micro-batches: a longer search takes longer than all else of a plan.
_QUICK = 160


def is_quick(layout: Layout) -> bool:
    """Whether "auto" is found for the layout's chunks in some tenths of a second."""
    return layout.stages * layout.chunks * layout.micro_batches <= _QUICK


def with_auto(predictor: Predictor, layout: Layout, places: Sequence[int]) -> Found | None:
    """The layout with schedule "auto" on its chunks, predicted exactly; None for a single stage, chunks that "auto" does not
    place so, or where a micro-batch does not fit. places: see Predictor.predict.
    """
    named = _NAMED.get((layout.chunks, layout.placement))
    if layout.stages == 1 or named is None:
        return None
    start = find(predictor, layout.model_copy(update={"schedule": named}), places, exactly=True, whole=True)
    try:
        program = _planned(predictor, start)
    except ScheduleError:
        return None
    made = layout.model_copy(update={"schedule": "auto"})
    outlook = predictor.predict(made, places, exactly=True, bounds=start.outlook.bounds, compute=program)
    return Found(outlook, predictor.memory(outlook, every=True))


def _planned(predictor: Predictor, start: Found) -> Program:
    """By the times and bytes of a prediction of the same chunks. Raises ScheduleError where a micro-batch does not fit."""
    outlook = start.outlook
    placement = outlook.program.placement
    chunks = predictor.chunk_bytes(outlook)
    held = tuple(max(1.0, c.saved + c.received + c.loaded) for c in chunks)
    deferred = tuple(max(1.0, c.deferred) for c in chunks)
    room = [_room(start, stage, chunks) for stage in range(outlook.layout.stages)]
    cost = outlook.cost.cost()
    sends = {i for rank in outlook.program.instructions for i in rank if i.op is Op.SEND_ACTIVATION}
    transfer = max((cost(i) for i in sends), default=0.0)
    measured = Measured.of(placement, cost, held, deferred, DEFAULT_MAX_IN_FLIGHT, room, transfer)
    micro_batches = outlook.layout.micro_batches
    return make_plan(placement, micro_batches, measured).program(micro_batches)


def _room(start: Found, stage: int, chunks: Sequence[ChunkBytes]) -> float:
    """Bytes of a device that activations may take."""
    program, memory = start.outlook.program, start.memory[stage]
    own = {c: chunks[c] for c, s in enumerate(program.placement) if s == stage}
    activations = max(bytes_in_flight(program.instructions[stage], own))
    return float(memory.capacity - (memory.reserved - memory.allocated) - memory.phases["backward"] + activations)
