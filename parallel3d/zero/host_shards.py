"""Shards of weights in host memory (ZeRO-3 with offload_param): copied to the device when they are gathered, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallel3d.comm.collectives import Group, Work, all_gather_into
from parallel3d.comm.host_memory import allocate_slab
from parallel3d.comm.transfers import Event, Transfers
from parallel3d.zero.policy import STAGED_BYTES


@dataclass(frozen=True)
class _Gather:
    """A copy to the device, and the collective that is enqueued after it."""

    transfers: Transfers
    device: torch.device
    copied: Event
    work: Work

    def is_completed(self) -> bool:
        """Return whether both are done, without waiting."""
        return (self.copied is None or self.copied.query()) and self.work.is_completed()

    def wait(self) -> None:
        """Make the device's current stream wait for both."""
        self.work.wait()
        self.transfers.wait_for(self.copied, self.device)


class HostShards:
    """A rank's shards of weights in host memory, and the copies between them and a device.

    Copies to the device wait for what is enqueued on the current stream, which may still use the memory that they write, and
    for the last copy to the same shard. Copies to the host pass through two buffers on the device, where masters are rounded.

    pin: whether the memory is pinned; without it, copies don't overlap with computations. kept: all shards.
    """

    def __init__(self, device: torch.device, pin: bool):
        self._device, self._pin, self._transfers = device, pin, Transfers()
        self.kept: list[Tensor] = []
        self._longest = 0  # bytes of the largest shard
        self._buffers: list[tuple[Tensor, Event]] = []  # the one that was used last is the last
        self._read: Event = None
        self._written: Event = None

    def keep(self, shard: Tensor) -> Tensor:
        """Return a copy of a flat shard in host memory."""
        kept = allocate_slab(shard.nbytes, self._pin).view(shard.dtype).copy_(shard)
        self.kept.append(kept)
        self._longest = max(self._longest, kept.nbytes)
        return kept

    def gather(self, whole: Tensor, shard: Tensor, partition: Group, written: Event) -> Work:
        """Start to copy a shard to its place in `whole`, and to gather the others'. written: see `write`."""
        own = whole[partition.index * shard.numel() :][: shard.numel()]
        self._read = self._transfers.copy(own, shard, self._transfers.now(self._device), written)
        with self._transfers.after_copies_to(own.device):
            work = all_gather_into(whole, own, partition)
        return _Gather(self._transfers, self._device, self._read, work)

    def write(self, shard: Tensor, values: Tensor) -> Event:
        """Start to round values on the device into a shard, or a part of one; return the event of the end."""
        while len(self._buffers) < 2:
            size = min(self._longest, STAGED_BYTES)
            self._buffers.append((torch.empty(size, dtype=torch.uint8, device=self._device), None))
        length = self._buffers[0][0].numel() // shard.itemsize
        for target, source in zip(shard.split(length), values.view(-1).split(length), strict=True):
            buffer, free = self._buffers.pop(0)
            self._transfers.wait_for(free, self._device)
            rounded = buffer[: target.nbytes].view(shard.dtype).copy_(source)
            self._written = self._transfers.copy(target, rounded, self._transfers.now(self._device), self._read)
            self._buffers.append((buffer, self._written))
        return self._written

    def settle(self) -> None:
        """Return when the host may read and write the shards."""
        for event in (self._read, self._written):
            if event is not None:
                event.synchronize()
        self._read = self._written = None

    def buffers(self) -> list[Tensor]:
        """Return the buffers on the device."""
        return [buffer for buffer, _ in self._buffers]
