"""`parallel3d.runtime`, where DeepSpeed scripts look for some functions."""

from parallel3d.runtime import utils

__all__ = ["utils"]
