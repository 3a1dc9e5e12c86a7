"""Metrics, plots and progress."""

import csv
from pathlib import Path
from xml.etree import ElementTree

import pytest

from parallel3d.monitor import MetricsFile, ProgressBar, plot_losses


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    file = MetricsFile(tmp_path / "metrics.csv", ["step", "loss", "eval_loss"])
    file.write({"step": 1, "loss": 3.0})
    file.write({"step": 2, "loss": 2.0, "eval_loss": 2.5})
    return tmp_path / "metrics.csv"  # not closed: a line is there as soon as it is written


def test_a_metrics_file_has_a_line_a_step_at_once(metrics: Path):
    with metrics.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [
        {"step": "1", "loss": "3.0", "eval_loss": ""},
        {"step": "2", "loss": "2.0", "eval_loss": "2.5"},
    ]


def test_losses_are_drawn_without_the_steps_that_have_none(metrics: Path, tmp_path: Path):
    plot_losses(metrics, tmp_path / "loss.svg")
    assert ElementTree.parse(tmp_path / "loss.svg").getroot().tag.endswith("svg")


def test_without_a_terminal_progress_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]):
    with ProgressBar(40, lines=4) as bar:
        for step in range(1, 41):
            bar.update(step, {"loss": f"{step}"})
    assert capsys.readouterr().out.splitlines() == [
        "step 10/40  loss 10",
        "step 20/40  loss 20",
        "step 30/40  loss 30",
        "step 40/40  loss 40",
    ]


def test_a_disabled_bar_is_silent(capsys: pytest.CaptureFixture[str]):
    with ProgressBar(1, enabled=False) as bar:
        bar.update(1, {"loss": "1"})
    assert capsys.readouterr().out == ""
