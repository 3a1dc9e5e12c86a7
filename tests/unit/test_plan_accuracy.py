"""The measurement of the planner's accuracy: errors and verdicts by hand, and a run of it on the CPU."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from fault_ranks import run_process
from records import timing

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "bench"))

import plan_accuracy
from accuracy import STEP, accuracy_table, choices, verdicts
from table import plan_section

from parallel3d.errors import ConfigError
from parallel3d.monitor.run_record import RunRecord
from parallel3d.planner.calibrate.calibration import Calibration
from parallel3d.planner.calibrate.runs import RunPredictor

GIB = 2**30


def row(layout: str, step: float, predicted: float, calibrated: float | None, **more: Any) -> dict[str, Any]:
    times = {"step_s": step, "predicted_s": predicted, "host_s": 0.0, "calibrated_s": calibrated}
    peaks = {"peak": [2 * GIB, 4 * GIB], "predicted_peak": [2 * GIB, 4 * GIB]}
    return {"model": "7b", "layout": layout, "ranks": 4, "samples": 8, **times, **peaks, **more}


def run_of(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"evaluation": {"rows": list(rows)}}


# Errors


def test_each_layout_is_a_line_of_the_table():
    off = {"predicted_peak": [round(1.8 * GIB), round(4.1 * GIB)]}
    table = accuracy_table(run_of(row("pp4", 2.0, 1.5, 2.1, **off), row("dp4", 1.0, 1.25, None)))
    assert table[1] == "7b pp4 2.000|1.500 (-25.0%)|2.100 (+5.0%)|4.000|4.100 (+2.5%)|-10.0%".replace(
        " ", "|", 2
    ).split("|")
    assert table[2][2:] == ["1.000", "1.250 (+25.0%)", "", "4.000", "4.000 (+0.0%)", "+0.0%"]


def test_errors_stand_beside_their_limits():
    good = row("pp4", 1.0, 1.3, 1.06, predicted_peak=[round(2.08 * GIB), 4 * GIB])
    said = verdicts(run_of(good, row("dp4", 1.0, 0.9, 0.98)))
    assert said[:3] == [
        "Peaks of ranks: 4.0% off at most (limit 5%), 1.0% on average (limit 3%).",
        "Steps, uncalibrated: 30.0% off at most, 20.0% on average.",
        "Steps, calibrated by the other layouts: 6.0% off at most (limit 7%), 4.0% on average (limit 5%).",
    ]
    wrong = verdicts(run_of(row("pp4", 1.0, 1.0, 0.9, predicted_peak=[3 * GIB, 4 * GIB])))
    assert [line.count("MORE THAN") for line in wrong] == [2, 0, 2]
    assert verdicts(run_of()) == ["No layout was measured."]


def test_layouts_that_wait_for_their_hosts_are_told_apart():
    rows = row("pp4", 1.0, 1.0, 1.02), row("dp4", 1.0, 1.0, 1.2, host_s=0.3), row("tp4", 1.0, 1.0, 1.0, host_s=0.04)
    assert verdicts(run_of(*rows))[2:4] == [
        "Steps of all 3 layouts, calibrated by the other layouts: 20.0% off at most (MORE THAN 7%), 7.3% on average (MORE "
        "THAN 5%).",
        "Steps of the 2 that don't wait for their hosts: 2.0% off at most (limit 7%), 1.0% on average (limit 5%).",
    ]


def test_a_choice_is_between_layouts_that_do_the_same_on_all_gpus():
    rows = [
        row("pp4", 1.0, 0.9, 1.1),
        row("dp4", 1.05, 0.8, 1.2),
        row("pp2", 0.5, 0.1, 0.1, ranks=2),
        row("pp4,m1", 0.5, 0.1, 0.1, samples=1),
        row("dp4", 0.7, 0.7, 0.7, model="1b"),
    ]
    (chosen,) = choices(rows, "predicted_s")
    assert (chosen["model"], chosen["chosen"], chosen["best"], chosen["of"]) == ("7b", "dp4", "pp4", 2)
    assert chosen["loss"] == pytest.approx(0.05)
    assert [choice["loss"] for choice in choices(rows, "calibrated_s")] == [0.0]
    uncalibrated, calibrated = verdicts(run_of(*rows))[-2:]
    assert uncalibrated.endswith("dp4, 5.0% slower than the best measured (MORE THAN 3%), pp4.")
    assert calibrated.endswith("pp4, 0.0% slower than the best measured (limit 3%).")


# Layouts


def test_the_layouts_are_those_that_were_asked_for():
    """At least 12 of two models: pp, dp and tp of 1 to 4, ZeRO 0 to 2, three schedules, recomputation on and off."""
    layouts = [plan_accuracy.decided(name.partition(":")[2]) for name in plan_accuracy.LAYOUTS]
    assert len(set(plan_accuracy.LAYOUTS)) >= 12
    assert len({name.partition(":")[0] for name in plan_accuracy.LAYOUTS}) == 2
    for axis in ("stages", "replicas", "tensor_ranks"):
        assert {getattr(layout, axis) for layout in layouts} == {1, 2, 4}
    assert {layout.zero for layout in layouts} == {0, 1, 2}
    assert len({layout.schedule for layout in layouts}) >= 3
    assert {layout.recompute for layout in layouts} == {0, 1}
    assert {layout.world_size for layout in layouts} == {4}


def test_layouts_that_cant_be_measured_are_refused():
    with pytest.raises(ConfigError, match="add such as m8"):
        plan_accuracy.decided("pp2")
    with pytest.raises(ConfigError, match="leave half out"):
        plan_accuracy.decided("pp2,half,m8")
    with pytest.raises(ConfigError, match="needs 8 GPUs; 4xH200 has 4"):
        plan_accuracy.tasks_of(["tiny:pp4,dp2,m4"], plan_accuracy.load_cluster("4xH200"), tiny())
    with pytest.raises(ConfigError, match="no preset of 'Other'"):
        plan_accuracy.cluster_name([{"name": "Other"}], 4)
    assert plan_accuracy.cluster_name([{"name": "NVIDIA H200"}] * 4, 2) == "4xH200"


def tiny() -> dict[str, Any]:
    return {"tiny": plan_accuracy.model_of("tiny", {})}


def test_what_doesnt_fit_the_budget_is_skipped_and_said(tmp_path: Path):
    """By what the model's other layouts have taken: 40 s here, of 50."""
    now = [0.0]

    def train(task: plan_accuracy.Task, *_: Any) -> dict[str, Any]:
        now[0] += 40.0
        return {"model": task.model, "layout": task.layout.text, "status": "failed", "wall_s": 40.0, "error": ["no"]}

    tasks = plan_accuracy.tasks_of(["tiny:pp2,m4", "tiny:dp2,m2"], plan_accuracy.load_cluster("2xcpu"), tiny())
    args = argparse.Namespace(budget=50.0, timeout=120.0, out=tmp_path / "run.json")
    run: dict[str, Any] = {"layouts": []}
    clock = mock.Mock(monotonic=lambda: now[0])
    with mock.patch.multiple(plan_accuracy, train=train, time=clock):
        plan_accuracy.run_all(tasks, run, plan_accuracy.Training(2, 1, {}), [], args)
    assert [entry["status"] for entry in run["layouts"]] == ["failed", "skipped"]
    assert run["layouts"][1]["error"] == ["of the budget 10 s were left, and 40 s may be needed"]
    assert json.loads(args.out.read_text()) == run


