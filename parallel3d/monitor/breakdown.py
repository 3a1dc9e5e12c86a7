"""Breakdown of a step's time on each rank, from the records of a pipeline's ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from parallel3d.monitor.records import StepRecord
from parallel3d.schedule.instructions import COMPUTE_OPS, RECV_OPS, SEND_OPS, Instruction, Op, depends_on
from parallel3d.schedule.timing import Span

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
        return sum(getattr(self, name) for name in PARTS)


PARTS = tuple(f.name for f in fields(Breakdown))


def _part_of(i: Instruction) -> str:
    if i.op is Op.FORWARD:
        return "forward"
    if i.op in COMPUTE_OPS:
        return "backward"
    return "communication" if i.op in SEND_OPS or i.op in RECV_OPS else "other"


def break_down(pipeline: Sequence[StepRecord], reduced: float) -> list[Breakdown]:
    """Break down each rank's step.

    - pipeline: the records of all ranks of one pipeline.
    - reduced: when the last rank of the world had its gradients reduced.

    A wait for a neighbour is bubble until the neighbour has computed what is waited for, and communication from then on.
    """
    ended = {s.instruction: s.end for record in pipeline for s in record.spans if s.instruction.op in COMPUTE_OPS}
    last = max(ended.values(), default=0.0)
    return [_of_rank(record, ended, last, reduced) for record in pipeline]


def _of_rank(record: StepRecord, ended: Mapping[Instruction, float], last: float, reduced: float) -> Breakdown:
    parts = dict.fromkeys(PARTS, 0.0)
    own_last = max((s.end for s in record.spans if s.instruction.op in COMPUTE_OPS), default=record.begin)
    now = record.begin
    for span, waits in _in_order(record, own_last):
        parts["other"] += max(span.start - now, 0.0)
        now = max(now, span.start)
        if waits:
            computed = max((ended[d] for d in depends_on(span.instruction) if d in ended), default=now)
            idle = min(max(computed - now, 0.0), span.end - now)
            parts["bubble"] += idle
            parts["communication"] += span.end - now - idle
        else:
            parts[_part_of(span.instruction)] += span.end - now
        now = span.end
    # After its own last backward a rank only waits, for the others' backwards and then for their reductions.
    backwards_end = min(max(now, last), record.end)
    reductions_end = min(max(backwards_end, reduced), record.end)
    parts["bubble"] += backwards_end - now
    parts["reduce"] += reductions_end - backwards_end
    parts["step"] += record.end - reductions_end
    return Breakdown(**parts)


def _in_order(record: StepRecord, until: float) -> list[tuple[Span, bool]]:
    """Return the spans, and whether each is a wait, of instructions up to the rank's last compute, in order of time."""
    both = [(s, False) for s in record.spans] + [(s, True) for s in record.waits]
    return sorted((pair for pair in both if pair[0].end <= until), key=lambda pair: (pair[0].start, pair[0].end))


def combined(ranks: Sequence[Breakdown], how: str) -> Breakdown:
    """Return the "mean" or "max" over ranks of each part."""
    columns = {name: [getattr(rank, name) for rank in ranks] for name in PARTS}
    if how == "max":
        return Breakdown(**{name: max(values) for name, values in columns.items()})
    return Breakdown(**{name: sum(values) / len(values) for name, values in columns.items()})


def breakdown_table(step: int, ranks: Sequence[Breakdown]) -> str:
    """Format seconds by part: mean and max over ranks, the mean's share of the step, and each rank if there are few."""
    columns = [*PARTS, "total"]

    def row(name: str, cells: Sequence[str]) -> str:
        return f"{name:<12}" + "".join(f"{cell:>14}" for cell in cells)

    def seconds(name: str, breakdown: Breakdown) -> str:
        return row(name, [f"{getattr(breakdown, c):.4g}" for c in columns])

    mean, most = combined(ranks, "mean"), combined(ranks, "max")
    highest = {**{c: getattr(most, c) for c in PARTS}, "total": max(rank.total for rank in ranks)}
    lines = [
        row(f"step {step}, s", columns),
        seconds("mean", mean),
        row("share", [f"{getattr(mean, c) / (mean.total or 1.0):.1%}" for c in columns]),
        row("max", [f"{highest[c]:.4g}" for c in columns]),
    ]
    if 1 < len(ranks) <= _MOST_RANKS:
        lines += [seconds(f"rank {r}", rank) for r, rank in enumerate(ranks)]
    return "\n".join(lines)
