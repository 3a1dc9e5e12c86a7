"""`deepspeed.checkpoint.utils`, as accelerate names it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return a copy of nested containers whose tensors own their memory, so that torch.save writes no more than them."""
    return tree_map_only(torch.Tensor, lambda t: t.detach().clone().to(device), item)