# Running

RUNS = ["tiny:pp2,zbv,m4", "tiny:dp2,zero1,m2,ckpt1"]


def command(*words: str) -> int:
    with mock.patch.object(sys, "argv", ["plan_accuracy.py", *words]):
        return plan_accuracy.main()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, full: bool) -> Path:
    """With --full by the launcher itself."""
    out = tmp_path_factory.mktemp("accuracy") / "run.json"
    words = ["--cpu", "--steps", "2", "--timeout", "300", "--commit", "abc", "--out", str(out)]
    run = plan_accuracy.run_process if full else run_process
    with mock.patch.object(plan_accuracy, "run_process", run):
        assert command(*words, "--layouts", *RUNS) == 0
    return out


def test_layouts_are_trained_as_they_are_planned_and_put_beside_predictions(measured: Path):
    run = json.loads(measured.read_text())
    records = [RunRecord.model_validate(entry["record"]) for entry in run["layouts"]]
    assert [record.layout for record in records] == ["pp2,zbv,m4,mb1", "dp2,zero1,1f1b,m2,mb1,ckpt1"]
    tasks = plan_accuracy.tasks_of(RUNS, plan_accuracy.load_cluster("2xcpu"), tiny())
    assert [list(record.bounds) for record in records] == [task.config["pipeline"]["partition"] for task in tasks]
    assert all(record.step.count == 2 and record.seq == 64 for record in records)
    for entry, found in zip(run["layouts"], run["evaluation"]["rows"], strict=True):
        assert found["step_s"] == entry["record"]["step"]["median"]
        assert found["samples"] == 4
        assert found["peak"] == [rank["allocated"] for rank in entry["record"]["ranks"]]
        # Gloo holds what a stage has sent, an activation and a gradient of each micro-batch in fp32, until the batch ends.
        held = found["samples"] * 2 * 64 * 64 * 4 if entry["record"]["layout"].startswith("pp2") else 0
        for peak, predicted in zip(found["peak"], found["predicted_peak"], strict=True):
            assert 0.98 * predicted <= peak <= 1.02 * (predicted + held)
        assert found["predicted_s"] > 0
        assert found["calibrated_s"] > 0
    assert (run["commit"], run["cluster"], run["workload"]["steps"]) == ("abc", "2xcpu", 2)
    page = plan_section(run)
    assert all(f"| tiny | {record.layout} |" in page for record in records)
    assert "2xcpu" in page


