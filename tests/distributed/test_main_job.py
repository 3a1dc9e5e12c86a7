"""The main job, shortened: what it leaves behind, and that layout and launcher don't change what it learns."""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from fault_ranks import FaultRanks
from warm import run_launcher, run_script

from parallel3d.cli import main
from parallel3d.monitor.run_record import read_run_record

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "examples" / "train_gpt.py")
# Neither the heads nor the context are even.
SMALL = "--steps 8 --eval_every 4 --hidden 48 --heads 3 --layers 2 --context 63 --eval_windows 32 --sample 8".split()
OWN_DATA = [
    "--data",
    argparse.__file__,
]  # a text: each rank would take a second to read the default, the standard library
IMPORTS = ["parallel3d.planner.calibrate.runs"]  # once for all ranks of a launcher
LAUNCHER = [sys.executable, "-m", "parallel3d.launcher", "--num_procs"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node"]


def train(command: list[str], out: Path, *arguments: str) -> tuple[Path, list[dict[str, float]], str]:
    """Run the script; the directory of its results, its metrics, and what it printed."""
    command = [*command, SCRIPT, *SMALL, "--out", str(out), *arguments]
    if command[0] == sys.executable:
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)
        assert done.returncode == 0, done.stderr
    printed = done.stdout if command[0] == sys.executable else run_launcher(ROOT, *command, imports=IMPORTS)
    (directory,) = out.iterdir()
    return directory, read_metrics(directory), printed


def read_metrics(directory: Path) -> list[dict[str, float]]:
    """The values of each step, those of its evaluation included."""
    rows: dict[float, dict[str, float]] = {}
    for line in (directory / "metrics.jsonl").read_text().splitlines()[1:]:
        values = json.loads(line)
        rows.setdefault(values["samples"], {}).update(values)
    return list(rows.values())


def train_warm(ranks: int, folder: Path, *arguments: str) -> tuple[list[dict[str, float]], str]:
    """Run the script on ranks that need not import torch anew; its metrics, and what rank 0 printed."""
    out = folder / "out"
    ended = FaultRanks().run(ranks, folder, run_script, SCRIPT, *SMALL, "--out", str(out), *arguments, timeout=200)
    assert ended.codes == [0] * ranks, ended.outputs
    (directory,) = out.iterdir()
    return read_metrics(directory), ended.outputs[0]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory, full: bool) -> tuple[Path, list[dict[str, float]]]:
    """A run by torchrun that saves: the directory of its checkpoints, and its metrics."""
    directory = tmp_path_factory.mktemp("one_process")
    torchrun = TORCHRUN if full else TORCHRUN[2:]  # whose rank need not import torch
    rows = train([*torchrun, "1"], directory / "out", *OWN_DATA, "--save", str(directory / "saved"))[1]
    return directory / "saved", rows


def check_losses(rows: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    """In training and held out, the last row having both; and gradient norms, which Adam doesn't hide faults from."""
    assert rows[-1]["eval_loss"]
    for row, other in zip(rows, expected, strict=True):
        assert ("eval_loss" in row) == ("eval_loss" in other)
        for column in {"train_loss", "eval_loss"} & set(row):
            assert row[column] == pytest.approx(other[column], abs=1e-4)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)


@pytest.fixture(scope="module")
def two_by_two(tmp_path_factory: pytest.TempPathFactory, full: bool) -> tuple[Path, list[dict[str, float]], str]:
    launcher = LAUNCHER if full else LAUNCHER[2:]  # whose ranks need not import torch
    return train([*launcher, "4"], tmp_path_factory.mktemp("two_by_two"), *OWN_DATA)


def test_the_main_job_leaves_values_a_page_and_timelines(two_by_two: tuple[Path, list[dict[str, float]], str]):
    directory, rows, printed = two_by_two
    assert [row["samples"] for row in rows] == list(range(16, 9 * 16, 16))
    for row in rows:  # of all replicas
        assert row["tokens_per_second"] * row["seconds_per_step"] == pytest.approx(16 * 63)
    assert rows[0]["train_loss"] == pytest.approx(5.55, abs=0.15)  # ln 256: it knows nothing yet
    assert rows[-1]["eval_loss"] < rows[1]["eval_loss"]
    assert main(["report", str(directory)]) == 0
    assert "eval_loss: from" in (directory / "report.html").read_text()
    assert ElementTree.parse(directory / "timeline.svg").getroot().tag.endswith("svg")
    text = (directory / "timeline.svg").read_text()
    assert "measured" in text
    assert "simulated" in text
    events = json.loads((directory / "timeline.json").read_text())["traceEvents"]
    forwards = [event for event in events if event["name"].startswith("F")]
    assert len(forwards) == 2 * 2 * 4  # measured and simulated, 2 stages, 4 micro-batches
    assert "step 8: loss " in printed  # no bar, where there is no terminal
    assert "a sample:" in printed
    record = read_run_record(directory)
    assert record.layout == "pp2,dp2,1f1b,m4,mb2"
    assert record.seq == 63
    assert record.model.layers == ("TokenEmbedding", "Block", "Block", "Head")
    assert {"F@0", "F@1", "B@0", "B@1", "RED@0#0", "RED@1#0"} <= set(record.instructions)
    assert record.step.median > 0
    assert [rank.stage for rank in record.ranks] == [0, 0, 1, 1]
    assert all(rank.allocated > rank.parts["weights"] for rank in record.ranks)


def test_two_by_two_learns_what_one_process_does(
    two_by_two: tuple[Path, list[dict[str, float]], str], one_process: tuple[Path, list[dict[str, float]]]
):
    check_losses(two_by_two[1], one_process[1])


def test_tensor_parallelism_and_chunks_dont_change_what_it_learns(
    one_process: tuple[Path, list[dict[str, float]]], tmp_path: Path, full: bool
):
    arguments = [*OWN_DATA, "--micro_batch", "4", "--schedule", "interleaved", "--chunks", "2", "--layout"]
    if full:
        _, rows, printed = train([*TORCHRUN, "8"], tmp_path, *arguments, "pp2,tp2,dp2,sp")
    else:
        _, rows, printed = train([*LAUNCHER[2:], "4"], tmp_path, *arguments, "pp2,tp2,sp")
    check_losses(rows, one_process[1])
    assert "step 8: loss " in printed  # no bar, where there is no terminal
    assert "a sample:" in printed


def test_a_run_goes_on_from_its_checkpoint(one_process: tuple[Path, list[dict[str, float]]], tmp_path: Path):
    saved, rows = one_process
    assert sorted(path.name for path in saved.glob("*step*")) == ["global_step2", "global_step4", "global_step8"]
    left = tmp_path / "saved"
    shutil.copytree(saved, left)
    shutil.rmtree(left / "global_step8")
    again, printed = train_warm(1, tmp_path, *OWN_DATA, "--save", str(left))
    assert "goes on from step 4" in printed
    columns = ("samples", "train_loss", "grad_norm", "eval_loss")
    assert [[row.get(c) for c in columns] for row in again] == [[row.get(c) for c in columns] for row in rows[4:]]


def test_the_default_data_is_the_standard_library(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    training, held_out = importlib.import_module("corpus").load_corpus()
    assert len(training) > 10**6
    assert 0.02 < len(held_out) / len(training) < 0.5


def test_data_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    with pytest.raises(FileNotFoundError, match=r"no text at .*: give a text file or a directory"):
        importlib.import_module("corpus").load_corpus(str(tmp_path / "nothing"))
