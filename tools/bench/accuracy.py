"""Errors of predicted layouts against measured ones. Pure functions of the JSON of plan_accuracy.py.

A row is {"model", "layout", "ranks", "samples", "step_s", "predicted_s", "host_s", "calibrated_s", "peak", "predicted_peak"}:
samples of a step; host_s: what of predicted_s is due to the host; calibrated_s: predicted with what the other layouts' runs
teach, None where there is none; peaks: bytes of each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

Row = Mapping[str, Any]
GIB = 2**30
# What predictions must keep: of peaks, of calibrated steps (any, and on average), and of the chosen layout's step.
PEAK, PEAK_MEAN = 0.05, 0.03
STEP, STEP_MEAN = 0.07, 0.05
CHOICE = 0.03
# Of a step, that layouts wait for their hosts which are said to.
WAITING = 0.05


def step_error(row: Row, kind: str) -> float:
    """(predicted - measured) / measured of the step. kind: "predicted_s" or "calibrated_s"."""
    return float(row[kind]) / row["step_s"] - 1


def waits_for_host(row: Row) -> bool:
    """Return whether the host, rather than the device, determines the step's time."""
    return bool(row["host_s"] > WAITING * row["predicted_s"])


def peak_errors(row: Row) -> list[float]:
    """Return (predicted - measured) / measured of each rank's peak."""
    return [predicted / measured - 1 for predicted, measured in zip(row["predicted_peak"], row["peak"], strict=True)]


def choices(rows: Sequence[Row], kind: str) -> list[dict[str, Any]]:
    """For each model the layout that is predicted to be the fastest, and by how much the best measured one is faster.

    Of those on all GPUs, and of the most common number of samples a step. Models with one such layout have no choice.
    """
    found = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model and row[kind] is not None]
        own = [row for row in own if row["ranks"] == max(r["ranks"] for r in rows)]
        samples = [row["samples"] for row in own]
        own = [row for row in own if row["samples"] == max(samples, key=samples.count)]
        if len(own) < 2:
            continue
        chosen, best = (min(own, key=lambda row: row[key]) for key in (kind, "step_s"))
        loss = chosen["step_s"] / best["step_s"] - 1
        found.append({"model": model, "chosen": chosen["layout"], "best": best["layout"], "loss": loss, "of": len(own)})
    return found


def accuracy_table(run: Mapping[str, Any]) -> list[list[str]]:
    """Rows of text: each layout's step and its peak on the rank that needs most, predicted beside measured."""
    table = [["model", "layout", "s/step", "predicted", "calibrated", "peak GiB", "predicted", "worst rank"]]
    for row in run["evaluation"]["rows"]:
        errors, worst = peak_errors(row), row["peak"].index(max(row["peak"]))
        calibrated = row["calibrated_s"]
        line = [row["model"], row["layout"], f"{row['step_s']:.3f}"]
        line.append(f"{row['predicted_s']:.3f} ({step_error(row, 'predicted_s'):+.1%})")
        line.append("" if calibrated is None else f"{calibrated:.3f} ({step_error(row, 'calibrated_s'):+.1%})")
        line.append(f"{row['peak'][worst] / GIB:.3f}")
        line.append(f"{row['predicted_peak'][worst] / GIB:.3f} ({errors[worst]:+.1%})")
        table.append([*line, f"{max(errors, key=abs):+.1%}"])
    return table


def verdicts(run: Mapping[str, Any]) -> list[str]:
    """Sentences: the largest and the mean error of peaks and steps, and what the choice costs, beside their limits."""
    rows = run["evaluation"]["rows"]
    if not rows:
        return ["No layout was measured."]
    calibrated = [row for row in rows if row["calibrated_s"] is not None]
    lines = [_limits("Peaks of ranks", (e for row in rows for e in peak_errors(row)), PEAK, PEAK_MEAN)]
    lines.append(_limits("Steps, uncalibrated", (step_error(row, "predicted_s") for row in rows)))
    if calibrated:
        quick = [row for row in calibrated if not waits_for_host(row)]
        some_wait = 0 < len(quick) < len(calibrated)
        what = f"Steps of all {len(calibrated)} layouts" if some_wait else "Steps"
        kinds = {f"{what}, calibrated by the other layouts": calibrated}
        if some_wait:
            kinds[f"Steps of the {len(quick)} that don't wait for their hosts"] = quick
        for what, some in kinds.items():
            errors = (step_error(row, "calibrated_s") for row in some)
            lines.append(_limits(what, errors, STEP, STEP_MEAN))
    for kind, how in (("predicted_s", "uncalibrated"), ("calibrated_s", "calibrated")):
        lines += [_choice(choice, how) for choice in choices(rows, kind)]
    return lines


def _limits(what: str, errors: Iterable[float], most: float | None = None, on_average: float | None = None) -> str:
    sizes = [abs(error) for error in errors]
    parts = [(max(sizes), most, "off at most"), (mean(sizes), on_average, "on average")]
    return f"{what}: " + ", ".join(_beside(*part) for part in parts) + "."


def _beside(value: float, limit: float | None, words: str) -> str:
    if limit is None:
        return f"{value:.1%} {words}"
    return f"{value:.1%} {words} ({'limit' if value <= limit else 'MORE THAN'} {limit:.0%})"


def _choice(choice: Mapping[str, Any], how: str) -> str:
    beside = _beside(choice["loss"], CHOICE, "slower than the best measured")
    best = "" if choice["chosen"] == choice["best"] else f", {choice['best']}"
    return f"Choice of {choice['of']} layouts of {choice['model']}, {how}: {choice['chosen']}, {beside}{best}."


def unmeasured(run: Mapping[str, Any]) -> list[str]:
    """A sentence for each layout that has no record."""
    return [
        f"`{one['model']}:{one['layout']}` {one['status']}: {next(iter(one['error']), 'without a message')}"
        for one in run["layouts"]
        if "record" not in one
    ]
