"""Values of parameters that are not whole in memory: shards on several ranks, or still in a file."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from parallel3d.zero.weights import ShardedWeights, placeholder

# (start, stop) -> these elements of a parameter, flat, until the next is read.
Read = Callable[[int, int], Tensor]


def weights_of(parameter: Tensor) -> ShardedWeights | None:
    """Return the sharded weights that a parameter is part of; None if it is whole on every rank."""
    found: ShardedWeights | None = vars(parameter).get("sharded_weights")
    return found


@torch.no_grad()
def keep_in_file(parameter: nn.Parameter, read: Read, device: torch.device) -> None:
    """Move a parameter from the meta device to `device`, without memory: `read` returns its values when they are needed.

    It stays the same object, so that optimizers and tied modules keep it.
    """
    moved = nn.Parameter(placeholder(parameter, parameter.dtype, device), parameter.requires_grad)
    vars(moved).update(vars(parameter), read=read)
    torch.utils.swap_tensors(parameter, moved)


def is_whole(parameter: Tensor) -> bool:
    """Return whether the values of a parameter are all in its own memory."""
    return weights_of(parameter) is None and "read" not in vars(parameter)


@torch.no_grad()
def read_into(target: Tensor, parameter: Tensor, start: int) -> None:
    """Copy a parameter's elements, from `start` on, into a flat target. Collective, if the parameter is sharded."""
    read: Read | None = vars(parameter).get("read")
    if read is not None:
        target.copy_(read(start, start + target.numel()))
        return
    if (found := weights_of(parameter)) is not None:
        found.gather()
        found.wait()
    target.copy_(parameter.detach().reshape(-1)[start : start + target.numel()])
    if found is not None:
        found.release()


def make_whole(parameter: Tensor) -> None:
    """Make a parameter whole for good. Collective, if it is sharded."""
    if not is_whole(parameter):
        values = torch.empty_like(parameter, memory_format=torch.contiguous_format)
        read_into(values.view(-1), parameter, 0)
        forget(parameter)
        parameter.data = values.detach()


def forget(parameter: Tensor) -> None:
    """Note that a parameter has memory of its own now."""
    for name in ("read", "sharded_weights", "ds_id", "ds_shape", "ds_numel", "ds_status", "ds_tensor"):
        vars(parameter).pop(name, None)
