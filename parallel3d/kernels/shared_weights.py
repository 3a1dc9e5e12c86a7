"""Weights in memory that the replicas of one host map, and their gathering by copy engines, beside the forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from parallel3d.comm.peer.peer_calls import PeerCalls
from parallel3d.comm.peer.streams import Stream

_ALIGNMENT = 512
_WORD_BYTES = 4


def shared_bytes(lengths: Sequence[int], world_size: int) -> int:
    """Of device memory on each rank, for buffers of these lengths in bytes and what is counted of them."""
    return _counts_bytes(len(lengths), world_size) + sum(map(_aligned, lengths))


def _counts_bytes(num_buffers: int, world_size: int) -> int:
    """Of each buffer and peer, how often it was ready to be written, and how often it was written."""
    return _aligned(2 * num_buffers * world_size * _WORD_BYTES)


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


class SharedWeights:
    """Buffers of some lengths, in bytes, the same on every rank of a group; calls: with shared_bytes(lengths) to them."""

    def __init__(self, calls: PeerCalls, lengths: Sequence[int]):
        self.calls, self._lengths = calls, tuple(lengths)
        world = calls.group.size
        start = _counts_bytes(len(lengths), world)
        calls.memory[:start].zero_()
        self._starts = []
        for length in lengths:
            self._starts.append(start)
            start += _aligned(length)

    @property
    def num_buffers(self) -> int:
        """How many there are."""
        return len(self._lengths)

    def memory(self, buffer: int) -> Tensor:
        """This rank's bytes of a buffer."""
        start = self._starts[buffer]
        return self.calls.memory[start : start + self._lengths[buffer]]

    def address(self, buffer: int, rank: int) -> int:
        """Of a buffer on a rank, by its place in the group, as this process maps it."""
        return int(self.calls.staging[rank]) + self._starts[buffer]

    def ready(self, buffer: int, rank: int, peer: int) -> int:
        """The address of a word in a rank's memory: how often a peer was ready to be written to."""
        return self._word(buffer, rank, peer)

    def filled(self, buffer: int, rank: int, peer: int) -> int:
        """The address of a word in a rank's memory: how often a peer has written its part of the buffer."""
        return self._word(self.num_buffers + buffer, rank, peer)

    def _word(self, row: int, rank: int, peer: int) -> int:
        return int(self.calls.staging[rank]) + (row * self.calls.group.size + peer) * _WORD_BYTES


class WeightCopies:
    """Gathers buffers of which each rank has written its part, by copies into the memory of the others.

    Every rank gathers the same buffers in the same order. A copy begins when its target has gathered too: then it has read the
    buffer as it was for the last time. outgoing: by which copies leave; current: the stream that writes and reads the buffers.
    """

    def __init__(self, shared: SharedWeights, outgoing: Stream, current: Callable[[], Stream]):
        self._shared, self._outgoing, self._current = shared, outgoing, current
        self._times = [0] * shared.num_buffers
        group = shared.calls.group
        # One after the other, for one copy alone takes what NVLink gives; not all to one rank at the same time.
        self._others = [(group.index + k) % group.size for k in range(1, group.size)]

    def gather(self, buffer: int, start: int, num_bytes: int) -> Gathering:
        """Send bytes [start, start + num_bytes) of a buffer, once the current stream has written them; get the others'."""
        shared, queue, index = self._shared, self._outgoing, self._shared.calls.group.index
        self._times[buffer] += 1
        count = self._times[buffer]
        queue.follow(self._current().mark())
        for other in self._others:
            queue.write(shared.ready(buffer, other, index), count)
        for other in self._others:
            queue.wait_for(shared.ready(buffer, index, other), count)
            queue.copy(shared.address(buffer, other) + start, shared.address(buffer, index) + start, num_bytes)
            queue.write(shared.filled(buffer, other, index), count)
        words = [shared.filled(buffer, index, other) for other in self._others]
        return Gathering(words, count, queue.mark(), self._current)


class Gathering:
    """A Work: a gather under way."""

    def __init__(self, words: Sequence[int], count: int, sent: Any, current: Callable[[], Stream]):
        self._words, self._count, self._sent, self._current = words, count, sent, current

    def wait(self) -> None:
        """Let the current stream go on when all parts are there, and the own one is sent."""
        stream = self._current()
        for word in self._words:
            stream.wait_for(word, self._count)
        stream.follow(self._sent)

    def is_completed(self) -> bool:
        """Whether the own part is sent, without waiting. (What has come is not known before.)"""
        return bool(self._sent.query())
