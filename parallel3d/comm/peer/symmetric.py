"""Device memory that the ranks of a group on one host map, and the reasons why it may be unavailable."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel3d.comm.collectives import Group, all_gather_object, everywhere
from parallel3d.comm.groups import ProcessGroups


@dataclass(frozen=True)
class Unavailable:
    """Reason why a kernel or a way to communicate is off, and the remedy that turns it on."""

    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}"


UNMAPPED = Unavailable("the driver maps no memory of one device on another", "see what p3d doctor says")


def check_device(device: torch.device | None = None) -> Unavailable | None:
    """Return why this process has no CUDA device to use, or None. device: the one that it computes on."""
    if torch.version.cuda is None:
        return Unavailable(
            "this PyTorch is built without CUDA", "install one that is built with it, where there is a GPU"
        )
    if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
        return Unavailable("there is no CUDA device", "no action is needed on a host without a GPU")
    return None


def check_hosts(hosts: Sequence[str], noun: str) -> Unavailable | None:
    """Return why ranks on these hosts, one each, can't share memory, or None. noun: what each rank holds."""
    if len(set(hosts)) == 1:
        return None
    return Unavailable(
        f"the {len(hosts)} {noun} are on {len(set(hosts))} hosts", f"use no more {noun} than a host has GPUs"
    )


def check_peers(device: torch.device, others: Sequence[int]) -> Unavailable | None:
    """Return why a device can't or may not reach the memory of others of its host, given by their numbers, or None."""
    visible = range(torch.cuda.device_count())
    peers = set(others) - {device.index}
    if peers and os.environ.get("NCCL_P2P_DISABLE") == "1":  # as NCCL reads it
        return Unavailable(
            "NCCL_P2P_DISABLE is 1, so that no GPU reaches the memory of another", "unset it, or set it to 0"
        )
    if all(other in visible and torch.cuda.can_device_access_peer(device, other) for other in peers):
        return None
    return Unavailable(
        f"device {device.index} doesn't reach the memory of all of {sorted(peers)}",
        "make all of them visible to every process, on a host with NVLink between them",
    )


def check_axis(
    groups: ProcessGroups,
    axis: str,
    device: torch.device,
    noun: str,
    local: Callable[[torch.device], Unavailable | None],
    across: Callable[[Sequence[str], str], Unavailable | None],
) -> Unavailable | None:
    """Return why groups along an axis of the topology can't share memory: the first rank's reason, on every rank; or None.

    - noun: what each rank of such a group holds.
    - local: checks a process and its device.
    - across: checks a group, by its hosts and the noun.

    Collective over the world.
    """
    own = local(device) if groups.backend == "nccl" else Unavailable(f"{groups.backend} trains on the CPU", "use NCCL")
    everyone: list[tuple[str, Any, Unavailable | None]] = all_gather_object(
        (socket.gethostname(), device.index, own), groups.control
    )
    reasons = [reason for _, _, reason in everyone]
    reasons += [across([everyone[r][0] for r in ranks], noun) for ranks in groups.topology.get_axis_comm_lists(axis)]
    if (first := next(filter(None, reasons), None)) is not None:
        return first
    group: Group = getattr(groups, axis)
    return first_unavailable(check_peers(device, [everyone[rank][1] for rank in group.ranks]), groups.control)


def first_unavailable(own: Unavailable | None, control: Group) -> Unavailable | None:
    """Return the reason of the first rank that has one. Collective over control, the world."""
    return next(filter(None, all_gather_object(own, control)), None)


@dataclass(frozen=True)
class Mapped:
    """Memory of one size on each device of a group, which all its ranks map.

    - memory: this rank's bytes; while it lives, all stay mapped.
    - handle: torch's handle, which has the addresses.
    - index: this rank's index in the group.
    """

    memory: Tensor
    handle: Any
    index: int

    def of(self, index: int) -> Tensor:
        """Return the bytes of a rank, given by its index in the group."""
        if index == self.index:
            return self.memory
        other: Tensor = self.handle.get_buffer(index, (self.memory.numel(),), torch.uint8)
        return other

    def buffers(self) -> list[int]:
        """Return the addresses of these bytes on every rank, in group order, as this process maps them."""
        bases = list(self.handle.buffer_ptrs)
        offset = self.memory.data_ptr() - bases[self.index]  # of the memory in what torch has allocated
        return [base + offset for base in bases]


def map_memory(groups: ProcessGroups, axis: str, device: torch.device, num_bytes: int, cleared: int) -> Mapped | None:
    """Map num_bytes on each device of this rank's group along an axis, the first `cleared` of them zero on every rank.

    Returns None on every rank if this PyTorch or driver can't map them on any. Collective over the world.
    """
    # Not at the top: the module starts threads, and only CUDA needs it.
    import torch.distributed._symmetric_memory as symmetric_memory

    group: Group = getattr(groups, axis)
    memory: Tensor | None = None
    with suppress(OSError, RuntimeError):
        memory = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
    # Before a rendezvous, which would wait for a rank that has no memory.
    if not everywhere(memory is not None, groups.control):
        return None
    assert memory is not None
    assert group.handle is not None
    handle: Any = None
    with suppress(RuntimeError):
        handle = symmetric_memory.rendezvous(memory, group.handle)
    if handle is not None:
        groups.count_mapped(memory)
        memory[:cleared].zero_()
        torch.cuda.synchronize(device)
    # No peer writes before the memory is cleared.
    if not everywhere(handle is not None, groups.control):
        return None
    return Mapped(memory, handle, group.index)
