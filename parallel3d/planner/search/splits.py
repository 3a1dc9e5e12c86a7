"""Splits of a layout's layers over its chunks that are searched for: with the shortest step, or within the memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from parallel3d.config.layout import Layout
from parallel3d.errors import PartitionError
from parallel3d.partition.chain import cut, segment_costs
from parallel3d.partition.split import StageLimit, partition_layers
from parallel3d.planner.predict.costs import StepPrediction
from parallel3d.planner.predict.predict import Predictor, fastest_of
from parallel3d.planner.predict.program import timed_micro_batches
from parallel3d.planner.predict.timing import LayoutLinks, by_op
from parallel3d.schedule.builders import placement_of
from parallel3d.schedule.memory import most_in_flight
from parallel3d.specs import TiedLayerSpec


def split_carefully(predictor: Predictor, layout: Layout, links: LayoutLinks) -> tuple[int, ...]:
    """Search for the chunks' bounds in layers with even stages and the shortest step; slow."""
    placement = placement_of(layout.placement, layout.stages, layout.chunks)
    fastest, paces = fastest_of(predictor.stage_times(layout, links), placement)
    # A step's length is the schedule's makespan. Each chunk's cost is divided into parts as the whole model's.
    shares = by_op(fastest.compute.sum(axis=1) / fastest.total.sum())
    simulation = predictor.programs.alone(layout, timed_micro_batches(layout, roughly=True))

    def step(costs: Sequence[float]) -> float:
        return simulation.makespan(lambda i: shares.get(i.op, 0.0) * costs[i.chunk])

    costs = segment_costs(fastest.total.tolist())
    return partition_layers(costs, len(placement), placement=placement, step=step, paces=paces).bounds


def split_within(predictor: Predictor, step: StepPrediction) -> tuple[int, ...] | None:
    """Return the most even bounds within the devices' memory, for a layout that doesn't fit; None if there are none.

    Memory that isn't the layers' own is assumed to stay.
    """
    layout, links, placement = step.layout, step.split.links, step.program.placement
    state, activations = predictor.memory_model(layout.units).of_layers(layout)
    ties = [spec.key if isinstance(spec, TiedLayerSpec) else None for spec in predictor.profile(layout.units).specs]
    limit = StageLimit(0.0, state, activations, most_in_flight(step.program), ties)
    own = cut(step.split.bounds, limit.chunk_bytes()).loads(placement)
    limit = replace(limit, limit=min(m.capacity - m.reserved + own[m.stage] for m in step.memory))
    fastest, paces = fastest_of(predictor.stage_times(layout, links), placement)
    costs = segment_costs(fastest.total.tolist())
    try:
        return partition_layers(costs, len(placement), placement=placement, limit=limit, paces=paces).bounds
    except PartitionError:
        return None
