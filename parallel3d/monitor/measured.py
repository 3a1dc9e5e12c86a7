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
    return _times_in_line([[record.reductions for record in records] for records in replicas])


def traffic_times(
    replicas: Sequence[Sequence[StepRecord]], num_chunks: int
) -> tuple[tuple[float, ...], tuple[tuple[float, ...], ...]]:
    """(seconds of each chunk's gather, of the reductions of each of its buckets): medians; replicas: as `reduction_times`."""
    gathers = _times_in_line([[record.gathers for record in records] for records in replicas])
    seconds = {i: median(times) for i, times in {**gathers, **reduction_times(replicas)}.items()}
    gather, reductions = [0.0] * num_chunks, [[0.0] * 0 for _ in range(num_chunks)]
    for i in sorted(seconds, key=lambda i: i.bucket or 0):
        if i.op is Op.GATHER_PARAMS:
            gather[i.chunk] += seconds[i]
        else:
            reductions[i.chunk].append(seconds[i])
    return tuple(gather), tuple(map(tuple, reductions))


def _times_in_line(replicas: Sequence[Sequence[Sequence[Span]]]) -> Samples:
    """See `reduction_times`. replicas: for each, of each rank the spans from launch to end."""
    found: Samples = {}
    for ranks in replicas:
        ready: dict[Instruction, list[Span]] = {}
        for launched in ranks:
            before = float("-inf")
            for span in sorted(launched, key=lambda s: s.start):
                ready.setdefault(span.instruction, []).append(replace(span, start=max(span.start, before)))
                before = max(before, span.end)
        for instruction, spans in ready.items():
            seconds = max(s.end for s in spans) - max(s.start for s in spans)
            found.setdefault(_kind(instruction), []).append(max(seconds, 0.0))
    return found


def _kind(instruction: Instruction) -> Instruction:
    return instruction._replace(micro_batch=0)
