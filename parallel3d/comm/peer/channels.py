"""Where the rings of one host's messages (rings.py) lie in memory that its ranks map, and how that is had."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel3d.comm.collectives import everywhere
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.obstacles import UNMAPPED, Obstacle, axis_obstacle, hosts_obstacle
from parallel3d.comm.peer.rings import Ring
from parallel3d.comm.peer.streams import copy_obstacle
from parallel3d.comm.peer.symmetric import Mapped, map_memory

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


def open_channels(
    groups: ProcessGroups, axis: str, channels: Channels, device: torch.device, noun: str
) -> Mapped | Obstacle:
    """The memory of this rank's group along an axis of the topology, ready for use, or what is in the way of it, the same on
    every rank. Collective over the world.

    It takes CUDA devices of one host that reach each other's memory. noun: what the ranks of a group hold.
    """
    if (obstacle := axis_obstacle(groups, axis, device, noun, copy_obstacle, hosts_obstacle)) is not None:
        return obstacle
    found = map_memory(getattr(groups, axis), groups.control, device, channels.num_bytes)
    if not everywhere(found is not None, groups.control):
        return UNMAPPED
    assert found is not None
    found.memory[:_HEADER_BYTES].zero_()
    torch.cuda.synchronize()
    everywhere(True, groups.control)  # nobody writes into counts that are not cleared yet
    return found
