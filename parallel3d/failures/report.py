"""Reports of a verdict: a short text for the terminal, and a file for each rank with everything that is known."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from parallel3d.failures.board import REPORT, VERDICT
from parallel3d.failures.neighbours import FindProgram
from parallel3d.failures.verdict import Kind, Report, Verdict, situation
from parallel3d.schedule.draw import neighbourhood

_REMEDY = (
    "If it needs that time: set failures.timeout_s, or put what takes it inside `with engine.unwatched():` "
    "on the ranks that do it."
)


def render(verdict: Verdict, reports: Mapping[int, Report], around: str) -> str:
    """Return the verdict's line, the schedule around its place (see `grid`), and for a stall what each rank waits for."""
    parts = [verdict.line, around]
    if verdict.kind is not Kind.FAILED:
        parts.append(situation(reports))
    if verdict.kind is Kind.LATE:
        parts.append(_REMEDY)
    return "\n".join(part for part in parts if part)


def grid(verdict: Verdict, find_program: FindProgram) -> str:
    """Return the schedule around the verdict's place; empty if the place is not in a schedule."""
    place = verdict.place
    if place is None or place.program is None or place.position is None:
        return ""
    program = find_program(*place.program)
    return "" if program is None else neighbourhood(program, verdict.stage, place.position)


def write_report(folder: Path, own: Report, verdict: Verdict, reports: Mapping[int, Report], around: str) -> None:
    """Write failure-<rank>.json: the verdict, the same on all ranks, this rank's report, and all reports that it knows."""
    content = {
        "verdict": VERDICT.dump_python(verdict, mode="json"),
        "grid": around.splitlines(),
        "own": REPORT.dump_python(own, mode="json"),
        "reports": [REPORT.dump_python(report, mode="json") for _, report in sorted(reports.items())],
    }
    path = folder / f"failure-{own.rank}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        say(f"{path} can't be written: {error.strerror}")


def say(text: str) -> None:
    """Print to stderr in one write, since other ranks may be printing too; do nothing if stderr is closed."""
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass
