"""Progress of a training run: a progress bar, a file with a line of metrics per step, and a plot of them."""

from __future__ import annotations

import atexit
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from parallel3d.errors import ConfigError
from parallel3d.logs import logger


class ProgressBar:
    """Context manager that shows a bar over the steps with the latest metrics; without a terminal, a line now and then.

    num_steps: None if unknown; enabled: True on one rank only; lines: how many are printed without a terminal.
    """

    def __init__(self, num_steps: int | None, enabled: bool = True, lines: int = 20):
        self._console = Console()
        self._enabled = enabled
        self.is_live = enabled and self._console.is_terminal
        self._num_steps = num_steps
        self._every = max(1, (num_steps or 0) // lines)
        self._progress = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=10),
            TextColumn("{task.fields[metrics]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            disable=not self.is_live,
        )
        self._task = self._progress.add_task("train", total=num_steps, metrics="")

    @staticmethod
    def of(progress: bool | int) -> ProgressBar | None:
        """Begin the bar of `monitor.progress`, until the process ends; None without a terminal, or if it is off."""
        bar = ProgressBar(None if isinstance(progress, bool) else progress, enabled=bool(progress))
        if not bar.is_live:
            return None
        atexit.register(bar.__exit__)  # a terminal's cursor comes back
        return bar.__enter__()

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._progress.stop()

    def update(self, step: int, metrics: Mapping[str, str] | None = None) -> None:
        """Show that `step` steps are done, and these metrics, or else the last ones."""
        text = None if metrics is None else "  ".join(f"{name} {value}".strip() for name, value in metrics.items())
        if self.is_live:
            shown: dict[str, Any] = {} if text is None else {"metrics": text}
            self._progress.update(self._task, completed=step, refresh=text is not None, **shown)
        elif self._enabled and (step % self._every == 0 or step == self._num_steps):
            logger.info("step %s/%s  %s", step, self._num_steps, text or "")


class MetricsFile:
    """CSV file with a line per step, flushed at once, so that a run that dies has kept its metrics."""

    def __init__(self, path: Path, columns: Sequence[str]):
        self._file = path.open("w", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, columns, restval="")
        self._writer.writeheader()

    def write(self, row: Mapping[str, float]) -> None:
        """Write one line; a column without a value stays empty."""
        self._writer.writerow(row)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def plot_losses(metrics: Path, picture: Path, columns: Sequence[str] = ("loss", "eval_loss")) -> None:
    """Plot columns of a metrics file against its `step` into an image file of the kind that its suffix names.

    Raises ConfigError when matplotlib (the "plot" extra) is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'parallel3d[plot]'") from None
    with metrics.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).subplots()
    for column in columns:
        points = [(int(row["step"]), float(row[column])) for row in rows if row[column]]
        axes.plot([x for x, _ in points], [y for _, y in points], label=column, linewidth=1.2)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture)
