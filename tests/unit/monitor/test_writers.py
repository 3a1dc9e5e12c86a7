"""Monitors of the configuration: what each step, and the script, writes to files and services."""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from warm import run_codes

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


# Samples -> values of two such steps. The gradient of w is 1.
WRITTEN = {
    4: {"train_loss": 1.0, "lr": 0.125, "grad_norm": 1.0},
    8: {"train_loss": 0.875, "lr": 0.125, "grad_norm": 1.0},
}
SERIES = {
    f"Train/Samples/{name}": [(samples, values[name]) for samples, values in WRITTEN.items()] for name in WRITTEN[4]
}


def test_a_csv_file_of_each_value(tmp_path: Path):
    engine = train(2, csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "run"})
    engine.monitor.write_events([("Eval/my accuracy", torch.tensor(0.5), 8)])
    files = {path.name: path.read_text().split() for path in (tmp_path / "run").glob("*.csv")}
    assert files == {
        "Train_Samples_train_loss.csv": ["step,train_loss", "4,1.0", "8,0.875"],
        "Train_Samples_lr.csv": ["step,lr", "4,0.125", "8,0.125"],
        "Train_Samples_grad_norm.csv": ["step,grad_norm", "4,1.0", "8,1.0"],
        "Eval_my_accuracy.csv": ["step,my", "accuracy", "8,0.5"],
    }
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["layout"], config["optimizer"]["params"]) == ("pp1,1f1b,m1,mb4", {"lr": RATE})


def test_a_scripts_own_monitor_goes_on_with_the_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """As DeepSpeed's tutorial makes it; without output_path the folder is in the working directory."""
    monkeypatch.chdir(tmp_path)
    config = load({"csv_monitor": {"enabled": True, "job_name": "run"}})
    for step in (4, 8):  # a training and its restart
        MonitorMaster(config.monitor_config).write_events([("Train/loss", step / 8, step)])
    assert (tmp_path / "run" / "Train_loss.csv").read_text().split() == ["step,loss", "4,0.5", "8,1.0"]


def test_what_is_due_is_written_with_its_step(tmp_path: Path):
    """Speed, memory, and the times of DeepSpeed's names, in the step that prints; each line of the run's file is a step."""
    folder = tmp_path / "run"
    train(4, run_record={"directory": str(folder)}, steps_per_print=2, monitor={"peak_flops": 1e9}).monitor.flush()
    start, *steps = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    assert start["config"]["layout"] == "pp1,1f1b,m1,mb4"
    assert [step["samples"] for step in steps] == [4, 8, 12, 16]
    plain = {"time", "samples", "train_loss", "lr", "grad_norm"}
    times = {f"elapsed_time_ms_{part}" for part in "forward backward backward_inner backward_allreduce step".split()}
    speed = {"seconds_per_step", "samples_per_second", "memory_gib", "bubble", "mfu"}
    assert [set(step) - plain for step in steps] == [set(), speed | times, set(), speed | times]
    last = steps[-1]
    assert last["samples_per_second"] * last["seconds_per_step"] == pytest.approx(SAMPLES)
    # A product of 4 x 1 x 1, and twice that in the backward.
    assert last["mfu"] * 1e9 * last["seconds_per_step"] == pytest.approx(3 * 2 * SAMPLES)
    assert last["elapsed_time_ms_backward"] >= last["elapsed_time_ms_backward_inner"] > 0


def test_fp16_writes_its_loss_scale(tmp_path: Path):
    train(2, fp16={"enabled": True, "loss_scale": 128}, run_record={"directory": str(tmp_path)}).monitor.flush()
    _, *steps = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [(step["train_loss"], step["loss_scale"]) for step in steps] == [(1.0, 128.0), (0.875, 128.0)]