def test_records_are_predicted_anew_without_training(measured: Path, capsys: pytest.CaptureFixture[str]):
    before = json.loads(measured.read_text())
    assert command("--again", str(measured), "--commit", "def") == 0
    after = json.loads(measured.read_text())
    assert after["evaluation"] == before["evaluation"] | {"commit": "def"}
    assert after["layouts"] == before["layouts"]
    assert "Peaks of ranks" in capsys.readouterr().out


@cache
def predictor_of_tiny() -> RunPredictor:
    return RunPredictor(tiny()["tiny"], plan_accuracy.load_cluster("2xcpu"))


def taken(entry: Mapping[str, Any], times: float) -> dict[str, Any]:
    """The entry, had everything taken so many times as long as is predicted of it."""
    record = RunRecord.model_validate(entry["record"])
    prediction, seconds = predictor_of_tiny().predict(record, Calibration())
    made_up = {
        "instructions": {name: timing(times * seconds[name]) for name in record.instructions},
        "step": timing(times * prediction.seconds),
        "optimizer": timing(times * prediction.breakdown["optimizer"]),
    }
    return {**entry, "record": record.model_copy(update=made_up).model_dump(mode="json")}


def test_what_the_other_layouts_run_teaches_changes_a_prediction(measured: Path, tmp_path: Path):
    """On a device that is so many times slower than it is said to be, as the other layout's times alone tell."""
    run, again = json.loads(measured.read_text()), tmp_path / "again.json"
    first, second = run["layouts"]

    def evaluated(times: float) -> list[dict[str, Any]]:
        again.write_text(json.dumps({**run, "layouts": [taken(first, 1), taken(second, times)]}))
        assert command("--again", str(again)) == 0
        rows: list[dict[str, Any]] = json.loads(again.read_text())["evaluation"]["rows"]
        return rows

    was, own_was = evaluated(1)
    assert was["calibrated_s"] == pytest.approx(was["predicted_s"], rel=STEP)
    for times in (0.5, 2, 3):
        taught, own = evaluated(times)
        assert taught["calibrated_s"] == pytest.approx(times * was["predicted_s"], rel=STEP), times
        assert own["calibrated_s"] == own_was["calibrated_s"]
        assert [row["predicted_s"] for row in (taught, own)] == [row["predicted_s"] for row in (was, own_was)]


def test_a_layout_is_calibrated_by_the_others_alone(measured: Path):
    seen: list[list[str]] = []

    def calibrate(records: Sequence[RunRecord], predict: Any) -> Calibration:
        seen.append([record.layout for record in records])
        return Calibration()

    layouts = json.loads(measured.read_text())["layouts"]
    with mock.patch.object(plan_accuracy, "calibrate", calibrate):
        rows = plan_accuracy.evaluate([*layouts, layouts[0]], tiny(), plan_accuracy.load_cluster("2xcpu"))
    zbv, sharded = (entry["record"]["layout"] for entry in layouts)
    assert seen == [[sharded], [zbv, zbv], [sharded]]
    assert all(row["calibrated_s"] == row["predicted_s"] for row in rows)
