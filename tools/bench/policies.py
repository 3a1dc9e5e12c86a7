"""What policies of recomputation hold and cost. Pure functions of the JSON of recomputation.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

Row = Mapping[str, Any]
# Of "none": the bytes and the time of "cheap", compiled. Of the best fixed policy that fits: the time of "auto".
HELD, TIME, AUTO = 0.66, 1.015, 1.01


def _fixed(row: Row, rows: Sequence[Row]) -> dict[str, Row]:
    """Return the rows of fixed policies beside a row, by policy."""
    return {r["policy"]: r for r in rows if r["how"] == row["how"] and r["policy"] != "auto"}


def policy_table(rows: Sequence[Row]) -> list[list[str]]:
    """Rows of text: what a block holds and how long it takes under each policy, beside "none"."""
    table = [["how", "policy", "GiB a block", "of none", "predicted", "ms a block", "min-max", "of none"]]
    for row in rows:
        none, guess, name = _fixed(row, rows)["none"], row["predicted_gib"], row["policy"]
        if name == "auto":
            own = ", ".join(f"{number} {policy}" for policy, number in row["policies"].items())
            name = f"auto in {row['budget_gib']:.3f} GiB: {own}"
        table.append(
            [
                row["how"],
                name,
                f"{row['gib']:.3f}",
                f"{row['gib'] / none['gib']:.3f}",
                "" if guess is None else f"{guess:.3f} ({guess / row['gib'] - 1:+.1%})",
                f"{median(row['ms']):.3f}",
                f"{min(row['ms']):.3f}-{max(row['ms']):.3f}",
                f"{median(row['ms']) / median(none['ms']):.3f}",
            ]
        )
    return table


def _beside(what: str, value: float, limit: float) -> str:
    return f"{what} {value:.3f} ({'limit' if value <= limit else 'MORE THAN'} {limit})"


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Sentences: what "cheap" holds and takes of "none", and "auto" of the best fixed policy that fits its budget."""
    lines = []
    for row in rows:
        fixed, ms = _fixed(row, rows), median(row["ms"])
        if row["policy"] == "cheap":
            held, slower = row["gib"] / fixed["none"]["gib"], ms / median(fixed["none"]["ms"])
            lines.append(
                f"{row['how']} cheap: {_beside('bytes of none', held, HELD)}, {_beside('time', slower, TIME)}."
            )
        if row["policy"] == "auto":
            fitting = [r for r in fixed.values() if r["needed_gib"] <= row["budget_gib"]]
            best = min(fitting, key=lambda r: median(r["ms"]))
            slower = _beside(f"time of {best['policy']}", ms / median(best["ms"]), AUTO)
            room = _beside("GiB", row["needed_gib"], round(row["budget_gib"], 3))
            lines.append(f"{row['how']} auto: {room}, {slower}.")
    return lines
