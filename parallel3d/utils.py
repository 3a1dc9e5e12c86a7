"""`parallel3d.utils`, as DeepSpeed scripts import it."""

from parallel3d.data import RepeatingLoader

__all__ = ["RepeatingLoader"]
