"""What was predicted of a run beside what it measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.table import Table

from parallel3d.monitor.run_record import RunRecord
from parallel3d.planner.search.result import Prediction

# Of more instructions, or ranks, than this the table shows the worst alone, and the mean error of all.
_MOST_LINES = 16
# Parts of a step as Prediction.breakdown names them -> as RunRecord.breakdown does.
_PARTS = {
    "forward": ("forward",),
    "backward": ("backward",),
    "exposed communication": ("communication", "reduce"),
    "optimizer": ("step",),
}


class Line(BaseModel):
    """One number twice. unit: seconds, bytes, or a share of the time."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    what: str
    unit: Literal["s", "B", "share"]
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """(predicted - measured) / measured; of shares the difference."""
        difference = self.predicted - self.measured
        if self.unit == "share" or not difference:
            return difference
        return difference / self.measured if self.measured else float("inf")


class Comparison(BaseModel):
    """A run, by lines. step: its seconds, their parts, and the bubble; instructions: medians; memory: peaks of each rank."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layout: str
    device: str
    step: tuple[Line, ...]
    instructions: tuple[Line, ...]
    memory: tuple[Line, ...]


def compare(record: RunRecord, prediction: Prediction, instructions: Mapping[str, float]) -> Comparison:
    """prediction: of the layout that ran; instructions: predicted seconds by kind_name. What one side lacks is left out."""
    parts = [
        _line(name, "s", prediction.breakdown[name], sum(record.breakdown.get(part, 0.0) for part in measured))
        for name, measured in _PARTS.items()
        if name in prediction.breakdown
    ]
    step = _line("step", "s", prediction.seconds, record.step.median)
    return Comparison(
        layout=record.layout,
        device=record.device,
        step=(step, *parts, _line("bubble", "share", prediction.bubble, record.bubble)),
        instructions=tuple(
            _line(name, "s", instructions[name], timing.median)
            for name, timing in record.instructions.items()
            if name in instructions
        ),
        memory=tuple(_peaks(record, prediction)),
    )


def _line(what: str, unit: Literal["s", "B", "share"], predicted: float, measured: float) -> Line:
    return Line(what=what, unit=unit, predicted=predicted, measured=measured)


def _peaks(record: RunRecord, prediction: Prediction) -> Iterator[Line]:
    stages = {stage.stage: stage for stage in prediction.memory}
    for rank in record.ranks:
        stage = stages.get(rank.stage)
        if stage is None:
            continue
        if rank.allocated is not None:
            yield _line(f"rank {rank.rank} allocated", "B", stage.allocated, rank.allocated)
        if rank.reserved is not None and rank.outside is not None:
            yield _line(f"rank {rank.rank} reserved", "B", stage.reserved, rank.reserved + rank.outside)


def comparison_table(comparison: Comparison) -> Table:
    """Predicted beside measured, with the error in percent (of shares, in percentage points)."""
    table = Table(title=f"{comparison.layout} on {comparison.device}", title_justify="left")
    for column in ("", "predicted", "measured", "error"):
        table.add_column(column, justify="right" if column else "left")
    for lines in (comparison.step, comparison.instructions, comparison.memory):
        for line in _shown(lines):
            error = f"{line.error * 100:+.1f} " + ("pp" if line.unit == "share" else "%")
            table.add_row(line.what, _text(line, line.predicted), _text(line, line.measured), error)
        if len(lines) > _MOST_LINES:
            mean = sum(abs(line.error) for line in lines) / len(lines)
            table.add_row(f"... {len(lines)}, mean error", "", "", f"{mean:.1%}")
        table.add_section()
    return table


def _shown(lines: Sequence[Line]) -> Sequence[Line]:
    if len(lines) <= _MOST_LINES:
        return lines
    worst = sorted(range(len(lines)), key=lambda k: -abs(lines[k].error))[:_MOST_LINES]
    return [lines[k] for k in sorted(worst)]


def _text(line: Line, value: float) -> str:
    if line.unit == "share":
        return f"{value:.1%}"
    return f"{value / 2**30:.3f} GiB" if line.unit == "B" else f"{value * 1e3:.3f} ms"


def print_comparison(comparison: Comparison) -> None:
    """To standard output, as wide as the terminal, or as most files are read."""
    console = Console()
    (console if console.is_terminal else Console(width=100)).print(comparison_table(comparison), highlight=False)