def test_tensorboards_own_reader_finds_the_scalars(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    engine = train(2, tensorboard={"enabled": True, "output_path": str(tmp_path), "job_name": "run"})
    engine.monitor.flush()
    found = EventAccumulator(str(tmp_path / "run"))
    found.Reload()
    assert set(found.Tags()["scalars"]) == set(SERIES)
    for name, series in SERIES.items():
        assert [(event.step, event.value) for event in found.Scalars(name)] == series
    [text] = found.Tensors("config/text_summary")
    assert b'"layout": "pp1,1f1b,m1,mb4"' in text.tensor_proto.string_val[0]


def finished(run: Any) -> Path:
    """Finish an offline run, and return its file."""
    import wandb

    run.finish()
    wandb.teardown()  # waits for the process that writes the file
    return Path(run.settings.sync_file)


def records(file: Path) -> list[Any]:
    """Read an offline run: a log of LevelDB's format, of wandb's own records."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, found, at, part = file.read_bytes(), [], 7, b""
    while at < len(data):
        length, kind = struct.unpack_from("<HB", data, at + 4)
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            found.append(Record.FromString(part))
            part = b""
        if (left := -at % 32768) < 7:  # of a block
            at += left
    return found


def history(file: Path) -> list[dict[str, Any]]:
    rows = [record.history.item for record in records(file)]  # none in records of other kinds
    return [{"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items} for items in rows if items]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    import wandb

    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield wandb
    wandb.teardown()


def test_an_offline_run_of_wandb_has_the_values(wandb: Any):
    train(2, wandb={"enabled": True, "project": "p", "team": "t", "group": "auto"}).monitor.flush()
    assert (wandb.run.project, wandb.run.entity) == ("p", "t")
    assert wandb.run.config["layout"] == "pp1,1f1b,m1,mb4"
    rows = {row["_step"]: row for row in history(finished(wandb.run))}
    for samples, values in WRITTEN.items():
        assert {name: rows[samples][f"Train/Samples/{name}"] for name in values} == values


def test_a_librarys_run_of_wandb_that_counts_other_steps_is_joined(wandb: Any):
    engine = train(0, wandb={"enabled": True})
    run = wandb.init(
        project="of-the-trainers-callback", config={"seed": -1}
    )  # after `initialize`, before the first step
    run.log({"train/loss": 3.0})
    engine.backward(engine(torch.ones(SAMPLES, 1)).mean())
    engine.step()
    engine.monitor.flush()
    assert wandb.run is run
    file = finished(run)
    *_, row = history(file)
    assert (row["_step"], row["Train/Samples"], row["Train/Samples/train_loss"]) == (1, SAMPLES, 1.0)
    axes = {record.metric.glob_name: record.metric.step_metric for record in records(file)}
    assert axes["Train/Samples/*"] == "Train/Samples"


FAILING = """
import sys
from test_writers import train
train(3, steps_per_print=None, run_record={"directory": "run"}, wandb={"enabled": True})
raise RuntimeError("of the script")
"""


def test_what_a_failing_script_has_trained_is_written_at_its_end(tmp_path: Path):
    """Three steps take less than the second between two writes."""
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    [done] = run_codes(FAILING, tmp_path, [environment])
    assert done.stderr.strip().endswith("RuntimeError: of the script")
    _, *steps = map(json.loads, (tmp_path / "0" / "run" / "metrics.jsonl").read_text().splitlines())
    losses = [1.0, 1.0 - RATE, 1.0 - 2 * RATE]
    assert [step["train_loss"] for step in steps] == losses
    [file] = tmp_path.glob("0/wandb/offline-run-*/*.wandb")
    assert [row["Train/Samples/train_loss"] for row in history(file)] == losses


WRITES_FIRST = """
from parallel3d.config import load
from parallel3d.monitor.writers import MonitorMaster
monitor = MonitorMaster(load({"run_record": {"directory": "run"}}), writes_here=True)
monitor.write_events([("Eval/accuracy", 0.5, 0)])
monitor.collect(4, {"train_loss": 0.25})
"""


def test_values_are_written_at_the_end_also_if_the_script_has_written_first(tmp_path: Path):
    [done] = run_codes(WRITES_FIRST, tmp_path, [{**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}])
    assert done.returncode == 0, done.stderr
    _, *rows = map(json.loads, (tmp_path / "0" / "run" / "metrics.jsonl").read_text().splitlines())
    assert [(row["samples"], row.get("train_loss")) for row in rows] == [(0, None), (4, 0.25)]


def test_mlflows_file_store_has_the_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    section = {"enabled": True, "tracking_uri": tmp_path.as_uri(), "experiment_name": "e", "run_name": "r"}
    train(2, mlflow=section).monitor.flush()
    mlflow.flush_async_logging()
    run = mlflow.active_run()
    mlflow.end_run()
    assert run.info.run_name == "r"
    client = mlflow.MlflowClient()
    for name, series in SERIES.items():
        assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)] == series
    assert mlflow.artifacts.load_dict(f"{run.info.artifact_uri}/config.json")["layout"] == "pp1,1f1b,m1,mb4"
    with mlflow.start_run() as run:  # of a library
        train(1, mlflow=section).monitor.flush()
        mlflow.flush_async_logging()
    assert [m.value for m in client.get_metric_history(run.info.run_id, "Train/Samples/train_loss")] == [1.0]


def test_comet_gets_metrics_at_its_interval(monkeypatch: pytest.MonkeyPatch):
    written: list[Any] = []
    experiment = SimpleNamespace(
        set_name=written.append,
        log_parameters=lambda config: None,
        log_metric=lambda name, value, step: written.append((name, value, step)),
    )
    fake = SimpleNamespace(start=lambda **settings: written.append(settings) or experiment)
    monkeypatch.setitem(sys.modules, "comet_ml", fake)
    chosen = {"project": "p", "workspace": "w", "experiment_key": "k", "mode": "create", "online": False}
    own = {"enabled": True, "experiment_name": "n", "samples_log_interval": 8}
    section = {**own, **chosen, "api_key": "secret"}
    config = load({"comet": section})
    assert "secret" not in repr(config)
    assert "secret" not in config.model_dump_json()
    MonitorMaster(config, writes_here=True).write_events([("a", 1, 0), ("a", 2, 7), ("b", 3, 7), ("a", 4, 8)])
    settings, name, *metrics = written
    assert (settings, name) == ({**chosen, "api_key": "secret"}, "n")
    assert metrics == [("a", 1.0, 0), ("b", 3.0, 7), ("a", 4.0, 8)]


class Own:
    """A script's own monitor, which fails at its second call."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def log_config(self, config: Mapping[str, Any]) -> None:
        self.calls.append(config["layout"])

    def write_events(self, events: Sequence[tuple[str, float, int]]) -> None:
        if len(self.calls) > 1:
            raise OSError("disk full")
        self.calls.append(events)


def test_a_scripts_own_monitor_and_that_its_failure_ends_no_training():
    engine, own = train(0), Own()
    engine.monitor.add("mine", own)
    engine.monitor.write_events([("Eval/accuracy", torch.tensor(0.5), 0)])
    assert own.calls == ["pp1,1f1b,m1,mb4", [("Eval/accuracy", 0.5, 0)]]
    with pytest.warns(UserWarning, match="nothing more is written to mine: OSError: disk full"):
        engine.monitor.write_events([("Eval/accuracy", 1.0, 4)])
    assert not engine.monitor.enabled
    engine.monitor.write_events([("Eval/accuracy", 1.0, 8)])


def test_one_rank_writes(tmp_path: Path):
    config = load({"csv_monitor": {"enabled": True, "output_path": str(tmp_path)}})
    monitor = MonitorMaster(config, writes_here=False)
    monitor.write_events([("a", 1, 0)])
    assert not monitor.enabled
    assert list(tmp_path.iterdir()) == []


def test_a_package_that_is_missing_stops_no_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.warns(UserWarning, match=r"nothing more is written to wandb: .*wandb.*; install it"):
        train(1, wandb={"enabled": True}, csv_monitor={"enabled": True, "output_path": str(tmp_path)}).monitor.flush()
    assert len(list(tmp_path.glob("*/*.csv"))) == 3
