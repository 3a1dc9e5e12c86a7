"""`parallel3d.checkpointing`, as DeepSpeed scripts import it: recomputation of activations."""

from parallel3d.autograd.recomputation import checkpoint, configure, is_configured, reset, times

__all__ = ["checkpoint", "configure", "is_configured", "reset", "times"]
