"""Records of steps of all ranks, and the parts of a step's time and the seconds of each instruction that follow from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import median

from parallel3d.comm.topology import ProcessTopology, pipelines_of
from parallel3d.monitor.memory import format_table
from parallel3d.schedule.instructions import COMPUTE_OPS, RECV_OPS, SEND_OPS, Instruction, Op, depends_on
from parallel3d.schedule.lowering import SENDS
from parallel3d.schedule.timing import Span


@dataclass(frozen=True)
class StepRecord:
    """One step on one rank, in seconds of a clock that all ranks share.

    - begin, end: of train_batch; reduced: when the gradients of the batch were reduced.
    - spans: of the instructions.
    - waits: of instructions for what other ranks send, before they ran.
    - reductions: from the launch of each REDUCE_GRADS until it was done, if the backend reports that.
    - gathers: from the launch of each bucket's GATHER_PARAMS, at the step's end, until it was done; empty if one was still
      under way on the CPU when the record was read.
    - launched: when the host had launched each of `spans`.
    """

    begin: float
    reduced: float
    end: float
    spans: tuple[Span, ...] = ()
    waits: tuple[Span, ...] = ()
    reductions: tuple[Span, ...] = ()
    gathers: tuple[Span, ...] = ()
    launched: tuple[float, ...] = ()


# Parts of a step


@dataclass(frozen=True)
class Breakdown:
    """Seconds of a step, of one rank or combined over several; the parts add up to the total.

    - forward, backward: of all micro-batches, with the waits inside them for gathered weights and gradients' reductions.
    - reduce: from the pipeline's last backward to the reduced gradients.
    - step: from there on: the norm, clipping, the optimizer, and the launch of the gathers.
    - communication: waits for a neighbour's tensors that were already computed, and posting transfers.
    - bubble: idle because the schedule leaves nothing to do, or a neighbour is late.
    - other: loading micro-batches, agreeing on them, and whatever keeps the device from the next instruction.
    """

    forward: float = 0.0
    backward: float = 0.0
    reduce: float = 0.0
    step: float = 0.0
    communication: float = 0.0
    bubble: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        """The whole step."""
        return sum(asdict(self).values())


PARTS = tuple(f.name for f in fields(Breakdown))
_PART_OF_OP = {
    Op.FORWARD: "forward",
    **dict.fromkeys(COMPUTE_OPS - {Op.FORWARD}, "backward"),
    **dict.fromkeys((*SEND_OPS, *RECV_OPS), "communication"),
}
# A table of more ranks than this shows only mean and max.
_MOST_RANKS = 16
# A device waits for the host in an instruction if it ends at most this share of the instruction's time after the launch.
_BEHIND = 0.1


def break_down(records: Sequence[StepRecord], pipelines: Sequence[Sequence[int]]) -> list[Breakdown]:
    """Break down the step of every rank of the world.

    - records: of all ranks.
    - pipelines: as `pipelines_of` returns them.

    A wait for a neighbour is bubble until the neighbour has computed what is waited for, and communication from then on.
    """
    reduced = max(record.reduced for record in records)
    parts: dict[int, Breakdown] = {}
    for ranks in pipelines:
        spans = [span for rank in ranks for span in records[rank].spans]
        ended = {span.instruction: span.end for span in spans if span.instruction.op in COMPUTE_OPS}
        parts |= {rank: _of_rank(records[rank], ended, reduced) for rank in ranks}
    return [parts[rank] for rank in range(len(records))]


def _of_rank(record: StepRecord, ended: Mapping[Instruction, float], reduced: float) -> Breakdown:
    """Break down one rank's step.

    - ended: when each compute instruction of the pipeline ended.
    - reduced: when the last rank of the world had its gradients reduced.
    """
    parts = dict.fromkeys(PARTS, 0.0)
    own_last = max((s.end for s in record.spans if s.instruction.op in COMPUTE_OPS), default=record.begin)
    intervals = [(s.start, s.end, s.instruction, False) for s in record.spans]
    intervals += [(s.start, s.end, s.instruction, True) for s in record.waits]
    now = record.begin
    for start, end, instruction, waits in sorted(intervals, key=lambda interval: interval[:2]):
        if end > own_last:
            continue
        parts["other"] += max(start - now, 0.0)
        now = max(now, start)
        if waits:
            computed = max((ended[d] for d in depends_on(instruction) if d in ended), default=now)
            idle = min(max(computed - now, 0.0), end - now)
            parts["bubble"] += idle
            parts["communication"] += end - now - idle
        else:
            parts[_PART_OF_OP.get(instruction.op, "other")] += end - now
        now = end
    # After its own last backward a rank only waits, for the others' backwards and then for their reductions.
    backwards_end = min(max([now, *ended.values()]), record.end)
    reductions_end = min(max(backwards_end, reduced), record.end)
    parts["bubble"] += backwards_end - now
    parts["reduce"] += reductions_end - backwards_end
    parts["step"] += record.end - reductions_end
    return Breakdown(**parts)


def mean_of(ranks: Sequence[Breakdown]) -> Breakdown:
    """Return the mean over ranks of each part."""
    return Breakdown(*(sum(getattr(rank, name) for rank in ranks) / len(ranks) for name in PARTS))


def breakdown_table(step: int, ranks: Sequence[Breakdown]) -> str:
    """Format seconds by part: mean and max over ranks, the mean's share of the step, and each rank if there are few."""
    columns, mean = (*PARTS, "total"), mean_of(ranks)
    rows: dict[str, Sequence[str]] = {
        f"step {step}, s": columns,
        "mean": [f"{getattr(mean, c):.4g}" for c in columns],
        "share": [f"{getattr(mean, c) / (mean.total or 1.0):.1%}" for c in columns],
        "max": [f"{max(getattr(rank, c) for rank in ranks):.4g}" for c in columns],
    }
    if 1 < len(ranks) <= _MOST_RANKS:
        rows |= {f"rank {r}": [f"{getattr(rank, c):.4g}" for c in columns] for r, rank in enumerate(ranks)}
    return format_table(rows, 14)


