"""Breakdown of a step's time on each rank, from the records of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from parallel3d.monitor.memory import format_table
from parallel3d.monitor.records import StepRecord
from parallel3d.schedule.instructions import COMPUTE_OPS, RECV_OPS, SEND_OPS, Instruction, Op, depends_on
from parallel3d.topology import ProcessTopology

# A table of more ranks than this shows mean and max alone.
_MOST_RANKS = 16


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


def pipelines_of(topology: ProcessTopology) -> list[list[int]]:
    """Return the ranks of each pipeline."""
    return topology.get_axis_comm_lists("pipe") or [[rank] for rank in range(topology.world_size())]


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
