"""Deviations of loss curves from plain runs, against the noise of bf16. Pure functions of the JSON of curves.py.

`plain`: losses of the plain bf16 runs, which differ in rounding alone, the one to compare with first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Curve = Sequence[float]


def noise(plain: Sequence[Curve]) -> float:
    """The widest spread of the plain runs at any step."""
    return max(max(losses) - min(losses) for losses in zip(*plain, strict=True))


def outside(curve: Curve, plain: Sequence[Curve]) -> float:
    """Return the largest distance of the curve from the plain runs' band; inf if a loss is not finite."""
    bands = [(min(losses), max(losses)) for losses in zip(*plain, strict=True)]
    out = [max(low - loss, loss - high, 0.0) for loss, (low, high) in zip(curve, bands, strict=True)]
    return max(out) if all(loss - loss == 0 for loss in curve) else float("inf")


def mean_of_last(curve: Curve) -> float:
    """Return the mean of the last 50 losses."""
    return sum(curve[-50:]) / len(curve[-50:])


def follows(curve: Curve, plain: Sequence[Curve]) -> bool:
    """Return whether the mean of its last losses is within 1% of the first plain run's, or no farther than another of them."""
    first, *others = map(mean_of_last, plain)
    return abs(mean_of_last(curve) - first) <= max(0.01 * first, *(abs(other - first) for other in others), 0.0)


def is_within_noise(curve: Curve, plain: Sequence[Curve]) -> bool:
    """Return whether the curve stays within the plain runs' band, extended by the band's largest width."""
    return outside(curve, plain) <= noise(plain)


def largest_difference(curve: Curve, other: Curve) -> tuple[float, int]:
    """(absolute difference, step counted from 1)."""
    return max((abs(a - b), step) for step, (a, b) in enumerate(zip(curve, other, strict=True), start=1))


def deviation_table(run: Mapping[str, Any]) -> list[list[str]]:
    """Rows of text: each run's first and last loss, its largest difference from the first plain bf16 run, the verdict.

    Other plain runs have no verdict: they make the noise. Of a case in fp8 the verdict is that of `follows`.
    """
    curves, plain = run["curves"], [run["curves"][name] for name in run["plain_bf16"]]
    rows = [["run", "first loss", "last loss", "mean of the last 50", "largest difference", "at step"]]
    rows[0] += ["outside the band", "within noise"]
    for name, curve in curves.items():
        difference, step = largest_difference(curve, plain[0])
        row = [name, f"{curve[0]:.4f}", f"{curve[-1]:.4f}", f"{mean_of_last(curve):.4f}"]
        row += [f"{difference:.4f}", str(step)] if curve is not plain[0] else ["", ""]
        if name in run["cases"]:
            row += [f"{outside(curve, plain):.4f}", "yes" if _passes(name, curve, plain) else "NO"]
        rows.append(row + [""] * (len(rows[0]) - len(row)))
    return rows


def verdict(run: Mapping[str, Any]) -> str:
    """A sentence: the noise, and whether all cases lie within it."""
    plain = [run["curves"][name] for name in run["plain_bf16"]]
    far = [name for name in run["cases"] if not _passes(name, run["curves"][name], plain)]
    found = f"NOT WITHIN NOISE: {', '.join(far)}" if far else "all cases lie within noise"
    if len(plain) == 1:
        return f"Compared with one run in bf16: {found}."
    return f"Noise of bf16, the widest spread of {len(plain)} runs at any step: {noise(plain):.4f} nats; {found}."


def _passes(name: str, curve: Curve, plain: Sequence[Curve]) -> bool:
    return (follows if "fp8" in name.split("-") else is_within_noise)(curve, plain)
