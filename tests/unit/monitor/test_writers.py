"""Monitors of the configuration: what each step, and the script, writes to files and services."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import parallel3d
from parallel3d.config import load
from parallel3d.monitor.writers import MonitorMaster

SAMPLES, RATE = 4, 0.125


def train(steps: int, **monitors: Any) -> parallel3d.DeepSpeedEngine:
    """Train y = w x on x = 1 from w = 1, the loss being y: w falls by RATE in each step."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    sgd = {"type": "SGD", "params": {"lr": RATE}}
    engine = parallel3d.initialize(model=layer, config={"train_batch_size": SAMPLES, "optimizer": sgd, **monitors})[0]
    for _ in range(steps):
        engine.backward(engine(torch.ones(SAMPLES, 1)).mean())
        engine.step()
    return engine


# (name, value, samples) of the losses and rates of two such steps.
TOLD = [
    ("Train/Samples/train_loss", 1.0, 4),
    ("Train/Samples/lr", 0.125, 4),
    ("Train/Samples/train_loss", 0.875, 8),
    ("Train/Samples/lr", 0.125, 8),
]


def test_a_csv_file_of_each_value(tmp_path: Path):
    engine = train(2, csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "run"})
    engine.monitor.write_events([("Eval/my accuracy", torch.tensor(0.5), 8)])
    assert {path.name: path.read_text().split() for path in (tmp_path / "run").iterdir()} == {
        "Train_Samples_train_loss.csv": ["step,train_loss", "4,1.0", "8,0.875"],
        "Train_Samples_lr.csv": ["step,lr", "4,0.125", "8,0.125"],
        "Eval_my_accuracy.csv": ["step,my", "accuracy", "8,0.5"],
    }


def test_a_scripts_own_monitor_goes_on_with_the_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """As DeepSpeed's tutorial makes it; without output_path the folder is in the working directory."""
    monkeypatch.chdir(tmp_path)
    config = load({"csv_monitor": {"enabled": True, "job_name": "run"}})
    for step in (4, 8):  # a training and its restart
        MonitorMaster(config.monitor_config).write_events([("Train/loss", step / 8, step)])
    assert (tmp_path / "run" / "Train_loss.csv").read_text().split() == ["step,loss", "4,0.5", "8,1.0"]


def test_tensorboard_gets_scalars(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    told: list[Any] = []
    writer = SimpleNamespace(add_scalar=lambda *scalar: told.append(scalar), flush=lambda: None)
    fake = SimpleNamespace(SummaryWriter=lambda log_dir: told.append(log_dir) or writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    train(2, tensorboard={"enabled": True, "output_path": str(tmp_path), "job_name": "run"})
    assert told == [str(tmp_path / "run"), *TOLD]


class Wandb:
    """Weights & Biases: one run at a time, in which steps must not fall."""

    def __init__(self) -> None:
        self.run: Any = None
        self.begun: list[dict[str, Any]] = []
        self.told: list[Any] = []

    def init(self, **settings: Any) -> Any:
        self.begun.append(settings)
        self.run = SimpleNamespace(log=lambda values, step=None: self.told.append((values, step)))
        return self.run


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    fake = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_begins_one_run(wandb: Wandb):
    train(2, wandb={"enabled": True, "project": "p", "team": "t", "group": "auto"})
    assert wandb.begun == [{"project": "p", "group": None, "entity": "t"}]
    assert wandb.told == [({name: value}, samples) for name, value, samples in TOLD]


def test_wandb_goes_on_with_a_librarys_run_that_counts_other_steps(wandb: Wandb):
    engine = train(0, wandb={"enabled": True})
    wandb.init(project="of the Trainer's callback")  # after `initialize`, before the first step
    engine.backward(engine(torch.ones(SAMPLES, 1)).mean())
    engine.step()
    assert len(wandb.begun) == 1
    assert wandb.told == [({name: value, "Train/Samples": samples}, None) for name, value, samples in TOLD[:2]]


def test_comet_gets_metrics_at_its_interval(monkeypatch: pytest.MonkeyPatch):
    told: list[Any] = []
    experiment = SimpleNamespace(
        set_name=told.append, log_metric=lambda name, value, step: told.append((name, value, step))
    )
    fake = SimpleNamespace(start=lambda **settings: told.append(settings) or experiment)
    monkeypatch.setitem(sys.modules, "comet_ml", fake)
    section = {"enabled": True, "project": "p", "api_key": "secret", "experiment_name": "n", "samples_log_interval": 8}
    config = load({"comet": section})
    assert "secret" not in repr(config)
    assert "secret" not in config.model_dump_json()
    MonitorMaster(config, writes_here=True).write_events([("a", 1, 0), ("a", 2, 7), ("b", 3, 7), ("a", 4, 8)])
    settings, name, *metrics = told
    assert (settings["project"], settings["api_key"], settings["workspace"], name) == ("p", "secret", None, "n")
    assert metrics == [("a", 1.0, 0), ("b", 3.0, 7), ("a", 4.0, 8)]


def test_one_rank_writes(tmp_path: Path):
    config = load({"csv_monitor": {"enabled": True, "output_path": str(tmp_path)}})
    monitor = MonitorMaster(config, writes_here=False)
    monitor.write_events([("a", 1, 0)])
    assert not monitor.enabled
    assert list(tmp_path.iterdir()) == []


def test_a_package_that_is_missing_stops_no_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.warns(UserWarning, match=r"wandb.enabled is true, but nothing is written there: .*wandb.*; install it"):
        train(1, wandb={"enabled": True}, csv_monitor={"enabled": True, "output_path": str(tmp_path)})
    assert len(list(tmp_path.glob("*/*.csv"))) == 2
