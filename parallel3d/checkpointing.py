"""Activation checkpointing: recompute a function's forward in its backward instead of holding its activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), of which only the arguments are held for the backward (arXiv:1604.06174).

    Non-reentrant, so inputs without gradient (token ids before an embedding) work, on the CPU too; random states are
    restored, so a dropout mask is the same in both forwards.
    """
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)
