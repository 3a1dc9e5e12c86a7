"""Monitors of the configuration: they write named values of steps to files, or to services that the script uses."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from parallel3d.comm.environment import get_rank
from parallel3d.config import Config
from parallel3d.config.monitors import CometConfig, CsvMonitorConfig, TensorboardConfig, WandbConfig

# Name, value, and number of samples.
Event = tuple[str, Any, int]


class _Writer(Protocol):
    def write(self, name: str, value: float, step: int) -> None: ...


def _folder(section: TensorboardConfig | CsvMonitorConfig) -> Path:
    folder = Path(section.output_path, section.job_name)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class _Csv:
    def __init__(self, section: CsvMonitorConfig):
        self._folder = _folder(section)

    def write(self, name: str, value: float, step: int) -> None:
        path = self._folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if file.tell() == 0:  # else a restarted training goes on
                writer.writerow(["step", name.rpartition("/")[2]])
            writer.writerow([step, value])


class _Tensorboard:
    def __init__(self, section: TensorboardConfig):
        from torch.utils.tensorboard import SummaryWriter

        make: Callable[..., Any] = SummaryWriter
        self._writer = make(log_dir=str(_folder(section)))

    def write(self, name: str, value: float, step: int) -> None:
        self._writer.add_scalar(name, value, step)
        self._writer.flush()


class _Wandb:
    def __init__(self, section: WandbConfig):
        import wandb

        self._wandb: Any = wandb
        self._begin = {"project": section.project, "group": section.group, "entity": section.team}
        self._own: Any = None

    def write(self, name: str, value: float, step: int) -> None:
        # A library, such as Hugging Face's Trainer, may have begun a run of which it counts the steps.
        if self._wandb.run is None:
            self._own = self._wandb.init(**self._begin)
        run = self._wandb.run
        if run is self._own:
            run.log({name: value}, step=step)
        else:
            run.log({name: value, "Train/Samples": step})


class _Comet:
    def __init__(self, section: CometConfig):
        import comet_ml

        key = section.api_key.get_secret_value() if section.api_key is not None else None
        named = {"project": section.project, "workspace": section.workspace, "experiment_key": section.experiment_key}
        make: Any = comet_ml
        self._experiment = make.start(api_key=key, **named, mode=section.mode, online=section.online)
        if section.experiment_name is not None:
            self._experiment.set_name(section.experiment_name)
        self._interval, self._last = section.samples_log_interval, dict[str, int]()

    def write(self, name: str, value: float, step: int) -> None:
        if name not in self._last or step >= self._last[name] + self._interval:
            self._last[name] = step
            self._experiment.log_metric(name, value, step=step)


class MonitorMaster:
    """The monitors that a configuration enables. DeepSpeed's name.

    - writes_here: whether this rank writes; by default rank 0 does.
    - enabled: whether this rank writes anything.

    Where a monitor's package is missing, warns, and writes nothing there.
    """

    def __init__(self, config: Config, writes_here: bool | None = None):
        writes_here = get_rank() == 0 if writes_here is None else writes_here
        self._writers: list[_Writer] = []
        for name, kind in (("tensorboard", _Tensorboard), ("csv_monitor", _Csv), ("wandb", _Wandb), ("comet", _Comet)):
            section = getattr(config, name)
            if writes_here and section.enabled:
                try:
                    self._writers.append(kind(section))
                except ImportError as error:
                    warnings.warn(
                        f"{name}.enabled is true, but nothing is written there: {error}; install it", stacklevel=2
                    )
        self.enabled = bool(self._writers)

    def write_step(self, samples: int, **values: Any) -> None:
        """Write what the engine tells after each step, under DeepSpeed's names, "Train/Samples/lr"."""
        self.write_events([(f"Train/Samples/{name}", value, samples) for name, value in values.items()])

    def write_events(self, events: Iterable[Event]) -> None:
        """Write (name, value, number of samples) of each event. The host waits for values that are on the device."""
        if self.enabled:
            for name, value, step in events:
                for writer in self._writers:
                    writer.write(name, float(value), step)
