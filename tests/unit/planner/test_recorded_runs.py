"""Runs on GPUs whose records are in the repository, predicted anew by the planner as it is now."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from parallel3d.monitor.run_record import RunRecord
from parallel3d.planner.calibrate.calibration import Calibration
from parallel3d.planner.calibrate.runs import RunPredictor
from parallel3d.planner.cluster.file import load_cluster
from parallel3d.planner.search.model import PlannedModel, load_model

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "bench"))

import accuracy
import plan_accuracy

RESULTS = Path(plan_accuracy.__file__).parent / "results"
ON_4, ON_2 = "2026-11-22-plan-accuracy.json", "2026-11-22-plan-accuracy-2.json"


def recorded(name: str) -> list[dict[str, Any]]:
    run = json.loads((RESULTS / name).read_text())
    return [layout for layout in run["layouts"] if "record" in layout]


@cache
def model_of(name: str) -> PlannedModel:
    return load_model(name, config={"steps_per_print": None})


@pytest.mark.parametrize(
    "name", ["dp4,zero2,1f1b,m2,mb1", "pp2,dp2,zero1,1f1b,m4,mb1", "pp4,zb-h1,m8,mb1", "tp4,1f1b,m8,mb1"]
)
def test_what_instructions_are_made_of_is_all_that_they_take(name: str):
    """Reductions in every micro-batch and tensor-parallel exchanges included: a fit would count their time as GEMMs."""
    layout = next(layout for layout in recorded(ON_4) if layout["record"]["layout"] == name)
    record, predictor = (
        RunRecord.model_validate(layout["record"]),
        RunPredictor(model_of("7b"), load_cluster("4xH200")),
    )
    _, seconds = predictor.predict(record, Calibration())
    parts = predictor.parts(record, Calibration())
    computing = {kind for kind in seconds if kind[0] in "FBIW" and kind[1] == "@"}
    assert computing <= parts.instructions.keys()
    for kind, found in parts.instructions.items():
        assert sum(found.values()) == pytest.approx(seconds[kind], rel=1e-6), kind
    assert sum(parts.step.values()) == pytest.approx(predictor.predict(record, Calibration())[0].seconds, rel=1e-3)


def test_layouts_on_two_gpus_are_predicted_within_the_limits():
    """Peaks as they are; steps by what the other layouts' runs teach, and the layout that is chosen by them.

    Of layouts that wait for their hosts, which differ by half from one machine to the next, some are further off.
    """
    layouts = recorded(ON_2)
    rows = plan_accuracy.evaluate(layouts, {name: model_of(name) for name in ("1b", "7b")}, load_cluster("2xH200"))
    assert len(rows) == len(layouts) == 15
    peaks = [abs(error) for row in rows for error in accuracy.peak_errors(row)]
    errors = {row["model"] + ":" + row["layout"]: abs(accuracy.step_error(row, "calibrated_s")) for row in rows}
    waiting = {row["model"] + ":" + row["layout"] for row in rows if accuracy.waits_for_host(row)}
    steps = [error for layout, error in errors.items() if layout not in waiting]
    assert max(peaks) <= accuracy.PEAK
    assert mean(peaks) <= accuracy.PEAK_MEAN
    assert waiting == {
        "1b:pp2,1f1b,m16,mb1",
        "1b:dp2,zero1,1f1b,m8,mb1",
        "1b:tp2,sp,1f1b,m8,mb4",
        "1b:dp2,zero1,1f1b,m8,mb1,ckpt1",
        "1b:tp2,1f1b,m8,mb2",
    }
    assert max(steps) <= accuracy.STEP
    assert mean(errors.values()) <= accuracy.STEP_MEAN
    assert sum(error <= accuracy.STEP for error in errors.values()) >= 12
    choices = accuracy.choices(rows, "calibrated_s")
    assert [choice["model"] for choice in choices] == ["7b", "1b"]
    assert all(choice["loss"] <= accuracy.CHOICE for choice in choices)
