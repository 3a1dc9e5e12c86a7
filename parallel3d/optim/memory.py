"""Memory that a step of an optimizer needs besides its state."""

from __future__ import annotations

import torch

from parallel3d.optim.lion import Lion

# The most tensors of a parameter's size that torch's loops over parameters hold at once, those that the previous parameter
# left included; a weight decay that isn't decoupled needs one more.
_LOOPS = 3


def step_bytes(optimizer: torch.optim.Optimizer, total: int, largest: int, itemsize: int, on_cuda: bool) -> int:
    """Return the most bytes that a step needs.

    A fused kernel needs none; torch's foreach implementation, its choice on CUDA otherwise, and Lion a copy of all
    parameters; a loop over parameters some copies of the largest.

    - total: elements that the step updates; largest: elements of the largest tensor.
    """
    settings = optimizer.defaults
    cls = type(optimizer)
    fused = settings.get("fused") or (on_cuda and settings.get("fused") is None and cls.__name__ in _FUSED)
    if fused:
        return 0
    if cls is Lion or settings.get("foreach") or (on_cuda and settings.get("foreach", False) is None):
        return itemsize * total
    decays = bool(settings.get("weight_decay")) and not settings.get("decoupled_weight_decay", cls.__name__ == "AdamW")
    copies = 2 * decays + bool(settings.get("nesterov")) if cls.__name__ == "SGD" else _LOOPS + decays
    return itemsize * copies * largest


# By build_optimizer on CUDA, unless params say how.
_FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}
