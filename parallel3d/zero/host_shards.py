"""Shards of weights in host memory or on disk (ZeRO-3 with offload_param), and the copies between them and the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from weakref import ref

import torch
from torch import Tensor

from parallel3d.comm.collectives import Group, Work, all_gather_into
from parallel3d.comm.host_memory import allocate_slab
from parallel3d.comm.transfers import Event, Transfers
from parallel3d.zero.disk import ScratchFile, StagingBuffer, StagingBuffers, in_blocks
from parallel3d.zero.policy import STAGED_BYTES

_BYTES = "bytes"  # name of a shard in a buffer


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
    """A rank's shards of weights in host memory and on disk, and the copies between them and a device.

    Copies to the device wait for what is enqueued on the current stream, which may still use the memory that they write, and
    for the last copy to the same shard. Copies to the host pass through two buffers on the device, where masters are rounded.
    Shards on disk are tensors, too, which the host may use after `settle`; copies of them pass through buffers in host memory.

    - pin: whether the memory is pinned; without it, copies don't overlap with computations.
    - file: for shards on disk. count: number of the buffers that they pass through.
    """

    def __init__(self, device: torch.device, pin: bool, file: ScratchFile | None = None, count: int = 0):
        self._device, self._pin, self._transfers = device, pin, Transfers()
        self._kept: list[ref[Tensor]] = []
        self._longest = 0  # bytes of the largest shard
        self._buffers: list[tuple[Tensor, Event]] = []  # the most recently used one comes last
        self._read: Event = None
        self._written: Event = None
        self._file, self._count = file, count
        # Address of each shard on disk -> the buffer from which it was written last.
        self._on_disk: dict[int, StagingBuffer | None] = {}
        self._filling = StagingBuffer()  # the buffer of the shard on disk that is being written
        self._coming: deque[Tensor] = deque()  # shards on disk that will be gathered next, after those in _ahead
        self._ahead: deque[tuple[Tensor, StagingBuffer]] = deque()  # those of which the read has started

    @cached_property
    def _staging(self) -> StagingBuffers:
        """The buffers between the disk and the device, once all shards are kept."""
        assert self._file is not None
        longest = max(shard.nbytes for shard in self.kept if self._is_on_disk(shard))
        return StagingBuffers(self._file, self._count, self._pin, longest)

    def keep(self, shard: Tensor, on_disk: bool = False) -> Tensor:
        """Return a copy of a flat shard in host memory, or on disk."""
        if on_disk:
            assert self._file is not None
            kept = self._file.allocate(shard.numel(), shard.dtype).copy_(shard)
            self._on_disk[kept.data_ptr()] = None
        else:
            kept = allocate_slab(shard.nbytes, self._pin).view(shard.dtype).copy_(shard)
        self._kept.append(ref(kept))
        self._longest = max(self._longest, kept.nbytes)
        return kept

    @property
    def kept(self) -> list[Tensor]:
        """The shards that are in use."""
        return [shard for each in self._kept if (shard := each()) is not None]

    def _is_on_disk(self, shard: Tensor) -> bool:
        return shard.data_ptr() in self._on_disk

    def expect(self, shards: Iterable[Tensor]) -> None:
        """Prefetch from disk the shards that will be gathered next, in this order; drop all others that were prefetched."""
        if not self._on_disk:
            return
        coming = list(filter(self._is_on_disk, shards))
        ahead = [shard.data_ptr() for shard, _ in self._ahead]
        if ahead != [shard.data_ptr() for shard in coming[: len(ahead)]]:
            self._ahead.clear()  # not some of them: buffers are used in turn
        self._coming = deque(coming[len(self._ahead) :])
        self._read_ahead()

    def _read_ahead(self) -> None:
        """Start reads as long as a buffer is free besides the one in use."""
        while self._coming and len(self._ahead) < self._count - 1 and self._staging.is_free():
            last = self._on_disk[self._coming[0].data_ptr()]
            if last is not None and last.written is not None and not last.written.done():
                return
            self._start_read()

    def _start_read(self) -> None:
        shard = self._coming.popleft()
        last = self._on_disk[shard.data_ptr()]
        if last is not None:
            last.wait_until_written()
        flat = shard.view(torch.uint8)
        self._ahead.append((shard, self._staging.read({_BYTES: flat}, slice(0, flat.numel()))))

    def _staged(self, shard: Tensor) -> StagingBuffer:
        """Return the buffer that a shard on disk has been read into."""
        planned = self._ahead[0][0] if self._ahead else self._coming[0] if self._coming else None
        if planned is not shard:
            self.expect([shard])
        if not self._ahead:
            self._start_read()
        _, staged = self._ahead.popleft()
        self._read_ahead()
        staged.wait()
        return staged

    def gather(self, whole: Tensor, shard: Tensor, partition: Group, written: Event) -> Work:
        """Start to copy a shard to its place in `whole`, and to gather the others'. written: see `write`.

        Waits for the disk, if the shard is there.
        """
        own = whole[partition.index * shard.numel() :][: shard.numel()]
        staged = self._staged(shard) if self._is_on_disk(shard) else None
        source = shard if staged is None else staged.tensors[_BYTES].view(shard.dtype)
        self._read = self._transfers.copy(own, source, self._transfers.now(self._device), written)
        if staged is not None:
            staged.keep_until(self._read)
        with self._transfers.after_copies_to(own.device):
            work = all_gather_into(whole, own, partition)
        return _Gather(self._transfers, self._device, self._read, work)

    def write(self, shard: Tensor, part: slice, values: Tensor) -> Event:
        """Start to round values on the device into a part of a shard; return the event of the end.

        Parts of a shard on disk are given from the first to the last, and are written together.
        """
        start, stop, _ = part.indices(shard.numel())
        flat, target = shard.view(torch.uint8), shard
        if self._is_on_disk(shard):
            if start == 0:
                self.expect(())
                self._filling = self._staging.read({}, slice(0))
                self._staging.room(self._filling, _BYTES, flat)
            target = self._filling.tensors[_BYTES].view(shard.dtype)
        while len(self._buffers) < 2:
            size = min(self._longest, STAGED_BYTES)
            self._buffers.append((torch.empty(size, dtype=torch.uint8, device=self._device), None))
        length = self._buffers[0][0].numel() // shard.itemsize
        for place, source in zip(target[start:stop].split(length), values.view(-1).split(length), strict=True):
            buffer, free = self._buffers.pop(0)
            self._transfers.wait_for(free, self._device)
            rounded = buffer[: place.nbytes].view(shard.dtype).copy_(source)
            self._written = self._transfers.copy(place, rounded, self._transfers.now(self._device), self._read)
            self._buffers.append((buffer, self._written))
        if self._is_on_disk(shard) and stop == shard.numel():
            self._staging.write(self._filling, {_BYTES: flat}, slice(0, flat.numel()), self._written)
            self._on_disk[shard.data_ptr()] = self._filling
        return self._written

    def settle(self) -> None:
        """Wait until the host may read and write the shards. Raises OffloadError."""
        self.expect(())
        for event in (self._read, self._written):
            if event is not None:
                event.synchronize()
        self._read = self._written = None
        if self._on_disk:
            self._staging.settle()

    def buffers(self) -> list[Tensor]:
        """Return the buffers on the device."""
        return [buffer for buffer, _ in self._buffers]

    def on_host(self) -> list[Tensor]:
        """Return the shards in host memory, and the buffers there."""
        slabs = self._staging.slabs() if self._on_disk else []
        return [*(shard for shard in self.kept if not self._is_on_disk(shard)), *slabs]

    def bytes_on_disk(self) -> int:
        """Return the bytes that shards take on disk."""
        return sum(in_blocks(shard.nbytes) for shard in self.kept if self._is_on_disk(shard))
