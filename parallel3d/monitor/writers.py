"""Monitors of the configuration: they write named values of steps to files, or to services through the services' libraries."""

from __future__ import annotations

import atexit
import csv
import json
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch
from torch import Tensor

from parallel3d.comm.environment import get_rank
from parallel3d.config import Config
from parallel3d.config.monitors import (
    CometConfig,
    CsvMonitorConfig,
    FilesConfig,
    MlflowConfig,
    RunRecordConfig,
    TensorboardConfig,
    WandbConfig,
)

# Name, value, and number of samples.
Event = tuple[str, Any, int]

METRICS = "metrics.jsonl"
_PREFIX = "Train/Samples/"  # DeepSpeed's, of the values that the engine writes
_INTERVAL = 1.0  # seconds between two writes of collected values
_MLFLOW_BATCH = 1000  # metrics that MLflow takes at once
_EXIT_WAIT = 5.0  # seconds that the end of the process waits for values of a device, which may be stuck


class Monitor(Protocol):
    """Destination of a training's values. A class with these two methods is one: `engine.monitor.add(name, monitor)`."""

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Take the configuration in force and the layout, JSON values by name; called once, before the first events."""

    def write_events(self, events: Sequence[tuple[str, float, int]]) -> None:
        """Write (name, value, number of samples) of each event, in the order of samples."""


def _folder(section: FilesConfig) -> Path:
    folder = Path(section.output_path, section.job_name)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _by_samples(events: Sequence[tuple[str, float, int]]) -> list[tuple[int, dict[str, float]]]:
    """Return (samples, name -> value) of events that follow each other and have the same number of samples."""
    grouped = groupby(events, key=itemgetter(2))
    return [(samples, {name: value for name, value, _ in own}) for samples, own in grouped]


class _Csv:
    def __init__(self, section: CsvMonitorConfig):
        self._folder = _folder(section)
        self._files: dict[str, TextIO] = {}

    def log_config(self, config: Mapping[str, Any]) -> None:
        (self._folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")

    def write_events(self, events: Sequence[tuple[str, float, int]]) -> None:
        for name, value, samples in events:
            if name not in self._files:
                path = self._folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
                file = self._files[name] = path.open("a", newline="", encoding="utf-8")
                if file.tell() == 0:  # otherwise a restarted training continues the file
                    csv.writer(file).writerow(["step", name.rpartition("/")[2]])
            csv.writer(self._files[name]).writerow([samples, value])
        for each in self._files.values():
            each.flush()


class _Tensorboard:
    def __init__(self, section: TensorboardConfig):
        from torch.utils.tensorboard import SummaryWriter

        make: Callable[..., Any] = SummaryWriter
        self._writer = make(log_dir=str(_folder(section)))

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._writer.add_text("config", f"```\n{json.dumps(config, indent=1)}\n```")

    def write_events(self, events: Sequence[tuple[str, float, int]]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        # This writes the same as add_scalar, which would wait for a thread at each value.
        for samples, values in _by_samples(events):
            scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
            self._writer.file_writer.add_summary(Summary(value=scalars), samples)
        self._writer.flush()


class _Wandb:
    def __init__(self, section: WandbConfig):
        import wandb

        # A library, such as Hugging Face's Trainer, may have begun a run of which it counts the steps.
        self._joined = wandb.run is not None
        begin = partial(wandb.init, project=section.project, group=section.group, entity=section.team)
        self._run = wandb.run or begin()
        if self._joined:
            self._run.define_metric(f"{_PREFIX}*", step_metric="Train/Samples")

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._run.config.update(dict(config), allow_val_change=True)

    def write_events(self, events: Sequence[tuple[str, float, int]]) -> None:
        for samples, values in _by_samples(events):
            if self._joined:
                self._run.log({**values, "Train/Samples": samples})
            else:
                self._run.log(values, step=samples)


class _RunLog:
    """A line of JSON for each step in the file that `p3d report` reads, after one with the configuration of each start."""

    def __init__(self, section: RunRecordConfig):
        folder = Path(section.directory or "")
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / METRICS).open("a", encoding="utf-8", buffering=1)

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({"time": time.time(), "config": config}) + "\n")

    def write_events(self, events: Sequence[tuple[str, float, int]]) -> None:
        rows: list[dict[str, Any]] = []
        for samples, values in _by_samples(events):
            named = {name.removeprefix(_PREFIX): value for name, value in values.items()}
            rows.append({"time": time.time(), "samples": samples, **named})
        self._file.write("".join(json.dumps(row) + "\n" for row in rows))


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

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._experiment.log_parameters(dict(config))

    def write_events(self, events: Sequence[tuple[str, float, int]]) -> None:
        for name, value, samples in events:
            if name not in self._last or samples >= self._last[name] + self._interval:
                self._last[name] = samples
                self._experiment.log_metric(name, value, step=samples)


class _Mlflow:
    def __init__(self, section: MlflowConfig):
        import mlflow
        from mlflow.entities import Metric

        self._metric: Any = Metric
        run = mlflow.active_run()
        if run is None:
            if section.tracking_uri is not None:
                mlflow.set_tracking_uri(section.tracking_uri)
            if section.experiment_name is not None:
                mlflow.set_experiment(section.experiment_name)
            run = mlflow.start_run(run_name=section.run_name)
        # Not mlflow.log_metrics: it takes ten times as long, and one call for each step.
        self._client, self._run = mlflow.MlflowClient(), run.info.run_id

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._client.log_dict(self._run, dict(config), "config.json")

    def write_events(self, events: Sequence[tuple[str, float, int]]) -> None:
        now = int(1e3 * time.time())
        metrics = [self._metric(name, value, now, samples) for name, value, samples in events]
        for k in range(0, len(metrics), _MLFLOW_BATCH):
            self._client.log_batch(self._run, metrics[k : k + _MLFLOW_BATCH], synchronous=False)


_KINDS: Mapping[str, Callable[[Any], Monitor]] = {
    "tensorboard": _Tensorboard,
    "csv_monitor": _Csv,
    "wandb": _Wandb,
    "comet": _Comet,
    "mlflow": _Mlflow,
    "run_record": _RunLog,
}


class MonitorMaster:
    """The monitors that a configuration enables, and the script's own. DeepSpeed's name.

    - writes_here: whether this rank writes; by default rank 0 does.
    - enabled: whether this rank writes anything.

    They are opened when there is something to write. One that fails, or whose package is missing, gets nothing more, with a
    warning; the training continues.
    """

    def __init__(self, config: Config, writes_here: bool | None = None):
        self._writes_here = get_rank() == 0 if writes_here is None else writes_here
        self._config: dict[str, Any] = config.model_dump(mode="json")
        sections = {name: getattr(config, name) for name in _KINDS}
        self._unopened: dict[str, Callable[[], Monitor]] = {
            name: partial(_KINDS[name], s) for name, s in sections.items() if s.enabled and self._writes_here
        }
        self._monitors: dict[str, Monitor] = {}
        # For each step: samples, names, first values, further ones on the way to the host, an event after which they are there.
        self._collected: list[tuple[int, list[str], list[float], Tensor, torch.cuda.Event | None]] = []
        self._written = 0.0  # when values were written last

    @property
    def enabled(self) -> bool:
        """Whether this rank writes anything."""
        return bool(self._unopened or self._monitors)

    def add(self, name: str, monitor: Monitor) -> None:
        """Write to a monitor of the script's own, too; its name is for warnings."""
        if self._writes_here:
            self._unopened[name] = lambda: monitor

    def describe(self, **values: Any) -> None:
        """Add JSON values to the configuration that monitors get."""
        self._config |= values

    def write_events(self, events: Iterable[Event]) -> None:
        """Write (name, value, number of samples) of each event. The host waits for values that are on the device."""
        if self.enabled:
            self.flush()
            self._write([(name, float(value), samples) for name, value, samples in events])

    def collect(self, samples: int, values: Mapping[str, Any]) -> None:
        """Keep values of a step, to be written under DeepSpeed's names, "Train/Samples/lr", without waiting for the device.

        samples: trained on so far. What has reached the host is written at most once a second.
        """
        if not self.enabled:
            return
        tensors = {name: value.detach().reshape(1) for name, value in values.items() if isinstance(value, Tensor)}
        numbers = {name: float(value) for name, value in values.items() if name not in tensors}
        copied = torch.cat([*tensors.values()]) if tensors else torch.empty(0)
        event = torch.cuda.Event() if copied.is_cuda else None
        on_host = copied.to("cpu", non_blocking=True)
        if event is not None:
            event.record(torch.cuda.current_stream(copied.device))
        self._collected.append((samples, [*numbers, *tensors], [*numbers.values()], on_host, event))
        if not self._written:
            self._write([])
        elif time.monotonic() - self._written > _INTERVAL:
            self._write(self._arrived())

    def _arrived(self) -> list[tuple[str, float, int]]:
        """Return the events of the oldest collected values that are on the host, and forget them."""
        events: list[tuple[str, float, int]] = []
        while self._collected and ((event := self._collected[0][-1]) is None or event.query()):
            samples, names, numbers, on_host, _ = self._collected.pop(0)
            values = zip(names, [*numbers, *on_host.tolist()], strict=True)
            events += [(_PREFIX + name, value, samples) for name, value in values]
        return events

    def flush(self) -> None:
        """Write all that is collected. The host waits for values that are on the device."""
        for *_, event in self._collected[-1:]:
            if event is not None:
                event.synchronize()
        if self._collected:
            self._write(self._arrived())

    def _flush_at_exit(self) -> None:
        deadline = time.monotonic() + _EXIT_WAIT
        with suppress(Exception):  # of a device that has failed
            while self._collected and time.monotonic() < deadline:
                self._write(self._arrived())
                time.sleep(0.01 if self._collected else 0.0)

    def _write(self, events: Sequence[tuple[str, float, int]]) -> None:
        for name, make in self._unopened.items():
            if (monitor := self._attempt(name, make)) is not None:
                self._monitors[name] = monitor
                self._attempt(name, monitor.log_config, self._config)
        if self._unopened:
            self._unopened.clear()
            atexit.register(self._flush_at_exit)  # now, so that it runs before the monitors' own
        for name, monitor in list(self._monitors.items()) if events else ():
            self._attempt(name, monitor.write_events, events)
        self._written = time.monotonic()

    def _attempt(self, name: str, action: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except Exception as error:
            self._monitors.pop(name, None)
            advice = "; install it" if isinstance(error, ImportError) else ""
            warnings.warn(f"nothing more is written to {name}: {type(error).__name__}: {error}{advice}", stacklevel=2)
