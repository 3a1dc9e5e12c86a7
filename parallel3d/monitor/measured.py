"""What recorded steps say of a model's chunks: the times that schedule "auto" plans for."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from parallel3d.monitor.timers import StepRecord
from parallel3d.schedule.instructions import COMPUTE_OPS, depends_on
from parallel3d.schedule.simulate import Cost, Timeline, measured_cost


def instruction_cost(steps: Sequence[Sequence[StepRecord]]) -> Cost:
    """The median time of each kind of compute on each chunk, over steps, replicas and slices. steps: records of all ranks."""
    spans = [span for records in steps for record in records for span in record.spans]
    return measured_cost(Timeline.of(spans, num_ranks=1))


def transfer_time(pipelines: Sequence[Sequence[StepRecord]]) -> float:
    """Seconds from when a tensor is made to when a rank that waits for it has it: the median over all such waits, or 0.

    pipelines: of each step and pipeline, the records of its ranks. A rank that had other work says nothing of a transfer.
    """
    found = []
    for records in pipelines:
        made = {s.instruction: s for record in records for s in record.spans if s.instruction.op in COMPUTE_OPS}
        for wait in (w for record in records for w in record.waits):
            sources = [made[d] for d in depends_on(wait.instruction) if d in made and made[d].rank != wait.rank]
            found += [wait.end - source.end for source in sources if wait.start < source.end < wait.end]
    return median(found) if found else 0.0
