"""Utilities at DeepSpeed's import path, `parallel3d.utils`, and at `parallel3d.utils.logging` the package's logger."""

from __future__ import annotations

import logging as python_logging
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from parallel3d.comm.environment import get_rank, is_initialized
from parallel3d.logs import logger

logging = tensor_fragment = sys.modules[__name__]
_PLACES = {
    "RepeatingLoader": "pipe.data",
    **dict.fromkeys(("OnDevice", "fragment_address", "instrument_w_nvtx"), "deepspeed.names"),
}


def __getattr__(name: str) -> Any:
    """Import what needs pipelines when it is used, because they take two seconds to import."""
    of_modules = "zero.external" if "z3_leaf_module" in name else None
    place = _PLACES.get(name, "deepspeed.whole_state" if name.startswith("safe_") else of_modules)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"parallel3d.{place}"), name)


def set_log_level_from_string(log_level_str: str, custom_logger: python_logging.Logger | None = None) -> None:
    """Set the level of a logger, by default the package's, and of its handlers.

    log_level_str: "debug", "info", "warning", "error" or "critical". Raises ValueError for another word.
    """
    chosen = custom_logger or logger
    chosen.setLevel(log_level_str.upper())
    for handler in chosen.handlers:
        handler.setLevel(log_level_str.upper())


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = python_logging.INFO) -> None:
    """Log `message` on these ranks: on all for [-1] and before init_distributed, on none for None or []."""
    chosen = list(ranks or ())
    if not is_initialized() or chosen[:1] == [-1] or get_rank() in chosen:
        logger.log(level, f"[rank {get_rank()}] {message}")
