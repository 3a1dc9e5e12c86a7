"""Shards of tensor slices, on one host, as copies into the peers' memory (rings.py) beside the products that need them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from parallel3d.comm.collectives import Awaited, Group, Work
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.obstacles import Obstacle
from parallel3d.comm.peer.channels import Channels, open_channels
from parallel3d.comm.peer.rings import Place, Receiver, Receiving, Sender
from parallel3d.comm.peer.streams import CudaStream, CudaStreams

# Of all slices: a slot holds a slice's share of 4096 tokens x 4096 features in bf16.
_WHOLE_BYTES = 32 * 2**20
_ALIGNED_BYTES = 4096
_MOST_VIEWS = 1024  # kept, where shapes change from batch to batch


class Taken:
    """A message in its slot, for the work within a `with` block: there when that begins, the sender's again after it."""

    __slots__ = ("_place", "_stream", "_view")

    def __init__(self, view: Tensor, place: Place, stream: CudaStream):
        self._view, self._place, self._stream = view, place, stream

    def __enter__(self) -> Tensor:
        self._place.await_piece(self._stream)
        return self._view

    def __exit__(self, *_: object) -> None:
        self._place.leave(self._stream)


class ShardCopies:
    """This rank's channels from and to the other slices of its layers. Made by open_shard_copies.

    Every rank posts the same messages in the same order; a message of one peer is taken in the order in which it was sent.
    All are sent by one stream, one after the other, for one copy alone takes what NVLink gives.
    """

    def __init__(self, group: Group, channels: Channels, memory_of: Callable[[int], Tensor], device: torch.device):
        self.most_bytes = channels.slot_bytes
        self._group, index = group, group.index
        self._streams = CudaStreams(device)
        self._outgoing, beside = (CudaStream(torch.cuda.Stream(device)) for _ in range(2))
        peers = channels.peers[index]
        self._senders = {peer: Sender(channels.ring(index, peer, memory_of)) for peer in peers}
        self._receivers = {peer: Receiver(channels.ring(peer, index, memory_of), beside) for peer in peers}
        self._memory = memory_of(index)
        # Slots as tensors: the same ones again and again.
        self._views: dict[tuple[int, tuple[int, ...], torch.dtype], Tensor] = {}

    def takes(self, x: Tensor) -> bool:
        """Whether such tensors can be sent; the same on every rank, where they are alike."""
        return x.is_cuda

    def send(self, x: Tensor, peer: int) -> None:
        """Post x, contiguous and of at most most_bytes, to a peer, by its place in the group."""
        queue = self._outgoing
        self._senders[peer].send(x.data_ptr(), x.nbytes, self._streams.current().mark(), queue)
        x.record_stream(queue.stream)

    def taken(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> Taken:
        """The next message of a peer, in its slot, for work on the current stream; the slot is given back after it."""
        place = self._receivers[peer].next_place()
        return Taken(self._view(place.slot, tuple(shape), dtype), place, self._streams.current())

    def _view(self, slot: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        view = self._views.get((slot, shape, dtype))
        if view is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            start = slot - self._memory.data_ptr()
            data = self._memory[start : start + math.prod(shape) * dtype.itemsize]
            view = self._views[slot, shape, dtype] = data.view(dtype).view(shape)
        return view

    def receive(self, out: Tensor, peer: int) -> Work:
        """Post the receipt of a peer's next message into `out`, contiguous."""
        rank = self._group.ranks[peer]
        message = self._receivers[peer].expect(out, self._streams.current().mark())
        return Awaited(Receiving(message, self._streams), self._group.waiting(f"a shard of rank {rank}", (rank,)))


def slice_channels(num_slices: int) -> Channels:
    """Between all slices of a layer."""
    peers = [[other for other in range(num_slices) if other != index] for index in range(num_slices)]
    slot_bytes = _WHOLE_BYTES // num_slices // _ALIGNED_BYTES * _ALIGNED_BYTES
    return Channels(peers, 4 if num_slices == 2 else 2, slot_bytes)


def open_shard_copies(groups: ProcessGroups, device: torch.device) -> ShardCopies | None:
    """Open copies between the tensor-parallel ranks of this rank's group; None unless every group of the world can have them.

    Collective over the world.
    """
    group = groups.model
    if group.size == 1:
        return None
    channels = slice_channels(group.size)
    shared = open_channels(groups, "model", channels, device, "tensor slices")
    return None if isinstance(shared, Obstacle) else ShardCopies(group, channels, shared.of, device)
