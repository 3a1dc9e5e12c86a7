"""Memory that a step of an optimizer needs besides its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from parallel3d.optim.lion import Lion

# Tensors of a parameter's size that torch's loops over parameters hold at once at most; a weight decay that isn't decoupled
# takes one more.
_LOOPS = 3


def step_bytes(optimizer: torch.optim.Optimizer, total: int, largest: int, itemsize: int, on_cuda: bool) -> int:
    """Bytes at most, where it updates so many elements, and so many in the largest tensor.

    A fused kernel takes none; torch's foreach implementation, its choice on CUDA otherwise, and Lion a copy of all; a loop
    over parameters some of the largest.
    """
    settings = optimizer.defaults
    cls = type(optimizer)
    fused = settings.get("fused") or (on_cuda and settings.get("fused") is None and cls.__name__ in _FUSED)
    if fused:
        return 0
    if cls is Lion or settings.get("foreach") or (on_cuda and settings.get("foreach", False) is None):
        return itemsize * total
    return itemsize * _in_a_loop(cls.__name__, settings) * largest


def _in_a_loop(name: str, settings: Mapping[str, Any]) -> int:
    """Tensors at once, with what the one before has left."""
    decays = bool(settings.get("weight_decay")) and not settings.get("decoupled_weight_decay", name == "AdamW")
    if name == "SGD":
        return 2 * decays + bool(settings.get("nesterov"))
    return _LOOPS + decays


# By build_optimizer on CUDA, unless params say how.
_FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}
