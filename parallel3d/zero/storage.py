"""Storage of offloaded state, in host memory or a scratch file. All ranks agree that it suffices before any allocates it."""

from __future__ import annotations

import socket
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel3d.comm.collectives import Group, all_gather_object
from parallel3d.comm.host_memory import allocate_slab, check_host_memory, host_capacity
from parallel3d.errors import OffloadError
from parallel3d.zero.disk import ScratchFile
from parallel3d.zero.memory import StateBytes
from parallel3d.zero.policy import Disk, OptimizerOffload, ZeroPolicy


@dataclass(frozen=True)
class Storage:
    """Host memory for offloaded state, and the scratch file for state on disk; None without any on disk."""

    settings: OptimizerOffload
    file: ScratchFile | None = None

    def allocate(self, numel: int, dtype: torch.dtype, on_disk: bool) -> Tensor:
        """Return a flat tensor of zeros for state."""
        if on_disk and self.file is not None:
            return self.file.allocate(numel, dtype)
        return allocate_slab(numel * dtype.itemsize, self.settings.pin).view(dtype)


def open_storage(
    policy: ZeroPolicy, state: StateBytes, shards: StateBytes, held: int, control: Group, limit_gib: float | None
) -> tuple[Storage | None, ScratchFile | None]:
    """Check that the host's memory and disk suffice, and take the space on disk.

    Returns where offloaded optimizer state is kept, and the file of shards of weights; None for what isn't offloaded.
    state, shards: predicted bytes of this rank, of everything and of shards of weights. held: bytes of host memory that will
    be free again, those of shards of the model as it was built. limit_gib: see host_capacity.
    Collective over `control`, the world. Raises OffloadError on all ranks.
    """
    # A measured limit says what is left, which excludes the memory held; a limit that is given covers all of it.
    more = max(0, state.host - held) if limit_gib is None else state.host
    mine = socket.gethostname(), more, host_capacity(limit_gib)
    everyone = all_gather_object(mine, control)
    for host in dict.fromkeys(name for name, *_ in everyone):
        ranks = [rank for rank, (name, *_) in enumerate(everyone) if name == host]
        local = ranks.index(control.index) if control.index in ranks else -1
        check_host_memory([everyone[r][1] for r in ranks], [everyone[r][2] for r in ranks], local)
    offload, weights = policy.offload, policy.weight_offload
    file, weight_file, error = None, None, ""
    try:
        file = _open_file(offload.disk, state.disk - shards.disk) if offload is not None else None
        weight_file = _open_file(weights.disk, shards.disk) if weights is not None else None
    except OffloadError as raised:
        error = str(raised)
    if found := [text for text in all_gather_object(error, control) if text]:
        raise OffloadError(found[0])
    return None if offload is None else Storage(offload, file), weight_file


def _open_file(disk: Disk | None, nbytes: int) -> ScratchFile | None:
    return None if disk is None else ScratchFile(disk.directory, nbytes, disk.block_bytes, disk.in_flight)
