"""What recorded steps say of a model's chunks: the times that schedule "auto" plans for, and that a run's record keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from parallel3d.monitor.timers import StepRecord
from parallel3d.schedule.instructions import COMPUTE_OPS, Instruction, Op, depends_on
from parallel3d.schedule.simulate import Cost, Span, Timeline, measured_cost

# Instructions of all micro-batches alike, for the first -> what each took, in seconds.
Samples = dict[Instruction, list[float]]

_SENDS = {Op.FORWARD: Op.SEND_ACTIVATION, Op.BACKWARD: Op.SEND_GRADIENT, Op.BACKWARD_INPUT: Op.SEND_GRADIENT}


def instruction_cost(steps: Sequence[Sequence[StepRecord]]) -> Cost:
    """The median time of each kind of compute on each chunk, over steps, replicas and slices. steps: records of all ranks."""
    spans = [span for records in steps for record in records for span in record.spans]
    return measured_cost(Timeline.of(spans, num_ranks=1))


def compute_times(steps: Sequence[Sequence[StepRecord]]) -> Samples:
    """Of each kind of compute on each chunk, over micro-batches, steps, replicas and slices. steps: records of all ranks."""
    found: Samples = {}
    for span in (span for records in steps for record in records for span in record.spans):
        if span.instruction.op in COMPUTE_OPS:
            found.setdefault(_kind(span.instruction), []).append(span.end - span.start)
    return found


def transfer_times(pipelines: Sequence[Sequence[StepRecord]]) -> Samples:
    """Of sends: seconds from when a tensor is made to when a rank that waits for it has it, for all such waits.

    pipelines: of each step and pipeline, the records of its ranks. A rank that had other work says nothing of a transfer.
    """
    found: Samples = {}
    for records in pipelines:
        made = {s.instruction: s for record in records for s in record.spans if s.instruction.op in COMPUTE_OPS}
        for wait in (w for record in records for w in record.waits):
            sources = [made[d] for d in depends_on(wait.instruction) if d in made and made[d].rank != wait.rank]
            for source in sources:
                if wait.start < source.end < wait.end:
                    sent = Instruction(_SENDS[wait.instruction.op], source.instruction.chunk, 0)
                    found.setdefault(sent, []).append(wait.end - source.end)
    return found


def transfer_time(pipelines: Sequence[Sequence[StepRecord]]) -> float:
    """The median over all of `transfer_times`, or 0."""
    found = [seconds for samples in transfer_times(pipelines).values() for seconds in samples]
    return median(found) if found else 0.0


def reduction_times(replicas: Sequence[Sequence[StepRecord]]) -> Samples:
    """Of each bucket's REDUCE_GRADS: seconds from when its last rank is ready for it until it is done.

    replicas: of each step, and of each group of ranks that reduce together, their records. A rank is ready when it has
    launched the reduction and is through with those that it has launched before.
    """
    found: Samples = {}
    for records in replicas:
        ready: dict[Instruction, list[Span]] = {}
        for record in records:
            before = float("-inf")
            for span in sorted(record.reductions, key=lambda s: s.start):
                ready.setdefault(span.instruction, []).append(replace(span, start=max(span.start, before)))
                before = max(before, span.end)
        for instruction, spans in ready.items():
            seconds = max(s.end for s in spans) - max(s.start for s in spans)
            found.setdefault(_kind(instruction), []).append(max(seconds, 0.0))
    return found


def _kind(instruction: Instruction) -> Instruction:
    return instruction._replace(micro_batch=0)
