"""Utilities at DeepSpeed's import path, `parallel3d.utils`."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from parallel3d.comm.environment import get_rank, is_initialized

if TYPE_CHECKING:
    from parallel3d.pipe.data import RepeatingLoader

__all__ = ["RepeatingLoader", "log_dist", "logger"]

logger = logging.getLogger("parallel3d")


def __getattr__(name: str) -> Any:
    if name != "RepeatingLoader":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from parallel3d.pipe.data import RepeatingLoader  # imported here, because pipelines take two seconds to import

    return RepeatingLoader


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on these ranks: on all for [-1] and before init_distributed, on none for None or [].

    Messages below WARNING appear only where the script configures logging to show them.
    """
    chosen = list(ranks or ())
    if not is_initialized() or chosen[:1] == [-1] or get_rank() in chosen:
        logger.log(level, f"[rank {get_rank()}] {message}")
