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

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from parallel3d.comm.peer.streams import Stream, Streams


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

    def send(self, address: int, num_bytes: int, posted: Any, stream: Stream) -> None:
        """So many bytes, which are at an address when the mark `posted` is done, in as many pieces as it takes."""
        for source, length in self._pieces(address, num_bytes):
            place = self._next_place()
            # First what is mostly done long before.
            if place.times > 1:
                stream.wait_for(place.emptied, _int32(place.times - 1))
            if source == address:
                stream.follow(posted)
            stream.copy(place.slot, source, length)
            stream.write(place.filled, _int32(place.times))


class Arriving:
    """A message that is expected: it is copied out of its ring once, on whichever stream first needs it."""

    def __init__(self, first: int, parts: Sequence[tuple[Place, int, int]], memory: Tensor, posted: Any):
        self.first, self.taken = first, False  # of its pieces among all of the ring's; whether it has left the ring
        self._parts, self._mark = parts, posted
        # Until it has left it may come, even if a failure has made everyone else forget the memory.
        self._memory: Tensor | None = memory

    def make_way(self, beside: Stream) -> None:
        """Leave the ring, by a stream that may wait."""
        beside.follow(self._mark)
        for place, target, length in self._parts:
            place.await_piece(beside)
            beside.copy(target, place.slot, length)
            place.leave(beside)
        assert self._memory is not None
        beside.hold(self._memory)
        self._mark, self.taken = beside.mark(), True

    def take(self, stream: Stream) -> Tensor:
        """The memory with the message, for what the stream does from now on; to be called once."""
        if self.taken:
            stream.follow(self._mark)
        else:
            self.make_way(stream)
        memory, self._memory = self._memory, None
        assert memory is not None, "a message is taken once"
        return memory


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
            arriving.make_way(self._beside)
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
                oldest.make_way(self._beside)
            self._expected.popleft()


def _int32(count: int) -> int:
    """The count as the words hold it."""
    return (count + 2**31) % 2**32 - 2**31


class Receiving:
    """A Work: a message that the stream which waits for it copies out of its ring."""

    def __init__(self, message: Arriving, streams: Streams):
        self._message, self._streams = message, streams

    def wait(self) -> Tensor:
        """The tensor, for what the current stream does from now on; to be called once."""
        return self._message.take(self._streams.current())

    def is_completed(self) -> bool:
        """Whether it has left its ring. (Whether it has arrived is not known before.)"""
        return self._message.taken
