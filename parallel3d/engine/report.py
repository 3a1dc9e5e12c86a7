"""What an engine says of its time, of its memory, and of what it was made into."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Literal

from parallel3d.comm.collectives import all_gather_object
from parallel3d.comm.groups import ProcessGroups
from parallel3d.config import BatchSizes, Config
from parallel3d.engine.update import WeightUpdate
from parallel3d.monitor.breakdown import Breakdown
from parallel3d.monitor.memory import MemoryProfile
from parallel3d.monitor.report import memory_table
from parallel3d.monitor.state import print_tree, state_tree
from parallel3d.monitor.steps import StepMonitor
from parallel3d.pipe.module import PipelineModule
from parallel3d.schedule.instructions import Program
from parallel3d.schedule.simulate import Timeline
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


class Reports:
    """Where the time of a step goes, and what memory is held."""

    _model: PipelineModule
    _groups: ProcessGroups
    _update: WeightUpdate
    _monitor: StepMonitor
    _memory_next: bool
    _memory_profile: MemoryProfile | None

    def profile_next_batch(self, what: Literal["time", "memory"] = "time") -> None:
        """Record of the next train_batch when each instruction runs, or what each holds of memory.

        See `timeline` and `time_breakdown`, or `memory_report`.
        """
        if what == "memory":
            self._memory_next = True
            self._monitor.leave_out_next()
        else:
            self._monitor.record_next()

    def timeline(self) -> tuple[Program, Timeline]:
        """The program of the last recorded batch and its measured timeline, of this rank's pipeline, in seconds.

        Recorded are the batch after profile_next_batch and, with wall_clock_breakdown, those that print. Collective over
        all ranks. Raises ConfigError when none was.
        """
        program, records = self._monitor.records()
        spans = [span for rank in self._groups.pipe.ranks for span in records[rank].spans]
        return program, Timeline.of(spans, self._model.num_stages)

    def time_breakdown(self) -> list[Breakdown]:
        """Where the time of the last recorded batch (see `timeline`) went, in seconds, of every rank.

        Collective over all ranks. Raises ConfigError when none was recorded.
        """
        return self._monitor.breakdown()

    def memory_report(self) -> list[dict[str, tuple[int, int]]]:
        """What every rank holds, (predicted, measured) bytes by component and by phase; rank 0 prints it as a table.

        Components: weights, gradients, masters, optimizer (from the first step on), transient (gradient buffers, from the
        first backward on), update (gradients in the masters' dtype). Phases: steady, between batches; backward; step,
        while the optimizer runs. After a batch that `profile_next_batch("memory")` asked for also activations, of all
        micro-batches in flight with the messages between stages, counted in backward; and what the layers' and the
        optimizer's operations need for themselves is measured (not predicted) in backward and step.
        Collective over all ranks.
        """
        own = memory_rows(self._model, self._update, self._memory_profile)
        everyone = all_gather_object(own, self._groups.control)
        if self._groups.rank == 0:
            print(memory_table(everyone), flush=True)
        return everyone
