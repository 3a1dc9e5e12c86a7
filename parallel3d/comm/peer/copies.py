"""Messages between ranks of one host as copies into the receiver's memory, which occupy no multiprocessor and no host.

A channel is a ring of slots in the receiver's symmetric memory. The sender's stream waits until the next slot is free, copies
a part of the message into it by the copy engine and writes next to it how often the slot was filled; the receiver's stream
waits for that, copies the part out, and writes back how often the slot was emptied. Waits and counts are the driver's stream
memory operations, so compute kernels have the device to themselves, where NCCL's kernels spin on multiprocessors until their
message comes.

The stream that needs a message waits for it and copies it out of the ring at that time. No second stream does this as soon as
the message is expected, because streams that wait for long delay the short waits of others on the device. Only if the ring has
no slot left for an expected message does a second stream copy out the messages before it.

Pipeline stages exchange activations, and tensor-parallel ranks the shards of sequences, over such rings.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from parallel3d.comm.collectives import Awaited, Group, Work
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.peer.streams import Copied, CudaStream, CudaStreams, check_copies
from parallel3d.comm.peer.symmetric import Mapped, check_axis, check_hosts, map_memory

# Bytes of counts: an int32 for each slot that is filled here, then one for each that is emptied elsewhere.
_HEADER_BYTES = 4096


@dataclass(frozen=True)
class Ring:
    """One channel: the slots in the receiver's memory, and the counts that the ends write for each other, a word per slot.

    filled: in the receiver's memory; emptied: in the sender's.
    """

    slots: Sequence[Tensor]
    filled: Tensor
    emptied: Tensor


@dataclass(frozen=True)
class Channels:
    """Layout of the rings of several ranks in the memory that each of them shares. peers[rank]: the ranks that send to it."""

    peers: Sequence[Sequence[int]]
    num_slots: int
    slot_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of each rank's memory: counts, and a ring for each peer."""
        return _HEADER_BYTES + max(map(len, self.peers)) * self.num_slots * self.slot_bytes

    def ring(self, source: int, target: int, memory_of: Callable[[int], Tensor]) -> Ring:
        """Return the channel from one rank to another. memory_of: rank -> its num_bytes bytes."""
        into, out = self.peers[target].index(source), self.peers[source].index(target)
        length = self.num_slots * self.slot_bytes
        memory, start = memory_of(target), _HEADER_BYTES + into * length
        filled, _ = _counts(memory)
        _, emptied = _counts(memory_of(source))
        first, end = into * self.num_slots, out * self.num_slots
        slots = memory[start : start + length].split(self.slot_bytes)
        return Ring(slots, filled[first : first + self.num_slots], emptied[end : end + self.num_slots])

    def open(self, groups: ProcessGroups, axis: str, device: torch.device, noun: str) -> Mapped | None:
        """Map the memory for this rank's group along an axis of the topology; None on every rank if any can't.

        It needs CUDA devices of one host that reach each other's memory, and two ranks or more. noun: what the ranks of a
        group hold. Collective over the world.
        """
        if getattr(groups, axis).size == 1 or check_axis(groups, axis, device, noun, check_copies, check_hosts):
            return None
        return map_memory(groups, axis, device, self.num_bytes, cleared=_HEADER_BYTES)


def _counts(memory: Tensor) -> tuple[Tensor, ...]:
    return memory[:_HEADER_BYTES].view(torch.int32).chunk(2)


class Slot:
    """One use of a slot. `address`, `filled` and `emptied` are addresses; times: how often the slot has then been filled."""

    __slots__ = ("address", "emptied", "filled", "times")

    def __init__(self, address: int, filled: int, emptied: int, times: int):
        self.address, self.filled, self.emptied, self.times = address, filled, emptied, times

    def wait_until_filled(self, stream: CudaStream) -> None:
        """Let the stream go on when the part of the message has arrived."""
        stream.wait_for(self.filled, self.times)

    def release(self, stream: CudaStream) -> None:
        """Give the slot back to the sender once all earlier work on the stream is done."""
        stream.write(self.emptied, self.times)


