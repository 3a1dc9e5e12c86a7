"""Evaluation of a run's results: agreement of losses, ratios to baselines, the table. Pure functions of the JSON.

A run is {"date", "commit", "command", "hardware", "versions", "workload", "cases": [record, ...], "agreement": [...]},
a record {"case", "framework", "layout", "dp", "zero", "schedule", "status", "wall_s"} and, by its status, "result" or "error".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from roofline import busy_seconds, exposed_communication, roofline_table

Record = Mapping[str, Any]
OWN = "parallel3d"
TOLERANCE = 0.02  # relative: frameworks draw other initial weights, and some report the last micro-batch's loss

TORCHAO = "torchao, tensor-wise"  # the variant of fp8.py that is a peer's


def passed(records: Iterable[Record]) -> list[Record]:
    """Return the cases that have a result."""
    return [record for record in records if record["status"] == "ok"]


def loss_of(record: Record) -> float | None:
    """The loss of the last timed step, None where the framework doesn't say."""
    losses = record["result"].get("loss") or [None]
    return None if losses[-1] is None else float(losses[-1])


def agreement(records: Iterable[Record], tolerance: float = TOLERANCE) -> list[dict[str, Any]]:
    """For each number of replicas, which sets the data, how far the last losses lie apart, as a share of their median.

    Of 1 nat at least: a batch that is learned by heart has a loss near 0. "agree" is false where that is more than the
    tolerance, or a loss is no finite number.
    """
    by_data: dict[int, dict[str, float]] = {}
    for record in passed(records):
        loss = loss_of(record)
        if loss is not None:
            by_data.setdefault(record["dp"], {})[record["case"]] = loss
    groups = []
    for dp, losses in sorted(by_data.items()):
        finite = all(math.isfinite(loss) for loss in losses.values())
        apart = max(losses.values()) - min(losses.values())
        spread = apart / max(1.0, median(losses.values())) if finite else None
        agree = spread is not None and spread <= tolerance
        rounded = None if spread is None else round(spread, 5)
        groups.append({"dp": dp, "cases": list(losses), "spread": rounded, "tolerance": tolerance, "agree": agree})
    return groups


def baseline_of(record: Record, records: Sequence[Record], names: Sequence[str] = ()) -> Record | None:
    """Return the record to compare with: the first of the same layout and ZeRO stage, else of the same layout.

    names: the candidates in order; by default the peers, or our own cases where no peer ran in the layout.
    """
    done = [r for r in passed(records) if r["layout"] == record["layout"]]
    peers = [r for r in done if r["framework"] != OWN]
    if names:
        done = [r for name in names for r in done if r["case"] == name]
    elif peers:
        done = peers
    alike = [r for r in done if r["zero"] == record["zero"]]
    return next(iter([*alike, *done]), None)


def gains_over_1f1b(record: Record, records: Sequence[Record]) -> tuple[float, float] | None:
    """Return the share of 1F1B's step that each own schedule saves, and the simulator's share of the pipeline alone.

    Both are for the instruction times that this schedule had. None where 1F1B itself didn't run in the layout.
    """
    if record["framework"] != OWN or record["schedule"] == "1f1b" or "simulated_s" not in record["result"]:
        return None
    same = [r for r in passed(records) if r["framework"] == OWN and r["layout"] == record["layout"]]
    plain = [r for r in same if r["schedule"] == "1f1b" and r["zero"] == record["zero"]]
    if not plain:
        return None
    result = record["result"]
    measured = 1 - result["step_s"] / plain[0]["result"]["step_s"]
    return measured, 1 - result["simulated_s"] / result["simulated_1f1b_s"]


HEADERS = (
    "case",
    "s/step",
    "min-max",
    "s/step in a row",
    "in a row / own kernels",
    "tokens/s",
    "MFU",
    "bubble: measured / simulated",
    "saved over 1F1B: measured / simulated",
    "exposed comm.",
    "peak GiB",
    "loss",
    "time / baseline",
)


