"""Where offloaded state is kept: memory of the host, or a scratch file; agreed on by all ranks before any is taken."""

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
from parallel3d.zero.policy import OptimizerOffload


@dataclass(frozen=True)
class Storage:
    """Memory of the host, and the file of the state on disk if there is some."""

    settings: OptimizerOffload
    file: ScratchFile | None = None

    def allocate(self, numel: int, dtype: torch.dtype, on_disk: bool) -> Tensor:
        """Return a flat tensor of zeros for state."""
        return self.file.allocate(numel, dtype) if on_disk and self.file is not None else self.on_host(numel, dtype)

    def on_host(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor of zeros in the host's memory."""
        return allocate_slab(numel * dtype.itemsize, self.settings.pin).view(dtype)


def open_storage(
    offload: OptimizerOffload | None, predicted: StateBytes, control: Group, limit_gib: float | None
) -> Storage | None:
    """Check that the host's memory and disk suffice for this rank's predicted state, and take the space on disk.

    Collective over `control`, the world. Raises OffloadError on all ranks. offload: None if only weights are on
    the host. limit_gib: see host_capacity.
    """
    mine = socket.gethostname(), predicted.host, host_capacity(limit_gib)
    everyone = all_gather_object(mine, control)
    for host in dict.fromkeys(name for name, *_ in everyone):
        ranks = [rank for rank, (name, *_) in enumerate(everyone) if name == host]
        local = ranks.index(control.index) if control.index in ranks else -1
        check_host_memory([everyone[r][1] for r in ranks], [everyone[r][2] for r in ranks], local)
    file, error = None, ""
    try:
        if offload is not None and offload.directory is not None:
            file = ScratchFile(offload.directory, predicted.disk, offload.block_bytes, offload.in_flight)
    except OffloadError as raised:
        error = str(raised)
    if found := [text for text in all_gather_object(error, control) if text]:
        raise OffloadError(found[0])
    return None if offload is None else Storage(offload, file)
