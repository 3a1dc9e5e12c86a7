"""What tensor slices communicate by instead of the backend, where they can."""

from __future__ import annotations

import torch

from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.peer.shard_copies import open_shard_copies
from parallel3d.config import Config
from parallel3d.kernels.all_reduce_kernel import open_all_reduce


def open_slices(groups: ProcessGroups, device: torch.device, config: Config) -> None:
    """Open the all-reduce kernel and the shard copies among tensor-parallel ranks, as configured.

    Collective over the world.
    """
    group = groups.model
    group.use_all_reduce(open_all_reduce(groups, device) if config.kernels.all_reduce else None)
    group.use_shard_messages(open_shard_copies(groups, device) if config.tensor_parallel.copies_shards else None)
