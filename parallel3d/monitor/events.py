"""Monitors of DeepSpeed: they write the curves of a training to TensorBoard, CSV files, Weights & Biases or Comet.

A point of a curve is an event (name, value, step): the name as "Train/Samples/lr", the step a number of samples.
"""

from __future__ import annotations

import csv
from abc import ABC, abstractmethod
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from parallel3d.comm.environment import get_rank
from parallel3d.config import Config
from parallel3d.errors import ConfigError

Event = tuple[str, float, int]


class Monitor(ABC):
    """Writer of events on rank 0, if its section is enabled. The keys of the section are its attributes, too.

    Raises ConfigError on rank 0 if the package that it writes with is not installed.
    """

    def __init__(self, config: Any):
        self._config = config
        self._writes = config.enabled and get_rank() == 0
        if self._writes:
            self._open()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        return getattr(self._config, name)

    def write_events(self, events: Iterable[Event]) -> None:
        """Write points of curves."""
        if self._writes:
            self._write(events)

    @abstractmethod
    def _open(self) -> None: ...

    @abstractmethod
    def _write(self, events: Iterable[Event]) -> None: ...

    def _import(self, module: str, package: str) -> Any:
        try:
            return import_module(module)
        except ImportError as error:
            raise ConfigError(
                f"an enabled monitor needs {package}: {error}; pip install {package}, or set enabled of its section to false"
            ) from None

    def _folder(self) -> Path:
        folder = Path(self._config.output_path) / self._config.job_name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"a monitor can't write into '{folder}': {error}; set its output_path") from None
        return folder


class TensorBoardMonitor(Monitor):
    """Writes a file of TensorBoard into output_path/job_name."""

    def _open(self) -> None:
        board = self._import("torch.utils.tensorboard", "tensorboard")
        self.summary_writer = board.SummaryWriter(log_dir=str(self._folder()))

    def _write(self, events: Iterable[Event]) -> None:
        for event in events:
            self.summary_writer.add_scalar(*event)
        self.summary_writer.flush()


class CsvMonitor(Monitor):
    """Appends to one file for each name in output_path/job_name: a line has step and value."""

    def _open(self) -> None:
        self._into = self._folder()

    def _write(self, events: Iterable[Event]) -> None:
        for name, value, step in events:
            path = self._into / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            with path.open("a", newline="", encoding="utf-8") as file:
                rows = csv.writer(file)
                if file.tell() == 0:
                    rows.writerow(["step", name.rpartition("/")[2]])
                rows.writerow([step, value])


csvMonitor = CsvMonitor  # DeepSpeed's name


class WandbMonitor(Monitor):
    """Logs to the current run of Weights & Biases, which it begins if the script hasn't."""

    def _open(self) -> None:
        self._wandb = self._import("wandb", "wandb")
        if self._wandb.run is None:
            config = self._config
            self._wandb.init(project=config.project, group=config.group, entity=config.team)

    def _write(self, events: Iterable[Event]) -> None:
        for name, value, step in events:
            self._wandb.log({name: value}, step=step)


class CometMonitor(Monitor):
    """Logs to an experiment of Comet, each curve after samples_log_interval samples at the soonest."""

    def _open(self) -> None:
        comet, config = self._import("comet_ml", "comet_ml"), self._config
        names = ("project", "workspace", "experiment_key", "mode", "online")
        secret = None if config.api_key is None else config.api_key.get_secret_value()
        self.experiment = comet.start(api_key=secret, **{name: getattr(config, name) for name in names})
        if config.experiment_name is not None:
            self.experiment.set_name(config.experiment_name)
        self._logged: dict[str, int] = {}

    def _write(self, events: Iterable[Event]) -> None:
        for name, value, step in events:
            if name not in self._logged or step - self._logged[name] >= self._config.samples_log_interval:
                self._logged[name] = step
                self.experiment.log_metric(name, value, step=step)


class MonitorMaster:
    """The monitors whose sections of a configuration are enabled.

    - enabled: whether there are any.
    """

    def __init__(self, config: Config):
        made = {
            TensorBoardMonitor: config.tensorboard,
            WandbMonitor: config.wandb,
            CsvMonitor: config.csv_monitor,
            CometMonitor: config.comet,
        }
        self._monitors = [kind(section) for kind, section in made.items() if section.enabled]
        self.enabled = bool(self._monitors)

    def write_events(self, events: Iterable[Event]) -> None:
        """Write points of curves on rank 0: (name, value, step)."""
        events = list(events)
        for monitor in self._monitors:
            monitor.write_events(events)
