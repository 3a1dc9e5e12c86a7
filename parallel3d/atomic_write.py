"""Atomic writes: a file appears complete or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a path to write to, which then takes the place of `path`: nobody ever sees a part of the file.

    If several processes do so at once, the last one's file stays. Raises OSError.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def atomic_write(path: Path, text: str) -> None:
    """Write `text` to `path`, over what is there, all at once. Raises OSError."""
    with atomic_path(path) as part:
        part.write_text(text, encoding="utf-8")
