"""Calls of compiled layers that ran uncompiled, in a file of the run record's folder, for `p3d doctor`."""

from __future__ import annotations

import time
import warnings
import weakref
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from parallel3d.atomic_write import atomic_write
from parallel3d.autograd.first_shapes import FirstShapes
from parallel3d.monitor.run_record import StoredModel, read_stored

FILE_NAME = "uncompiled_calls.json"
_INTERVAL = 10.0  # seconds between two writes


class _Uncompiled(StoredModel):
    """Calls by (layer, shapes it is compiled for, shapes of the calls)."""

    calls: tuple[tuple[str, str, str, int], ...]


class UncompiledWriter:
    """Writes the calls of compiled functions that ran uncompiled: those of a new shape at once, others within 10 s.

    What can't be written gives a warning; the training continues.
    """

    def __init__(self, functions: Sequence[FirstShapes], directory: Path):
        self._functions, self._file = functions, directory / FILE_NAME
        self._written, self._known = 0.0, 0
        weakref.finalize(self, _write, functions, self._file)

    def write(self) -> None:
        """Write if there is something to write, and the last time is long enough ago."""
        known = sum(len(f.others) for f in self._functions)
        if known > self._known or (known and time.monotonic() - self._written > _INTERVAL):
            self._written, self._known = time.monotonic(), known
            _write(self._functions, self._file)


def _write(functions: Sequence[FirstShapes], file: Path) -> None:
    calls: Counter[tuple[str, str, str]] = Counter()
    for function in functions:
        for shapes, number in function.others.items():
            calls[function.name, function.shapes, shapes] += number
    if not calls:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(file, _Uncompiled(calls=tuple((*key, n) for key, n in calls.items())).model_dump_json() + "\n")
    except OSError as error:
        warnings.warn(f"the calls of compiled layers that ran uncompiled can't be written: {error}", stacklevel=2)


def describe_uncompiled(directory: Path) -> list[str]:
    """Return lines about the calls that a training with this run_record.directory has written; none without any.

    Raises ConfigError for a file that is damaged.
    """
    file = directory / FILE_NAME
    if not file.exists():
        return []
    calls = read_stored(_Uncompiled, file, "list of uncompiled calls", "a training with run_record.directory").calls
    lines = [
        f"  {n} calls of {name} with {shapes}, compiled for {compiled or 'none'}" for name, compiled, shapes, n in calls
    ]
    head = f"compiled layers that ran uncompiled in '{directory}', on rank 0:"
    return [head, *lines, "  what to do: pad these batches, or set compile.dynamic to true", ""]
