"""What a step of an optimizer takes beyond its state."""

from __future__ import annotations

import torch

from parallel3d.optim.lion import Lion

# Tensors of a parameter's size that torch's loops over parameters hold at once, by class; others at most as many as Adam.
_LOOPS = {"SGD": 0, "Adam": 3, "AdamW": 3}
_MOST = 3


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
    extra = 1 if cls.__name__ == "SGD" and settings.get("weight_decay") else 0
    return itemsize * (_LOOPS.get(cls.__name__, _MOST) + extra) * largest


# By build_optimizer on CUDA, unless params say how.
_FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}
