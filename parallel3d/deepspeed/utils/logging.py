"""`parallel3d.utils.logging`: the package's logger, and log_dist."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from parallel3d.comm.environment import get_rank, is_initialized
from parallel3d.logs import logger


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of a logger, by default the package's, and of its handlers.

    log_level_str: "debug", "info", "warning", "error" or "critical". Raises ValueError for another word.
    """
    chosen = custom_logger or logger
    chosen.setLevel(log_level_str.upper())
    for handler in chosen.handlers:
        handler.setLevel(log_level_str.upper())


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on these ranks: on all for [-1] and before init_distributed, on none for None or []."""
    chosen = list(ranks or ())
    if not is_initialized() or chosen[:1] == [-1] or get_rank() in chosen:
        logger.log(level, f"[rank {get_rank()}] {message}")
