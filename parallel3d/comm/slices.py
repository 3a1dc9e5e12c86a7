"""What tensor slices communicate by instead of the backend, where they can."""

from __future__ import annotations

import torch

from parallel3d.comm.all_reduce_kernel import open_all_reduce
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.shard_copies import open_shard_copies


def open_slices(groups: ProcessGroups, device: torch.device, all_reduce: bool, copies: bool) -> None:
    """Let tensor slices sum by the kernel, and exchange shards by copies, as asked for. Collective over the world."""
    open_all_reduce(groups, device, all_reduce)
    open_shard_copies(groups, device, copies)
