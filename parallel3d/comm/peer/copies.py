"""Messages of pipeline stages, and shards of tensor-parallel ranks, as copies between the devices of one host (rings.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

import torch
from torch import Tensor

from parallel3d.comm.collectives import Awaited, Group, Work
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.peer.rings import Arriving, Channels, Receiver, Sender
from parallel3d.comm.peer.streams import Copied, CudaStream, CudaStreams

_STAGE_SLOTS, _STAGE_SLOT_BYTES = 4, 16 * 2**20
# Bytes of 4096 tokens x 4096 features in bf16; a slot holds one tensor-parallel rank's share of them.
_SHARDS_BYTES = 32 * 2**20
_ALIGNED_BYTES = 4096
_MOST_VIEWS = 1024  # number of views kept, for shapes that change between batches


@dataclass(frozen=True)
class TensorKind:
    """Shape, dtype and device of a contiguous tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"

    def empty(self) -> Tensor:
        """Return such a tensor in memory of PyTorch's allocator."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


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

    def receive(self, kinds: Sequence[TensorKind], stage: int) -> list[Arriving]:
        """Post the receipt of the next message of a stage, tensors of at least one byte each."""
        return [self._receivers[stage].expect(kind.empty()) for kind in kinds]


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
