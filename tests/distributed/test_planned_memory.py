"""Programs and memory as the planner has them, in a process without other ranks, against what runs on gloo do and hold."""

from __future__ import annotations

from itertools import product
from typing import Any

import planned_memory as planned
import pytest
from planned_memory import Measured

from parallel3d.planner.search.result import StageMemory

BF16: dict[str, Any] = {"bf16": {"enabled": True}}
SGD: dict[str, Any] = {"optimizer": {"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1}}}

# Room for the two largest layers and a bit, so that weights are released within a step.
SHARDED: dict[str, Any] = {
    "zero_optimization": {
        "stage3_param_persistence_threshold": 100,
        "stage3_max_live_parameters": 30_000,
        "stage3_prefetch_bucket_size": 4_000,
    }
}

# Weights in host memory, also of one replica, with the state; and some of them.
OFFLOADED = {**SHARDED["zero_optimization"], "stage": 3, "offload_param": {"device": "cpu"}}
ON_HOST: dict[str, Any] = {
    "zero_optimization": {**OFFLOADED, "offload_optimizer": {"device": "cpu"}, "sub_group_size": 1000}
}
LIMITED: dict[str, Any] = {"zero_optimization": {**OFFLOADED, "offload_param": {"device": "cpu", "max_in_cpu": 15_000}}}

# Every schedule, ZeRO stage, slicing, kind of layer and way of recomputation, each with some of the others.
SOME: list[tuple[str, bool, dict[str, Any]]] = [
    ("dp2,zero2,mb3", True, SGD),
    ("pp2,dp2,zero2,1f1b,ckpt2,m6", False, BF16),
    ("pp2,tp2,sp,interleaved,attention", False, {}),
    ("pp2,tp2,zbv,mb1,cheap", True, BF16),
    ("pp2,dp2,zero1,zb-looped,ckpt1", False, BF16),
    ("pp2,dp2,zero1,half,zb-h1", True, BF16),
    ("pp4,half,1f1b,ckpt1", False, {}),
    ("pp2,dp2,zero3,zbv", True, SHARDED),
    ("dp2,zero3,gpipe,chunks2,cheap", False, SHARDED | BF16),
    ("zero3,gpipe,chunks2,ckpt1", False, ON_HOST | BF16),
    ("pp2,dp2,zero3,1f1b", False, LIMITED | BF16),
]
# With --full: the values above, in other company.
OTHERS: list[tuple[str, bool, dict[str, Any]]] = [
    ("mb3", False, {}),
    ("pp2,tp2,zb-h1,cheap", True, BF16),
    ("pp2,tp2,sp,zbv,mb1", False, BF16),
    ("tp2,sp,ckpt1", True, {}),
    ("pp2,dp2,zero2,1f1b,ckpt1,m6", False, BF16),
    ("pp2,dp2,zero2,zb-h1,ckpt2", False, {}),
    ("pp4,1f1b,m6,cheap", False, {}),
    ("pp2,gpipe,m6", True, BF16),
    ("tp2,ckpt2", False, BF16),
    ("pp2,dp2,zero1,1f1b", True, BF16),
    ("pp2,dp2,zero2,zbv", True, {}),
    ("pp4,1f1b,m6", False, {}),
    ("pp4,zb-h1,m6", False, BF16),
    ("dp2,zero3", True, SHARDED),
    ("pp2,dp2,zero3,1f1b,ckpt2,m6", False, SHARDED | BF16),
    ("zero3,1f1b,half", False, ON_HOST | BF16),
]


def everything() -> list[tuple[str, bool, dict[str, Any]]]:
    """The product, on at most 4 ranks."""
    shapes = ["pp1", "dp2", "tp2", "tp2,sp", "pp2", "pp2,dp2", "pp2,tp2", "pp2,tp2,sp"]
    schedules = ["1f1b", "interleaved", "zb-h1", "zbv", "zb-looped"]
    found = []
    for shape, zero, schedule, recompute, tied, more in product(
        shapes, (0, 1, 2, 3), schedules, ("ckpt0", "ckpt1", "cheap"), (False, True), ({}, BF16)
    ):
        possible = (zero == 0 or "dp2" in shape) and (schedule == "1f1b" or "pp2" in shape)
        if possible:
            found.append((f"{shape},zero{zero},{schedule},{recompute}", tied, more | SHARDED if zero == 3 else more))
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "words" in metafunc.fixturenames:
        chosen = [*SOME, *OTHERS, *everything()] if metafunc.config.getoption("--full") else SOME
        metafunc.parametrize(("words", "tied", "changes"), chosen, ids=lambda value: str(value))


def test_a_run_has_the_planned_program_and_holds_the_memory_predicted(
    run_ranks, words: str, tied: bool, changes: dict[str, Any]
):
    layout = planned.parse(words)
    ranks = run_ranks(
        layout.stages * (layout.replicas or 1) * layout.tensor_ranks, planned.measure, words, tied, changes
    )
    stages, between, program, runs = planned.predict(words, tied, changes, ranks[0].bounds)
    for rank in ranks:
        assert rank.program.instructions == program.instructions
        check_state(stages[rank.stage], rank)
        check_activations(stages[rank.stage], between[rank.stage], rank, layout.tensor_ranks > 1)
        if rank.runs and layout.stages == 1:  # gloo holds messages for longer
            check_runs(runs[rank.stage], rank.runs, layout.recompute > 0)


def check_runs(predicted: list[int], measured: list[int], recomputed: bool) -> None:
    """To 4%: a layer's backward begins before the one after it has freed all. Of a forward whose graph is dropped, at most."""
    assert max(measured) == pytest.approx(max(predicted), rel=0.01)
    for run, (own, expected) in enumerate(zip(measured, predicted, strict=True)):
        assert own <= 1.04 * expected, run
        assert own >= 0.99 * expected or recomputed, run


def check_state(stage: StageMemory, rank: Measured) -> None:
    """Each to 1%; the optimizer also keeps a count of its steps for each tensor."""
    report = {name: measured for name, (_, measured) in rank.report.items()}
    for name in ("weights", "gradients", "masters", "optimizer", "transient"):
        assert stage.parts.get(name, 0) == pytest.approx(report[name], rel=0.01), name
    kept = stage.phases["save"]
    assert stage.phases["steady"] == pytest.approx(kept - report["transient"], rel=0.01)
    if "gathered" in report:
        assert stage.parts["gathered"] == report["gathered"]
        assert report["gathered"] > 0
    assert stage.host == report.get("host", 0)
    # What an optimizer takes for itself is that of the replica with the largest part.
    needed = stage.phases["step"] - kept
    assert rank.step_peak <= needed * 1.01 + 256


def check_activations(stage: StageMemory, between: int, rank: Measured, is_sliced: bool) -> None:
    """Between instructions to 1%, and the most within one too, but for messages that gloo holds until the batch is over.

    Under tensor slicing gloo's threads let go of what a collective took whenever they come to it, so that no two runs hold the
    same: there what micro-batches hold counts by the median.
    """
    by_median, at_most = rank.report["activations"]
    assert between == pytest.approx(by_median if is_sliced else at_most, rel=0.01)
    # On the CPU what is gathered is written into storages that were there before, and isn't recorded.
    predicted = stage.phases["backward"] - stage.phases["save"] - stage.parts.get("gathered", 0)
    tolerance = 0.1 if is_sliced else 0.01
    assert predicted * (1 - tolerance) <= rank.batch_peak <= predicted * (1 + tolerance) + rank.in_transit