class _End:
    """One end of a ring, whose memory it keeps alive."""

    def __init__(self, ring: Ring):
        self.slot_bytes = ring.slots[0].numel()
        self._ring, self._count = ring, 0
        words = zip(ring.slots, ring.filled.split(1), ring.emptied.split(1), strict=True)
        self._addresses = [(slot.data_ptr(), filled.data_ptr(), emptied.data_ptr()) for slot, filled, emptied in words]

    def _next_slot(self) -> Slot:
        """Return the slot of the next part, the same at both ends."""
        times, k = divmod(self._count, len(self._addresses))
        self._count += 1
        return Slot(*self._addresses[k], times + 1)

    def _parts(self, address: int, num_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield the address and the bytes of each part that takes a slot."""
        for start in range(0, num_bytes, self.slot_bytes):
            yield address + start, min(self.slot_bytes, num_bytes - start)


class Sender(_End):
    """The end that copies into a ring."""

    def send(self, address: int, num_bytes: int, posted: Any, stream: CudaStream) -> None:
        """Send bytes, which are at `address` when the mark `posted` is done, in as many parts as needed."""
        for source, length in self._parts(address, num_bytes):
            slot = self._next_slot()
            # Wait for the slot first: it is usually free already.
            if slot.times > 1:
                stream.wait_for(slot.emptied, slot.times - 1)
            if source == address:
                stream.follow(posted)
            stream.copy(slot.address, source, length)
            stream.write(slot.filled, slot.times)


class Arriving:
    """Work of an expected message, which is copied out of its ring once, on the stream that first needs it.

    - first: index of its first part among all of the ring's.
    - parts: the slot of each part, where it goes, and its bytes.
    - memory: where the message goes; it may be written once the work queued on the current stream is done.
    """

    def __init__(self, first: int, parts: Sequence[tuple[Slot, int, int]], memory: Tensor, streams: CudaStreams):
        self.first, self._left = first, False
        self._parts, self._streams, self._mark = parts, streams, streams.current().mark()
        # Keep the memory until the message has left the ring: it may still arrive after a failure has freed all else.
        self._memory: Tensor | None = memory

    def make_way(self, stream: CudaStream) -> None:
        """Copy it out of the ring, by a stream that may wait."""
        stream.follow(self._mark)
        for slot, target, length in self._parts:
            slot.wait_until_filled(stream)
            stream.copy(target, slot.address, length)
            slot.release(stream)
        assert self._memory is not None
        stream.hold(self._memory)
        self._mark, self._left = stream.mark(), True

    def is_completed(self) -> bool:
        """Return whether it has left its ring. (Whether it has arrived is not known before.)"""
        return self._left

    def wait(self) -> Tensor:
        """Return the memory with the message, for what the current stream does from now on; to be called once."""
        stream = self._streams.current()
        if self._left:
            stream.follow(self._mark)
        else:
            self.make_way(stream)
        memory, self._memory = self._memory, None
        assert memory is not None, "a message is received once"
        return memory


class Receiver(_End):
    """The end that copies out of a ring. second: stream that copies out messages whose slots later ones need."""

    def __init__(self, ring: Ring, second: CudaStream, streams: CudaStreams):
        super().__init__(ring)
        self._second, self._streams = second, streams
        self._expected: deque[Arriving] = deque()

    def expect(self, memory: Tensor) -> Arriving:
        """Expect the next message in `memory`, contiguous, which may be written after the current stream's queued work."""
        parts = list(self._parts(memory.data_ptr(), memory.nbytes))
        self._make_room(len(parts))
        first = self._count
        arriving = Arriving(first, [(self._next_slot(), *part) for part in parts], memory, self._streams)
        if len(parts) > len(self._addresses):
            arriving.make_way(self._second)
        else:
            self._expected.append(arriving)
        return arriving

    def next_slot(self) -> Slot:
        """Return the slot of the next message, which must fit one slot. The caller must release it at once."""
        self._make_room(1)
        return self._next_slot()

    def _make_room(self, num_parts: int) -> None:
        """Free the slots of the next parts of earlier messages: the order in which messages are received must not matter."""
        while self._expected:
            oldest = self._expected[0]
            if not oldest.is_completed():
                if self._count + num_parts - oldest.first <= len(self._addresses):
                    break
                oldest.make_way(self._second)
            self._expected.popleft()


_STAGE_SLOTS, _STAGE_SLOT_BYTES = 4, 16 * 2**20
# Bytes of 4096 tokens x 4096 features in bf16; a slot holds one tensor-parallel rank's share of them.
_SHARDS_BYTES = 32 * 2**20
_ALIGNED_BYTES = 4096
_MOST_VIEWS = 1024  # number of views kept, for shapes that change between batches


class PeerCopies:
    """Channels of this rank from and to its neighbours in a pipeline whose ranks share a host. Made by `open_peer_copies`.

    new_stream: makes a stream that work may be added to.
    """

    def __init__(
        self,
        stage: int,
        channels: Channels,
        memory_of: Callable[[int], Tensor],
        streams: CudaStreams,
        new_stream: Callable[[], CudaStream],
    ):
        peers = channels.peers[stage]
        self._streams = streams
        self._senders = {other: Sender(channels.ring(stage, other, memory_of)) for other in peers}
        self._receivers = {
            other: Receiver(channels.ring(other, stage, memory_of), new_stream(), streams) for other in peers
        }
        self._outgoing = {other: new_stream() for other in peers}

    def send(self, message: Sequence[Tensor], stage: int) -> list[Copied]:
        """Post tensors of bytes [n], n > 0, to a stage, once the current stream has computed them."""
        queue, posted = self._outgoing[stage], self._streams.current().mark()
        works = []
        for data in message:
            self._senders[stage].send(data.data_ptr(), data.numel(), posted, queue)
            works.append(Copied(queue.mark(), data))
        return works

    def receive(self, buffers: Sequence[Tensor], stage: int) -> list[Arriving]:
        """Post the receipt of the next message of a stage, tensors of at least one byte each, into these buffers."""
        return [self._receivers[stage].expect(buffer) for buffer in buffers]


def pipeline_channels(num_stages: int) -> Channels:
    """Return the channels between the neighbours of a pipeline, between its last and first stage included."""
    peers = [sorted({(s - 1) % num_stages, (s + 1) % num_stages} - {s}) for s in range(num_stages)]
    return Channels(peers, _STAGE_SLOTS, _STAGE_SLOT_BYTES)


def open_peer_copies(groups: ProcessGroups, device: torch.device) -> PeerCopies | None:
    """Open the channels of this rank's pipeline; None on every rank if any rank can't have them, or if there is one stage.

    Collective over the world.
    """
    channels = pipeline_channels(groups.pipe.size)
    shared = channels.open(groups, "pipe", device, "stages")
    if shared is None:
        return None

    def new_stream() -> CudaStream:
        return CudaStream(torch.cuda.Stream(device))

    return PeerCopies(groups.coordinate("pipe"), channels, shared.of, CudaStreams(device), new_stream)


class ShardCopies:
    """Channels between this rank and the other tensor-parallel ranks of its layers. Made by open_shard_copies.

    Every rank posts the same messages in the same order; messages of one peer arrive in the order of sending.
    One stream sends all of them, one after the other, because one copy alone uses all of NVLink's bandwidth.
    """

    def __init__(self, group: Group, channels: Channels, memory_of: Callable[[int], Tensor], device: torch.device):
        self.most_bytes = channels.slot_bytes
        self._group, index = group, group.index
        self._streams = CudaStreams(device)
        self._outgoing, second = (CudaStream(torch.cuda.Stream(device)) for _ in range(2))
        peers = channels.peers[index]
        self._senders = {peer: Sender(channels.ring(index, peer, memory_of)) for peer in peers}
        self._receivers = {
            peer: Receiver(channels.ring(peer, index, memory_of), second, self._streams) for peer in peers
        }
        # Tensors over slots, kept because the same ones are used again and again.
        self._view = lru_cache(_MOST_VIEWS)(partial(_view, memory_of(index)))

    def takes(self, x: Tensor) -> bool:
        """Return whether tensors like `x` can be sent; the same on every rank."""
        return x.is_cuda

    def send(self, x: Tensor, peer: int) -> None:
        """Post x, contiguous and of at most most_bytes, to a peer, given by its index in the group."""
        queue = self._outgoing
        self._senders[peer].send(x.data_ptr(), x.nbytes, self._streams.current().mark(), queue)
        x.record_stream(queue.stream)

    @contextmanager
    def taken(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> Iterator[Tensor]:
        """Open a peer's next message in its slot for work on the current stream; on exit the slot is released."""
        slot, stream = self._receivers[peer].next_slot(), self._streams.current()
        slot.wait_until_filled(stream)
        try:
            yield self._view(slot.address, tuple(shape), dtype)
        finally:
            slot.release(stream)

    def receive(self, out: Tensor, peer: int) -> Work:
        """Post the receipt of a peer's next message into `out`, contiguous."""
        rank = self._group.ranks[peer]
        return Awaited(self._receivers[peer].expect(out), self._group.waiting(f"a shard of rank {rank}", (rank,)))


def _view(memory: Tensor, slot: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor in memory, whose bytes begin at the address of a slot."""
    start = slot - memory.data_ptr()
    return memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def shard_channels(size: int) -> Channels:
    """Return the channels between all of `size` tensor-parallel ranks."""
    peers = [[other for other in range(size) if other != index] for index in range(size)]
    slot_bytes = _SHARDS_BYTES // size // _ALIGNED_BYTES * _ALIGNED_BYTES
    return Channels(peers, 4 if size == 2 else 2, slot_bytes)


def open_shard_copies(groups: ProcessGroups, device: torch.device) -> ShardCopies | None:
    """Open copies between the tensor-parallel ranks of this rank's group; None unless every group of the world can have them.

    Collective over the world.
    """
    channels = shard_channels(groups.model.size)
    shared = channels.open(groups, "model", device, "tensor-parallel ranks")
    return None if shared is None else ShardCopies(groups.model, channels, shared.of, device)
