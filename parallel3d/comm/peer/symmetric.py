"""Memory of one host's devices that the ranks of a group map, and what may be in the way of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from parallel3d.comm.collectives import Group, everywhere

_mapped = WeakIdKeyDictionary()


@dataclass(frozen=True)
class Mapped:
    """The same number of bytes on each device of a group, and torch's handle of them, which has the addresses.

    memory: this rank's; while it lives, all are mapped. index: of this rank in the group.
    """

    memory: Tensor
    handle: Any
    index: int

    def of(self, index: int) -> Tensor:
        """The bytes of a rank, by its place in the group."""
        if index == self.index:
            return self.memory
        other: Tensor = self.handle.get_buffer(index, (self.memory.numel(),), torch.uint8)
        return other

    def buffers(self) -> list[int]:
        """The addresses of these bytes on every rank, in group order, as this process maps them."""
        bases = list(self.handle.buffer_ptrs)
        offset = self.memory.data_ptr() - bases[self.index]  # of the memory in what torch has allocated
        return [base + offset for base in bases]


def mapped_bytes() -> int:
    """Of this process's device, in memory that ranks map: outside of what torch.cuda.memory_allocated counts."""
    return sum(memory.numel() for memory in _mapped)


def is_supported() -> bool:
    """Whether this PyTorch has symmetric memory on CUDA."""
    try:
        import torch.distributed._symmetric_memory as symmetric_memory
    except ImportError:
        return False
    return torch.version.cuda is not None and all(map(symmetric_memory.__dict__.get, ("empty", "rendezvous")))


def reaches(device: torch.device, others: Sequence[int]) -> bool:
    """Whether a device reaches the memory of others of its host, by their numbers; not where it doesn't see them."""
    visible = range(torch.cuda.device_count())
    apart = set(others) - {device.index}
    return all(other in visible and torch.cuda.can_device_access_peer(device, other) for other in apart)


def map_memory(group: Group, control: Group, device: torch.device, num_bytes: int) -> Mapped | None:
    """So many bytes on each device of the group; None where this PyTorch or driver can't, maybe not on all ranks.

    Collective over control, the world, each rank with the group that it belongs to.
    """
    # Not at the top: the module starts threads, and only CUDA needs it.
    import torch.distributed._symmetric_memory as symmetric_memory

    memory: Tensor | None = None
    with suppress(OSError, RuntimeError):
        memory = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
    # Before a rendezvous that would wait for the one which has no memory.
    if not everywhere(memory is not None, control):
        return None
    assert memory is not None
    assert group.handle is not None
    try:
        handle: Any = symmetric_memory.rendezvous(memory, group.handle)
    except RuntimeError:
        return None
    _mapped[memory] = None
    return Mapped(memory, handle, group.index)
