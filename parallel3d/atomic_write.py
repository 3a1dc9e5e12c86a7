"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write to, which then takes the place of `path`: a reader, or a process that dies, never sees a part.

    Of several processes that do so at once, the last one's file stays. Raises OSError.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path`, over what is there; see `whole`. Raises OSError."""
    with whole(path) as part:
        part.write_text(text, encoding="utf-8")
