"""Recomputation of activations at DeepSpeed's import path, `parallel3d.checkpointing`."""

from parallel3d.autograd.recomputation import checkpoint, configure, is_configured, reset, times

__all__ = ["checkpoint", "configure", "is_configured", "reset", "times"]
