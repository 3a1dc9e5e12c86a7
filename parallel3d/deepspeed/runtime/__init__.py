"""`parallel3d.deepspeed.runtime`, where DeepSpeed scripts look for some functions."""

from importlib import import_module
from typing import Any

from parallel3d.deepspeed.aliases import ELSEWHERE
from parallel3d.deepspeed.runtime import utils


def __getattr__(name: str) -> Any:
    """Import a module when it is used: DeepSpeed has imported each, here they take long."""
    place = ELSEWHERE.get(f"runtime.{name}", f"deepspeed.runtime.{name}")
    try:
        return import_module(f"parallel3d.{place}")
    except ModuleNotFoundError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
