"""What an engine says of its memory and of what it was made into."""

from __future__ import annotations

from dataclasses import fields, replace

from parallel3d.comm.collectives import all_gather_object
from parallel3d.config import BatchSizes, Config
from parallel3d.engine.update import WeightUpdate
from parallel3d.monitor.memory import MemoryProfile
from parallel3d.monitor.state import print_tree, state_tree
from parallel3d.pipe.module import PipelineModule
from parallel3d.schedule.instructions import Program
from parallel3d.zero.memory import StateBytes, moments_of, predict_state


def memory_rows(
    model: PipelineModule, update: WeightUpdate, profile: MemoryProfile | None
) -> dict[str, tuple[int, int]]:
    """(predicted, measured) bytes of this rank by component and by phase, see Engine.memory_report."""
    measured = replace(update.reducer.state_bytes(), optimizer=update.sharded.state_bytes())
    moments = moments_of(update.optimizer)
    predicted = predict_state(model.parameter_infos(), update.policy, model.groups.data.size, moments or 0)
    if moments is None:
        predicted = replace(predicted, optimizer=measured.optimizer)
    activations, workspace, needed = (0, 0), 0, measured.update
    if profile is not None:
        activations = profile.activations(model.stage_id)
        workspace, needed = profile.batch.peak, profile.step.peak
    rows = {f.name: (getattr(predicted, f.name), getattr(measured, f.name)) for f in fields(StateBytes)}
    rows["update"] = (predicted.update, needed)
    rows["activations"] = activations
    rows["steady"] = (predicted.steady, measured.steady)
    rows["backward"] = (predicted.backward + activations[0], measured.backward + workspace)
    rows["step"] = (predicted.step, measured.steady + measured.transient + needed)
    return rows


def dump_state(
    config: Config, sizes: BatchSizes, model: PipelineModule, update: WeightUpdate, program: Program
) -> None:
    """Print, on rank 0, what is in force and what it was made into. Collective."""
    groups = model.groups
    own = {owners: [b.numel for b in buckets] for owners, buckets in update.reducer.buckets.items()}
    buckets = all_gather_object(own, groups.control)
    if groups.rank == 0:
        shards = groups.data.size if update.policy.stage > 0 else 1
        print_tree(state_tree(config, sizes, model.topology(), model.partition_table(), buckets, shards, program))
