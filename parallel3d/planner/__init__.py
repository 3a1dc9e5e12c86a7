"""The topology planning tool: finds the best layouts of a model on a cluster from predictions of the program that would run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def rare_collections() -> Iterator[None]:
    """Make garbage collections rare in this context, and limit them to new objects: programs have a million without cycles."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(2_000_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
