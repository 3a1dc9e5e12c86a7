"""Monitors: what they write into files, and the calls that they make of the packages that write elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from parallel3d.config import load
from parallel3d.errors import ConfigError
from parallel3d.monitor.events import MonitorMaster, csvMonitor

EVENTS = [("Train/Samples/lr", 0.5, 4), ("Train/Samples/train loss", 2.25, 4)]


def test_csv_files_go_on_after_a_restart(tmp_path: Path):
    config = load({"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}})
    for step in (4, 8):  # two processes, one after the other
        master = MonitorMaster(config)
        assert master.enabled
        master.write_events([(name, value, step) for name, value, _ in EVENTS])
    found = {path.name: path.read_text().split() for path in (tmp_path / "job").iterdir()}
    assert found == {
        "Train_Samples_lr.csv": ["step,lr", "4,0.5", "8,0.5"],
        "Train_Samples_train_loss.csv": ["step,train", "loss", "4,2.25", "8,2.25"],
    }


def test_nothing_is_written_where_nothing_is_enabled(tmp_path: Path):
    config = load({"csv_monitor": {"output_path": str(tmp_path)}, "wandb": {"project": "mine"}})
    master = MonitorMaster(config.monitor_config)
    master.write_events(EVENTS)
    monitor = csvMonitor(config.csv_monitor)
    monitor.write_events(EVENTS)
    assert not master.enabled
    assert (monitor.enabled, monitor.output_path, monitor.job_name) == (False, str(tmp_path), "DeepSpeedJobName")
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_gets_points(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    board = Mock()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    MonitorMaster(load({"tensorboard": section})).write_events(EVENTS)
    board.SummaryWriter.assert_called_once_with(log_dir=str(tmp_path / "job"))
    writer = board.SummaryWriter.return_value
    assert [call.args for call in writer.add_scalar.call_args_list] == EVENTS
    writer.flush.assert_called_once_with()


@pytest.mark.parametrize("run", [None, object()])
def test_wandb_logs_to_the_scripts_run_or_begins_one(monkeypatch: pytest.MonkeyPatch, run: object):
    wandb = Mock(run=run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    section = {"enabled": True, "group": "g", "team": "t", "project": "p"}
    MonitorMaster(load({"wandb": section})).write_events(EVENTS)
    begun = [call.kwargs for call in wandb.init.call_args_list]
    assert begun == ([{"project": "p", "group": "g", "entity": "t"}] if run is None else [])
    assert [(call.args, call.kwargs) for call in wandb.log.call_args_list] == [
        (({name: value},), {"step": step}) for name, value, step in EVENTS
    ]


def test_comet_gets_a_point_of_a_curve_after_so_many_samples(monkeypatch: pytest.MonkeyPatch):
    comet = Mock()
    monkeypatch.setitem(sys.modules, "comet_ml", comet)
    section = {
        "enabled": True,
        "samples_log_interval": 8,
        "api_key": "secret",
        "experiment_name": "e",
        "mode": "create",
    }
    config = load({"comet": section})
    master = MonitorMaster(config)
    for step in (4, 8, 12, 16, 20):
        master.write_events([("a", step / 4, step), ("b", 0.0, 20 * step)])
    comet.start.assert_called_once_with(
        api_key="secret", project=None, workspace=None, experiment_key=None, mode="create", online=None
    )
    experiment = comet.start.return_value
    experiment.set_name.assert_called_once_with("e")
    logged = [(*call.args, call.kwargs["step"]) for call in experiment.log_metric.call_args_list]
    assert [event for event in logged if event[0] == "a"] == [("a", 1.0, 4), ("a", 3.0, 12), ("a", 5.0, 20)]
    assert len(logged) == 8
    assert "secret" not in repr(config) + config.model_dump_json()


@pytest.mark.parametrize(
    ("section", "module"),
    [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb"), ("comet", "comet_ml")],
)
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, section: str, module: str):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"needs .*: .*{module}.*pip install .*set enabled of its section to false"):
        MonitorMaster(load({section: {"enabled": True}}))


def test_a_folder_that_can_not_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").touch()
    section = SimpleNamespace(enabled=True, output_path=str(tmp_path / "file"), job_name="job")
    with pytest.raises(ConfigError, match=r"can't write into '.*file/job'.*set its output_path"):
        csvMonitor(section)
