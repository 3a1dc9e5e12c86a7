"""What tensor slices communicate by instead of the backend, where they can."""

from __future__ import annotations

import torch

from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.peer.shard_copies import open_shard_copies
from parallel3d.config import Config
from parallel3d.kernels.all_reduce_kernel import open_all_reduce
from parallel3d.kernels.all_reduce_norm_kernel import open_all_reduce_norm


def open_slices(groups: ProcessGroups, device: torch.device, config: Config) -> None:
    """Let tensor slices sum, and normalize sums, by kernels and exchange shards by copies, as configured.

    Collective over the world.
    """
    kernels = config.kernels
    open_all_reduce(groups, device, kernels.wants_all_reduce)
    open_all_reduce_norm(groups, kernels.wants_all_reduce_norm)
    open_shard_copies(groups, device, config.tensor_parallel.copies_shards, kernels.wants_message_wait)
