"""Predicted and measured values of a run, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from rich.console import Console
from rich.table import Column, Table

from parallel3d.monitor.run_record import RunRecord
from parallel3d.planner.search.result import Prediction

# Of more instructions, or ranks, than this, the table shows only the worst, and the mean error of all.
_MOST_LINES = 16
# Name of a part of the step in Prediction.breakdown -> names in RunRecord.breakdown.
_PARTS = {
    "forward": ("forward",),
    "backward": ("backward",),
    "exposed communication": ("communication", "reduce"),
    "optimizer": ("step",),
}


Unit = Literal["s", "B", "share"]  # seconds, bytes, or share of the time


class Line(NamedTuple):
    """One predicted and measured number."""

    what: str
    unit: Unit
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """(predicted - measured) / measured; the difference if these are shares."""
        difference = self.predicted - self.measured
        if self.unit == "share" or not difference:
            return difference
        return difference / self.measured if self.measured else float("inf")


class Comparison(NamedTuple):
    """Comparison of a run. step: seconds, their parts, and the bubble; instructions: medians; memory: peaks of each rank."""

    layout: str
    device: str
    step: tuple[Line, ...]
    instructions: tuple[Line, ...]
    memory: tuple[Line, ...]


def compare(record: RunRecord, prediction: Prediction, instructions: Mapping[str, float]) -> Comparison:
    """Compare a run with its prediction. What one side lacks is left out.

    instructions: predicted seconds, by kind_name.
    """
    parts = [
        Line(name, "s", prediction.breakdown[name], sum(record.breakdown.get(part, 0.0) for part in measured))
        for name, measured in _PARTS.items()
        if name in prediction.breakdown
    ]
    step = Line("step", "s", prediction.seconds, record.step.median)
    bubble = Line("bubble", "share", prediction.bubble, record.bubble)
    known = {name: timing.median for name, timing in record.instructions.items() if name in instructions}
    medians = tuple(Line(name, "s", instructions[name], median) for name, median in known.items())
    return Comparison(record.layout, record.device, (step, *parts, bubble), medians, tuple(_peaks(record, prediction)))


def _peaks(record: RunRecord, prediction: Prediction) -> Iterator[Line]:
    """Yield the peak memory of each rank."""
    stages = {stage.stage: stage for stage in prediction.memory}
    for rank in record.ranks:
        if rank.stage not in stages:
            continue
        stage = stages[rank.stage]
        if rank.allocated is not None:
            yield Line(f"rank {rank.rank} allocated", "B", stage.allocated, rank.allocated)
        if rank.reserved is not None and rank.outside is not None:
            yield Line(f"rank {rank.rank} reserved", "B", stage.reserved, rank.reserved + rank.outside)


def comparison_table(comparison: Comparison) -> Table:
    """Return a table with the errors in percent, of shares in percentage points."""
    columns = [Column(name, justify="right" if name else "left") for name in ("", "predicted", "measured", "error")]
    table = Table(*columns, title=f"{comparison.layout} on {comparison.device}", title_justify="left")
    for lines in (comparison.step, comparison.instructions, comparison.memory):
        worst = sorted(lines, key=lambda line: -abs(line.error))[:_MOST_LINES]
        for line in (line for line in lines if line in worst):
            error = f"{line.error * 100:+.1f} " + ("pp" if line.unit == "share" else "%")
            table.add_row(line.what, _text(line, line.predicted), _text(line, line.measured), error)
        if len(lines) > _MOST_LINES:
            mean = sum(abs(line.error) for line in lines) / len(lines)
            table.add_row(f"... {len(lines)}, mean error", "", "", f"{mean:.1%}")
        table.add_section()
    return table


def _text(line: Line, value: float) -> str:
    if line.unit == "share":
        return f"{value:.1%}"
    return f"{value / 2**30:.3f} GiB" if line.unit == "B" else f"{value * 1e3:.3f} ms"


def print_comparison(comparison: Comparison) -> None:
    """Print to standard output, as wide as the terminal, else 100 columns."""
    console = Console()
    (console if console.is_terminal else Console(width=100)).print(comparison_table(comparison), highlight=False)