# Seconds of instructions

# Instruction with micro_batch 0, standing for those of all micro-batches -> the seconds that each took.
Samples = dict[Instruction, list[float]]


def instruction_times(steps: Sequence[Sequence[StepRecord]], topology: ProcessTopology) -> Samples:
    """Return the times of each kind of compute, send, reduction and gather. steps: of each, the records of all ranks."""
    samples: Samples = {}
    for records in steps:
        measured = [(s.instruction, s.end - s.start) for record in records for s in record.spans]
        measured = [(i, seconds) for i, seconds in measured if i.op in COMPUTE_OPS]
        for ranks in pipelines_of(topology):
            measured += transfer_times([records[rank] for rank in ranks])
        for ranks in topology.get_axis_comm_lists("data"):
            replicas = [records[rank] for rank in ranks]
            measured += collective_times([record.reductions for record in replicas])
            measured += collective_times([record.gathers for record in replicas])
        for i, seconds in measured:
            samples.setdefault(i._replace(micro_batch=0), []).append(seconds)
    return samples


def time_for_host(records: Sequence[StepRecord]) -> float:
    """Return the share of the compute instructions' time in which a rank's device waits for the host. records: of the rank.

    The device waits in an instruction that it has done almost as soon as the host has launched it. (The host's own time would
    not show this: if launches are far ahead of the device, the host waits too, as the queue is bounded.)
    """
    waited = total = 0.0
    for record in records:
        for span, launched in zip(record.spans, record.launched, strict=True):
            if span.instruction.op in COMPUTE_OPS:
                seconds = span.end - span.start
                total += seconds
                waited += seconds if span.end - launched <= _BEHIND * seconds else 0.0
    return waited / total if total else 0.0


def transfer_times(pipeline: Sequence[StepRecord]) -> Iterator[tuple[Instruction, float]]:
    """Yield the times of sends: from when a tensor is computed to when a rank that waits for it has it, for all such waits.

    pipeline: the records of its ranks. A rank that had other work gives no time for a transfer.
    """
    computed = {s.instruction: s for record in pipeline for s in record.spans if s.instruction.op in COMPUTE_OPS}
    for wait in (w for record in pipeline for w in record.waits):
        for source in (computed[d] for d in depends_on(wait.instruction) if d in computed):
            if source.rank != wait.rank and wait.start < source.end < wait.end:
                yield source.instruction._replace(op=SENDS[wait.instruction.op]), wait.end - source.end


def collective_times(replicas: Sequence[Sequence[Span]]) -> Iterator[tuple[Instruction, float]]:
    """Yield the times of each bucket's REDUCE_GRADS or GATHER_PARAMS: from when its last rank is ready until it is done.

    replicas: for each rank of a group, the collectives that it launched in a step. A rank is ready when it has launched the
    collective and has finished those that it launched before.
    """
    ready: dict[Instruction, float] = {}
    done: dict[Instruction, float] = {}
    for launched in replicas:
        before = float("-inf")
        for span in sorted(launched, key=lambda s: s.start):
            i = span.instruction
            ready[i] = max(ready.get(i, before), span.start, before)
            before = max(before, span.end)
            done[i] = max(done.get(i, span.end), span.end)
    for i, start in ready.items():
        yield i, max(done[i] - start, 0.0)


def traffic_times(samples: Samples, num_chunks: int) -> tuple[tuple[float, ...], tuple[tuple[float, ...], ...]]:
    """Return the median seconds of each chunk's gather, all its buckets together, and of each of its buckets' reductions."""
    gather, reductions = [0.0] * num_chunks, [[0.0] * 0 for _ in range(num_chunks)]
    for i, times in sorted(samples.items(), key=lambda item: item[0].bucket or 0):
        if i.op is Op.GATHER_PARAMS:
            gather[i.chunk] += median(times)
        elif i.op is Op.REDUCE_GRADS:
            reductions[i.chunk].append(median(times))
    return tuple(gather), tuple(map(tuple, reductions))