def make_table(records: Sequence[Record], baselines: Sequence[str] = ()) -> list[list[str]]:
    """Headers and a row of text for each record; columns in which no row has anything are left out.

    - s/step in a row: of steps that don't wait for each other.
    - peak GiB: of the rank that needs most, in the timed steps.
    """
    rows = [_row(record, records, baselines) for record in records]
    used = [k for k in range(len(HEADERS)) if k == 0 or any(row[k] for row in rows)]
    return [[row[k] for k in used] for row in (list(HEADERS), *rows)]


def _row(record: Record, records: Sequence[Record], baselines: Sequence[str]) -> list[str]:
    if record["status"] != "ok":
        return [record["case"], record["status"], *[""] * (len(HEADERS) - 2)]
    result, loss = record["result"], loss_of(record)
    baseline, gains = baseline_of(record, records, baselines), gains_over_1f1b(record, records)
    peak, in_a_row = max(result["peak_gib"]), result.get("in_a_row_s")
    return [
        record["case"],
        f"{result['step_s']:.3f}",
        f"{result['min_s']:.3f}-{result['max_s']:.3f}",
        f"{in_a_row:.4f}" if in_a_row else "",
        f"{in_a_row / busy_seconds(result['roofline']):.3f}" if in_a_row and "roofline" in result else "",
        f"{result['tok_s']:,}",
        f"{result['mfu']:.1%}" if result["mfu"] else "",
        f"{result['bubble']:.1%} / {result['simulated_bubble']:.1%}" if "bubble" in result else "",
        "{:.1%} / {:.1%}".format(*gains) if gains else "",
        "{:,.1f} ms, {:.1%}".format(*exposed_communication(result["roofline"])) if "roofline" in result else "",
        f"{peak:.1f}" if peak else "",
        f"{loss:.4f}" if loss is not None else "",
        f"{result['step_s'] / baseline['result']['step_s']:.3f} of {baseline['case']}" if baseline else "",
    ]


def rooflines(records: Iterable[Record]) -> list[tuple[str, list[list[str]]]]:
    """(heading, table) of where each millisecond goes, for each record that has a profiled step."""
    return [
        (f"Where each millisecond of a profiled step of `{record['case']}` goes:", roofline_table(result["roofline"]))
        for record in passed(records)
        if "roofline" in (result := record["result"])
    ]


def as_text(table: Sequence[Sequence[str]]) -> str:
    """The table in columns, for a terminal."""
    widths = [max(len(row[k]) for row in table) for k in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join(lines)


def as_markdown(table: Sequence[Sequence[str]]) -> str:
    """The table in markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in table]
    return "\n".join([lines[0], "|" + "---|" * len(table[0]), *lines[1:]])


def describe_agreement(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """A sentence for each group of cases that trained on the same data."""
    return [_sentence(group) for group in groups if len(group["cases"]) > 1 or not group["agree"]]


def _sentence(group: Mapping[str, Any]) -> str:
    replicas = f"{group['dp']} replica{'s' if group['dp'] > 1 else ''}"
    where = f"Last losses on the data of {replicas}, cases {', '.join(group['cases'])}: "
    if group["spread"] is None:
        return where + "NOT ALL FINITE."
    verdict = "" if group["agree"] else f", MORE THAN {group['tolerance']:.0%}"
    return where + f"{group['spread']:.2%} apart{verdict}."


def block_table(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Rows of text: milliseconds of a block, and their ratio to those of bf16 and of torchao."""
    medians = {row["variant"]: median(row["ms"]) for row in rows}
    table = [["variant", "ms a block", "min-max", "of bf16", "of torchao", "peak GiB"]]
    for row in rows:
        ms = medians[row["variant"]]
        ratios = [f"{ms / medians[name]:.3f}" if name in medians else "" for name in ("bf16", TORCHAO)]
        spread = f"{min(row['ms']):.3f}-{max(row['ms']):.3f}"
        table.append([row["variant"], f"{ms:.3f}", spread, *ratios, f"{row['peak_gib']:.2f}"])
    return table
