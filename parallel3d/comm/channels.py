"""Where the rings of one host's messages (rings.py) lie in memory that its ranks map, and how that is had."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel3d.comm.collectives import Group, all_gather_integers, all_gather_object
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.rings import Ring
from parallel3d.comm.streams import can_copy
from parallel3d.comm.symmetric import Mapped, map_memory, reaches

_HEADER_BYTES = 4096  # of counts: an int32 for each slot that fills here, then one for each that is emptied elsewhere


@dataclass(frozen=True)
class Channels:
    """Where the rings of some ranks lie in the memory that each of them shares. peers: of each, who sends to it."""

    peers: Sequence[Sequence[int]]
    num_slots: int
    slot_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of each rank's memory: counts, and a ring for each peer."""
        return _HEADER_BYTES + max(map(len, self.peers)) * self.num_slots * self.slot_bytes

    def ring(self, source: int, target: int, memory_of: Callable[[int], Tensor]) -> Ring:
        """The channel from one rank to another. memory_of: rank -> its num_bytes bytes."""
        into, out = self.peers[target].index(source), self.peers[source].index(target)
        length = self.num_slots * self.slot_bytes
        memory, start = memory_of(target), _HEADER_BYTES + into * length
        filled, _ = _counts(memory)
        _, emptied = _counts(memory_of(source))
        first, end = into * self.num_slots, out * self.num_slots
        slots = memory[start : start + length].split(self.slot_bytes)
        return Ring(slots, filled[first : first + self.num_slots], emptied[end : end + self.num_slots])


def _counts(memory: Tensor) -> tuple[Tensor, ...]:
    return memory[:_HEADER_BYTES].view(torch.int32).chunk(2)


def open_channels(groups: ProcessGroups, axis: str, channels: Channels, device: torch.device) -> Mapped | None:
    """The memory of this rank's group along an axis of the topology, ready for use; None on every rank where on any it can't
    be had. Collective over the world.

    It takes CUDA devices of one host that reach each other's memory.
    """
    group: Group = getattr(groups, axis)
    found = None
    if _may_share(groups, axis, group, device):
        found = map_memory(group, groups.control, device, channels.num_bytes)
    everywhere = all_gather_integers([int(found is not None)], groups.control)
    if found is None or not all(row[0] for row in everywhere):
        return None
    found.memory[:_HEADER_BYTES].zero_()
    torch.cuda.synchronize()
    all_gather_integers([0], groups.control)  # nobody writes into counts that are not cleared yet
    return found


def _may_share(groups: ProcessGroups, axis: str, group: Group, device: torch.device) -> bool:
    """Whether along this axis all ranks of every group are on one host with devices that reach each other; the same on every
    rank."""
    mine = (socket.gethostname(), device.index if device.type == "cuda" else None, groups.backend)
    everyone = all_gather_object(mine, groups.control)
    for ranks in groups.topology.get_axis_comm_lists(axis):
        places = [everyone[rank] for rank in ranks]
        if len({host for host, _, _ in places}) > 1 or any(index is None for _, index, _ in places):
            return False
    if groups.backend != "nccl" or group.size == 1:
        return False
    reached = can_copy() and reaches(device, [everyone[rank][1] for rank in group.ranks])
    return all(row[0] for row in all_gather_integers([int(reached)], groups.control))
