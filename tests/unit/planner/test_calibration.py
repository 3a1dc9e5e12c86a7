"""Calibration from made-up runs whose true factors are known, with noise, outliers, and few of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import make_record

from parallel3d.errors import ConfigError
from parallel3d.monitor.run_record import RankRecord, RunRecord
from parallel3d.planner.calibrate.calibration import (
    COMPONENTS,
    Calibration,
    PredictedRun,
    calibrate,
    read_calibration,
)
from parallel3d.planner.calibrate.correction import (
    Prior,
    Row,
    bounded_minimum,
    error_deviation,
    error_factor,
    fit,
    t_quantile,
)
from parallel3d.planner.search.result import StageMemory

USED = ("gemm", "attention", "element_wise", "nvlink", "optimizer")
FIXED = 0.004
Fleet = tuple[list[RunRecord], Callable[[RunRecord, Calibration], PredictedRun]]


def layouts(rng: random.Random, number: int) -> dict[str, dict[str, dict[str, float]]]:
    """Layout -> instruction, or "step" -> predicted seconds by component, of layouts and micro-batches of many kinds."""
    found = {}
    for k in range(number):
        size, chunks = rng.choice([1.0, 2.0, 4.0]), rng.choice([2, 4, 8])
        share = {name: rng.uniform(0.2, 1.0) for name in USED}
        instructions = {}
        for op, chunk in product("FB", range(chunks)):
            times = 2e-3 * size * (1 if op == "F" else 2)
            instructions[f"{op}@{chunk}"] = {
                "gemm": times,
                "attention": times * 0.3 * share["attention"],
                "element_wise": times * 0.4 * share["element_wise"],
            }
        instructions |= {f"SA@{c}": {"nvlink": 1e-4 * size * share["nvlink"]} for c in range(chunks - 1)}
        step: dict[str, float] = {}
        for parts in instructions.values():
            for name, seconds in parts.items():
                step[name] = step.get(name, 0.0) + 12 / chunks * seconds
        step["nvlink"] += 0.03 * share["nvlink"]
        step["optimizer"] = 0.02 * share["optimizer"]
        found[f"pp{chunks},m{k + 1},mb{int(size)}"] = {**instructions, "step": step}
    return found


def fleet(truth: Mapping[str, float], number: int, noise: float, seed: int, fixed: float = FIXED) -> Fleet:
    rng = random.Random(seed)
    predicted = layouts(rng, number)

    def measured(parts: Mapping[str, float], besides: float = 0.0) -> float:
        return (sum(truth.get(n, 1.0) * s for n, s in parts.items()) + besides) * rng.lognormvariate(0.0, noise)

    records = [
        make_record(
            layout=layout,
            instructions={name: measured(parts) for name, parts in what.items() if name != "step"},
            step=measured(what["step"], fixed),
            optimizer=measured({"optimizer": what["step"]["optimizer"]}),
        )
        for layout, what in predicted.items()
    ]

    def predict(record: RunRecord, _: Calibration) -> PredictedRun:
        what = dict(predicted[record.layout])
        return PredictedRun(step=what.pop("step"), instructions=what)

    return records, predict


TRUTH = {"gemm": 1.2, "attention": 0.7, "element_wise": 1.6, "nvlink": 2.0, "optimizer": 1.3}


def test_factors_of_runs_without_noise_are_found():
    records, predict = fleet(TRUTH, 24, 0.0, 0)
    found = calibrate(records, predict)
    assert {name: found.factors[name].value for name in USED} == pytest.approx(TRUTH, rel=0.02)
    assert found.fixed.value == pytest.approx(FIXED, rel=0.3)
    for record in records:
        assert found.step_seconds(predict(record, found)) == pytest.approx(record.step.median, rel=0.002)


def test_by_how_much_devices_that_idle_are_faster_is_found():
    """Products, attention and other kernels of a pipeline that idles a fifth of its time take 8% less."""
    records, predict = fleet({}, 12, 0.0, 0, fixed=0.0)
    rng, shares = random.Random(1), {}

    def cooled(parts: Mapping[str, float], idle: float) -> float:
        compute = sum(parts.get(name, 0.0) for name in ("gemm", "attention", "element_wise"))
        return sum(parts.values()) - 0.4 * idle * compute

    runs = []
    for record in records:
        idle = shares[record.layout] = rng.choice([0.0, 0.1, 0.25])
        run = predict(record, Calibration())
        instructions = {name: cooled(parts, idle) for name, parts in run.instructions.items()}
        optimizer = run.step["optimizer"]
        runs.append(make_record(record.layout, instructions, cooled(run.step, idle), optimizer))

    def predict_idle(record: RunRecord, calibration: Calibration) -> PredictedRun:
        run = predict(record, calibration)
        return PredictedRun(run.instructions, run.step, run.memory, shares[record.layout])

    found = calibrate(runs, predict_idle)
    assert found.idle.value == pytest.approx(0.4, abs=0.05)
    assert found.idle.low < 0.4 < found.idle.high
    for record in runs:
        run = predict_idle(record, found)
        assert found.step_seconds(run) == pytest.approx(record.step.median, rel=0.01)
        assert found.seconds(run.instructions["F@0"], run.idle) == pytest.approx(
            record.instructions["F@0"].median, rel=0.01
        )
    assert calibrate(records, predict).idle.value == 0.0, "nothing idled"


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_runs_that_went_wrong_change_little(seed: int):
    """3% of noise, and two of twelve runs that something else slowed down: three times as long."""
    records, predict = fleet(TRUTH, 12, 0.03, seed)
    slow = [
        make_record(
            layout=record.layout,
            step=record.step.median * 3,
            optimizer=record.optimizer.median * 3,
            instructions={name: timing.median * 3 for name, timing in record.instructions.items()},
        )
        for record in records[:2]
    ]
    found = calibrate([*slow, *records[2:]], predict)
    gemm = found.factors["gemm"]
    assert gemm.low < TRUTH["gemm"] < gemm.high
    assert gemm.value == pytest.approx(TRUTH["gemm"], rel=0.15)
    errors = [found.step_seconds(predict(r, found)) / r.step.median - 1 for r in records[2:]]
    assert np.abs(errors).mean() < 0.04


def test_nine_of_ten_factors_and_unseen_steps_lie_in_their_intervals_which_narrow_with_runs():
    inside, widths, sure = {3: [], 12: []}, {3: [], 12: []}, {3: [], 12: []}
    for seed, number in product(range(50), (3, 12)):
        rng = random.Random(1000 + seed)
        truth = {name: rng.uniform(0.7, 1.5) for name in USED}
        records, predict = fleet(truth, number + 4, 0.02, seed)
        found = calibrate(records[:number], predict)
        sure[number] += [found.factors[name].low <= truth[name] <= found.factors[name].high for name in USED]
        for record in records[number:]:
            seconds = found.step_seconds(predict(record, found))
            low, high = found.interval(seconds)
            inside[number].append(low <= record.step.median <= high)
            widths[number].append(high / low - 1)
    for number, hits in inside.items():
        assert np.mean(hits) >= 0.87, number
        assert np.mean(sure[number]) >= 0.85, number
    assert np.mean(widths[12]) < 0.13
    assert np.mean(widths[12]) < np.mean(widths[3]) < 0.4


@given(st.integers(0, 2**16), st.floats(0.0, 0.5), st.integers(1, 3))
def test_few_runs_however_noisy_stay_sensible(seed: int, noise: float, number: int):
    rng = random.Random(seed)
    truth = {name: rng.uniform(0.01, 30.0) for name in USED}
    records, predict = fleet(truth, number, noise, seed)
    found = calibrate(records, predict)
    for factor in [*found.factors.values(), *found.memory.values()]:
        assert 0.25 <= factor.low <= factor.value <= factor.high <= 4.0
    assert 0.0 <= found.fixed.value <= 0.2 * min(r.step.median for r in records)
    for name in set(COMPONENTS) - set(USED):
        assert found.factors[name].value == pytest.approx(1.0)
        assert found.factors[name].high - found.factors[name].low > 0.9, "nothing is known of it"
    low, high = found.interval(1.0)
    assert low < 1.0 < high


def test_one_run_helps_its_like_and_repeating_it_adds_no_certainty():
    records, predict = fleet(TRUTH, 6, 0.01, 3)
    once = calibrate(records[:1], predict)
    assert once.layouts == calibrate([records[0]] * 9, predict).layouts == 1
    for record in records[1:]:
        run = predict(record, once)
        before, after = (c.step_seconds(run) / record.step.median - 1 for c in (Calibration(), once))
        assert abs(after) < abs(before) / 2
    assert once.error > calibrate(records, predict).error


def test_the_order_of_runs_changes_nothing_and_the_file_keeps_all(tmp_path: Path):
    records, predict = fleet(TRUTH, 7, 0.05, 1)
    found = calibrate(records, predict)
    shuffled = list(records)
    random.Random(0).shuffle(shuffled)
    assert calibrate(shuffled, predict) == found
    found.write(tmp_path / "calibration.json")
    assert read_calibration(tmp_path / "calibration.json") == found
    assert (found.device, found.backend) == ("NVIDIA H200", "nccl")


def test_a_step_that_turns_out_to_wait_for_something_else_is_fitted_by_that():
    """A step takes the longer of two things that overlap: computing as predicted, and sending at half the rate."""
    truth = {"gemm": 1.0, "nvlink": 2.0}
    predicted = {f"m{k}": ({"gemm": 0.1 * k}, {"nvlink": (0.05 + 0.01 * k) * k}) for k in range(1, 7)}

    def seconds(parts: Mapping[str, float], factor: Callable[[str], float]) -> float:
        return sum(factor(name) * s for name, s in parts.items())

    def predict(record: RunRecord, calibration: Calibration) -> PredictedRun:
        compute, send = predicted[record.layout]
        step = max((compute, send), key=lambda parts: seconds(parts, lambda n: calibration.factors[n].value))
        return PredictedRun({"F@0": compute, "SA@0": send}, step)

    records = [
        make_record(
            layout=layout,
            instructions={
                "F@0": seconds(compute, truth.__getitem__),
                "SA@0": seconds(send, truth.__getitem__),
            },
            step=max(seconds(parts, truth.__getitem__) for parts in (compute, send)),
        )
        for layout, (compute, send) in predicted.items()
    ]
    found = calibrate(records, predict)
    assert {name: found.factors[name].value for name in truth} == pytest.approx(truth, rel=0.02)
    assert found.error < 0.06


def stage_memory(held: float, workspace: float = 0, slack: float = 0, outside: float = 0) -> StageMemory:
    """Uncorrected bytes of a rank; held: what is counted exactly."""
    allocated = int(held + workspace)
    return StageMemory(
        stage=0,
        parts={"weights": int(held), "workspace": int(workspace)},
        phases={},
        allocated=allocated,
        reserved=allocated + int(slack) + int(outside),
        outside=int(outside),
        capacity=2**40,
    )


def test_memory_that_nothing_counts_exactly_is_learned():
    truth = {"workspace": 1.5, "slack": 0.5, "outside": 2.0}
    gib = 2**30
    memory = {f"m{k}": [((20 + k + r) * gib, (1 + r) * gib, 2 * gib, 0.7 * gib) for r in range(4)] for k in range(6)}
    predicted = {layout: [stage_memory(*ranks) for ranks in memory[layout]] for layout in memory}
    records = []
    for layout, ranks in memory.items():
        measured = []
        for r, (held, workspace, slack, outside) in enumerate(ranks):
            allocated = held + truth["workspace"] * workspace
            reserved, beyond = allocated + truth["slack"] * slack, truth["outside"] * outside
            sizes: dict[str, Any] = {"allocated": int(allocated), "reserved": int(reserved), "outside": int(beyond)}
            measured.append(RankRecord(rank=r, stage=r, device="NVIDIA H200", parts={}, **sizes))
        records.append(make_record(layout=layout, ranks=measured))
    found = calibrate(records, lambda record, _: PredictedRun({}, {"gemm": 1.0}, predicted[record.layout]))
    assert {name: factor.value for name, factor in found.memory.items()} == pytest.approx(truth, rel=0.05)
    for record in records:
        for rank, uncorrected in zip(record.ranks, predicted[record.layout], strict=True):
            assert rank.allocated is not None
            corrected = found.correct_memory(uncorrected)
            assert corrected.allocated == pytest.approx(rank.allocated, rel=0.005)
            whole = (rank.reserved or 0) + (rank.outside or 0)
            assert corrected.reserved == pytest.approx(whole, rel=0.01)
    # Nothing measured, nothing learned.
    blank = calibrate([make_record()], lambda *_: PredictedRun({}, {"gemm": 1.0}, [stage_memory(1, 1)] * 2))
    assert blank.memory == Calibration().memory


def test_what_cant_be_calibrated_says_why(tmp_path: Path):
    records, predict = fleet(TRUTH, 2, 0.0, 0)
    with pytest.raises(ConfigError, match="give directories of runs"):
        calibrate([], predict)
    with pytest.raises(ConfigError, match="several kinds of device: A100 with nccl; NVIDIA H200 with nccl"):
        calibrate([*records, make_record(device="A100")], predict)
    with pytest.raises(ConfigError, match="can't be read"):
        read_calibration(tmp_path / "none.json")
    (tmp_path / "other.json").write_text('{"format": 2}')
    with pytest.raises(ConfigError, match="is not a calibration of this version: format"):
        read_calibration(tmp_path / "other.json")


@given(st.integers(0, 2**16), st.integers(1, 6))
def test_the_bounded_minimum_is_one(seed: int, size: int):
    """By Karush, Kuhn and Tucker: inside its bounds the slope is 0, at a bound it points outwards."""
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(size + 2, size))
    normal, right = root.T @ root + 0.01 * np.eye(size), rng.normal(size=size) * 3
    bounds = np.sort(rng.normal(size=(size, 2)), axis=1)
    x = bounded_minimum(normal, right, bounds)
    slope = normal @ x - right
    assert (x >= bounds[:, 0]).all()
    assert (x <= bounds[:, 1]).all()
    tolerance = 1e-6 * (1 + np.abs(normal).max())
    assert (slope[x > bounds[:, 0]] <= tolerance).all()
    assert (slope[x < bounds[:, 1]] >= -tolerance).all()


def test_without_rows_the_prior_stays_and_one_row_is_weighed_against_it():
    z = 1.6448536269514722
    prior = {"gemm": Prior(1.0, 0.3, 0.25, 4.0)}
    assert dict(fit([], prior, 0.02)["gemm"]) == pytest.approx({"value": 1.0, "low": 1 - z * 0.3, "high": 1 + z * 0.3})
    # Normal distributions multiplied: precisions add up, and weigh the two.
    found = fit([Row(1.02, {"gemm": 1.0}, whole=1.0)], prior, 0.02)["gemm"]
    precisions = np.array([0.3**-2, 0.02**-2])
    assert found.value == pytest.approx(float(np.average([1.0, 1.02], weights=precisions)))
    assert found.high - found.value == pytest.approx(z * float(precisions.sum() ** -0.5))
    near = {"gemm": Prior(1.0, 0.3, 0.9, 4.0)}
    assert fit([], near, 0.02)["gemm"].low == 0.9, "an interval stays within bounds"


def test_students_t_is_that_of_the_tables():
    tables = {2: 2.920, 3: 2.353, 4: 2.132, 6: 1.943, 10: 1.812, 30: 1.697}
    for degrees, quantile in tables.items():
        assert t_quantile(degrees) == pytest.approx(quantile, rel=0.005)
    assert error_factor(error_deviation([]), 0) == pytest.approx(1.19, abs=0.01)
    assert error_factor(error_deviation([0.01] * 50), 50) < 1.035
