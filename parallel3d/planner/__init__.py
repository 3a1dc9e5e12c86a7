"""The topology planning tool: the best layouts of a model on a cluster, predicted from what the runtime itself would run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect only new garbage, and rarely: programs are a million objects, none of them in a cycle."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(2_000_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
