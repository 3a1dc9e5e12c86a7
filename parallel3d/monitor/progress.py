"""Progress of a training: a bar on a terminal."""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column


class ProgressBar:
    """Bar over the steps with the latest metrics, until the process ends. num_steps: None if unknown."""

    def __init__(self, num_steps: int | None, console: Console):
        self._progress = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=10),
            TextColumn("{task.fields[metrics]}", table_column=Column(ratio=1)),  # broken into lines where it is narrow
            TimeRemainingColumn(compact=True),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task("train", total=num_steps, metrics="")
        self._progress.start()
        atexit.register(self._progress.stop)  # a terminal's cursor comes back

    @staticmethod
    def of(progress: bool | int) -> ProgressBar | None:
        """Begin the bar of `monitor.progress`; None without a terminal, or if it is off."""
        console = Console()
        if not progress or not console.is_terminal:
            return None
        return ProgressBar(None if isinstance(progress, bool) else progress, console)

    def update(self, step: int, metrics: Mapping[str, str] | None = None) -> None:
        """Show that `step` steps are done, and these metrics, or else the last ones."""
        shown: dict[str, Any] = {}
        if metrics is not None:
            shown = {
                "metrics": "  ".join(f"{name} {value}".strip() for name, value in metrics.items()),
                "refresh": True,
            }
        self._progress.update(self._task, completed=step, **shown)
