"""The report's files: drawings of their own, JSON, and all of them in a directory."""

from __future__ import annotations

from pathlib import Path

from parallel3d.planner.report import svg
from parallel3d.planner.report.memory import memory_chart
from parallel3d.planner.report.page import html_page
from parallel3d.planner.report.timeline import as_timeline, timeline_chart
from parallel3d.planner.report.trade_off import trade_off_chart
from parallel3d.planner.report.words import by_stage
from parallel3d.planner.search.result import PlanResult


def timeline_svg(result: PlanResult) -> str | None:
    """The winner's timeline; None where nothing fits or the plan has none."""
    if not (result.best and result.timeline):
        return None
    return timeline_chart(as_timeline(result.timeline, result.best[0].stages), result.best[0].layout)


def memory_svg(result: PlanResult) -> str | None:
    """Memory of the winner's ranks against their devices; None where nothing fits."""
    if not result.best:
        return None
    winner = result.best[0]
    names = by_stage(((place.pipe, place.rank) for place in result.map), winner.stages)
    return svg.standalone(memory_chart(winner.memory, names, f"Memory of each stage of {winner.layout}"))


def trade_off_svg(result: PlanResult) -> str | None:
    """Peak memory against the time of a step; None where no layout has a time."""
    chart = trade_off_chart(result)
    return None if chart is None else svg.standalone(chart)


def to_json(result: PlanResult) -> str:
    """All of the plan on one line; PlanResult.model_validate_json reads it."""
    return result.model_dump_json() + "\n"


def write_report(result: PlanResult, directory: str | Path) -> tuple[Path, ...]:
    """Write plan.html, plan.json and, of what there is, timeline.svg, memory.svg, trade_off.svg; returns their paths.

    The directory is made where it is missing; files of these names are replaced.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    contents = {
        "plan.html": html_page(result),
        "plan.json": to_json(result),
        "timeline.svg": timeline_svg(result),
        "memory.svg": memory_svg(result),
        "trade_off.svg": trade_off_svg(result),
    }
    written = [(directory / name, text) for name, text in contents.items() if text is not None]
    for path, text in written:
        path.write_text(text, encoding="utf-8")
    return tuple(path for path, _ in written)
