"""Messages between ranks of one host as copies into the receiver's memory: no multiprocessor, no host.

A channel is a ring of slots in the receiver's symmetric memory. The sender's stream waits until the next slot is free,
copies a piece into it by the copy engine and writes beside it how often it was filled; the receiver's stream waits for
that, takes the piece, and writes back how often the slot was emptied. Waits and counts are the driver's stream memory
operations, so compute kernels share the device with nothing, where NCCL's spin on multiprocessors until their message comes.

The stream that needs a message waits for it, and copies it out of the ring, when it needs it, not one beside it as soon as it
is expected: streams that wait for long hold up the short waits of others on the device. Only where a message is expected for
which the ring has no slot left do those before it go out by a stream beside.

The stages of a pipeline send each other activations so (peer_copies.py), tensor slices the shards of sequences
(shard_copies.py).
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel3d.comm.collectives import Group, all_gather_integers, all_gather_object
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.streams import CudaStreams, Stream, can_copy
from parallel3d.comm.symmetric import Mapped, map_memory, reaches

SLOT_BYTES = 16 * 2**20
NUM_SLOTS = 4
_HEADER_BYTES = 4096  # of counts: an int32 for each slot that fills here, then one for each that is emptied elsewhere


@dataclass(frozen=True)
class Ring:
    """One end of a channel: the slots in the receiver's memory, and where each end counts for the other, a word a slot.

    filled: in the receiver's memory; emptied: in the sender's.
    """

    slots: Sequence[Tensor]
    filled: Tensor
    emptied: Tensor


class Place:
    """What a piece takes: a slot, and how often it is filled with it. `slot`, `filled` and `emptied` are addresses."""

    __slots__ = ("emptied", "filled", "slot", "times")

    def __init__(self, slot: int, filled: int, emptied: int, times: int):
        self.slot, self.filled, self.emptied, self.times = slot, filled, emptied, times

    def await_piece(self, stream: Stream) -> None:
        """Let the stream go on when the piece is there."""
        stream.wait_for(self.filled, _int32(self.times))

    def leave(self, stream: Stream) -> None:
        """The sender's again, once all before it on the stream is done."""
        stream.write(self.emptied, _int32(self.times))


class _End:
    """Of a ring, whose memory it keeps."""

    def __init__(self, ring: Ring):
        self.slot_bytes = ring.slots[0].numel()
        self._ring, self._count = ring, 0
        words = zip(ring.slots, ring.filled.split(1), ring.emptied.split(1), strict=True)
        self._addresses = [(slot.data_ptr(), filled.data_ptr(), emptied.data_ptr()) for slot, filled, emptied in words]

    def _next_place(self) -> Place:
        """Of the next piece, the same for both ends."""
        times, k = divmod(self._count, len(self._addresses))
        self._count += 1
        return Place(*self._addresses[k], times + 1)

    def _pieces(self, address: int, num_bytes: int) -> Iterator[tuple[int, int]]:
        """The address and the bytes of each part that takes a slot."""
        for start in range(0, num_bytes, self.slot_bytes):
            yield address + start, min(self.slot_bytes, num_bytes - start)


class Sender(_End):
    """The end that copies into a ring."""

    def send(self, address: int, num_bytes: int, stream: Stream) -> None:
        """So many bytes from an address, in as many pieces as it takes."""
        for source, length in self._pieces(address, num_bytes):
            place = self._next_place()
            if place.times > 1:
                stream.wait_for(place.emptied, _int32(place.times - 1))
            stream.copy(place.slot, source, length)
            stream.write(place.filled, _int32(place.times))


class Arriving:
    """A message that is expected: `take` copies it out of its ring, once, on whichever stream first needs it."""

    def __init__(self, first: int, parts: Sequence[tuple[Place, int, int]], memory: Tensor, posted: Any):
        self.first = first  # of its pieces among all of the ring's
        self._parts, self._mark = parts, posted
        # Until it is taken it may come, even if a failure has made everyone else forget the memory.
        self._memory: Tensor | None = memory

    @property
    def taken(self) -> bool:
        """Whether `take` was called."""
        return self._memory is None

    def take(self, stream: Stream) -> None:
        """Let the stream go on when the message is in its memory."""
        stream.follow(self._mark)
        if self._memory is None:
            return
        for place, target, length in self._parts:
            place.await_piece(stream)
            stream.copy(target, place.slot, length)
            place.leave(stream)
        stream.hold(self._memory)
        self._memory, self._mark = None, stream.mark()


class Receiver(_End):
    """The end that takes from a ring. beside: a stream for messages that keep others from coming."""

    def __init__(self, ring: Ring, beside: Stream):
        super().__init__(ring)
        self._beside = beside
        self._expected: deque[Arriving] = deque()

    def expect(self, memory: Tensor, posted: Any) -> Arriving:
        """The next message, into memory, contiguous, that is free when the mark `posted` is done."""
        pieces = list(self._pieces(memory.data_ptr(), memory.nbytes))
        self._make_room(len(pieces))
        first = self._count
        arriving = Arriving(first, [(self._next_place(), *piece) for piece in pieces], memory, posted)
        if len(pieces) > len(self._addresses):
            arriving.take(self._beside)
        else:
            self._expected.append(arriving)
        return arriving

    def next_place(self) -> Place:
        """Of the next message, which takes one slot and is to be left at once."""
        self._make_room(1)
        return self._next_place()

    def _make_room(self, num_pieces: int) -> None:
        """So that no message before holds a slot of the next pieces: in which order messages are taken must not matter."""
        while self._expected:
            oldest = self._expected[0]
            if not oldest.taken and self._count + num_pieces - oldest.first <= len(self._addresses):
                break
            if not oldest.taken:
                oldest.take(self._beside)
            self._expected.popleft()


def _int32(count: int) -> int:
    """The count as the words hold it."""
    return (count + 2**31) % 2**32 - 2**31


class Receiving:
    """A Work: a message that comes into the memory of `data`, on the stream that first waits for it."""

    def __init__(self, receiver: Receiver, data: Tensor, streams: CudaStreams):
        self._streams = streams
        self._arriving = receiver.expect(data, streams.current().mark())

    def wait(self) -> None:
        """Let the current stream go on when the message is in its memory."""
        self._arriving.take(self._streams.current())

    def is_completed(self) -> bool:
        """Whether it was taken. (What has come is not known before.)"""
        return self._arriving.taken


@dataclass(frozen=True)
class Channels:
    """Where the rings of some ranks lie in the memory that each of them shares. peers: of each, who sends to it."""

    peers: Sequence[Sequence[int]]
    num_slots: int = NUM_SLOTS
    slot_bytes: int = SLOT_BYTES

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
