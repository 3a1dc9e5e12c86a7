"""The table "where each millisecond goes" of a profiled step, from what profiled.py keeps of it. Pure functions of the JSON.

A roofline is {"step_ns", "parts_ns": {part: ...}, "hidden_ns", "gemm_flops", "attention_flops"}, each a list over the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from kernels import EXPOSED, PARTS

Roofline = Mapping[str, Any]

# FLOP/s, dense bf16, of an H200: the datasheet's, and what a GEMM of a 7b model's block sustains at the card's 700 W.
RATES = {"peak": 989e12, "sustained": 657e12}
_FLOPS_OF = {"GEMM": "gemm_flops", "attention": "attention_flops"}


def exposed_communication(roofline: Roofline) -> tuple[float, float]:
    """(ms a step, share of the step), the mean over ranks."""
    exposed = mean(roofline["parts_ns"][EXPOSED])
    return exposed / 1e6, exposed / mean(roofline["step_ns"])


def busy_seconds(roofline: Roofline) -> float:
    """The time of a step in which a kernel or a copy runs, the mean over ranks."""
    return (mean(roofline["step_ns"]) - mean(roofline["parts_ns"]["idle"])) / 1e9


def ideal_ms(roofline: Roofline, rate: float) -> float:
    """The step if every rank did nothing but its mean share of the model's FLOPs, at `rate` a second."""
    return sum(mean(roofline[flops]) for flops in _FLOPS_OF.values()) / rate * 1e3


def losses_ms(roofline: Roofline, rate: float) -> dict[str, float]:
    """Return the time that each part adds to the ideal step, the mean over ranks; together they are the mean step.

    Of GEMMs and attention that is their time beyond their FLOPs at `rate` a second, which may be negative.
    """
    return {
        part: mean(roofline["parts_ns"][part]) / 1e6
        - (mean(roofline[_FLOPS_OF[part]]) / rate * 1e3 if part in _FLOPS_OF else 0.0)
        for part in PARTS
    }


def roofline_table(roofline: Roofline) -> list[list[str]]:
    """Rows of text: each part's ms on each rank, their mean and share of the step, and its share of what is lost."""
    ranks = range(len(roofline["step_ns"]))
    step = mean(roofline["step_ns"])
    losses = {name: losses_ms(roofline, rate) for name, rate in RATES.items()}
    lost_to = [f"of the loss to {rate / 1e12:.0f} TFLOP/s" for rate in RATES.values()]
    rows = [["ms", *(f"rank {rank}" for rank in ranks), "mean", "of the step", *lost_to]]
    for part in PARTS:
        shares = [f"{of[part] / sum(of.values()):.1%}" for of in losses.values()]
        rows.append(
            [part, *_milliseconds(roofline["parts_ns"][part]), f"{mean(roofline['parts_ns'][part]) / step:.1%}"]
        )
        rows[-1] += shares
    whole = [f"{sum(of.values()):,.1f} ms" for of in losses.values()]
    rows.append(["the step", *_milliseconds(roofline["step_ns"]), "100.0%", *whole])
    ideals = [ideal_ms(roofline, rate) for rate in RATES.values()]
    rows.append(["all FLOPs alone", *[""] * len(ranks), "", "", *(f"{ms:,.1f} ms" for ms in ideals)])
    hidden = roofline["hidden_ns"]
    rows.append(["communication hidden", *_milliseconds(hidden), f"{mean(hidden) / step:.1%}", *[""] * len(RATES)])
    rows.append(["GEMM TFLOP/s", *_rates(roofline), "", *[""] * len(RATES)])
    return rows


def _milliseconds(ns: Sequence[int]) -> list[str]:
    return [f"{value / 1e6:,.1f}" for value in (*ns, mean(ns))]


def _rates(roofline: Roofline) -> list[str]:
    """Return the FLOP rate of each rank's GEMMs while they ran, and of the whole step."""
    flops, ns = roofline["gemm_flops"], roofline["parts_ns"]["GEMM"]
    return [f"{f / t / 1e3:.3g}" if t else "" for f, t in [*zip(flops, ns, strict=True), (sum(flops), sum(ns))]]
