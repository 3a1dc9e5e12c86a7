"""`parallel3d.deepspeed.runtime`, where DeepSpeed scripts look for some functions."""

from importlib import import_module
from typing import Any

from parallel3d.deepspeed.runtime import utils


def __getattr__(name: str) -> Any:
    """Import `zero` when it is used, because it takes long."""
    if name != "zero":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.zero")
