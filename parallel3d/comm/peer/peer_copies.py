"""Messages between stages of a pipeline on one host, as copies into the receiver's memory (rings.py)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.obstacles import Obstacle
from parallel3d.comm.peer.buffers import TensorKind, loan_of
from parallel3d.comm.peer.channels import Channels, open_channels
from parallel3d.comm.peer.message_wait import open_message_wait
from parallel3d.comm.peer.rings import Arriving, Receiver, Receiving, Sender, Staying
from parallel3d.comm.peer.streams import Copied, CudaStream, CudaStreams, Stream, Streams

# (slots, bytes of each): of rings whose messages are copied out, and of those whose messages may stay, each in one slot.
_COPIED, _STAYING = (4, 16 * 2**20), (6, 32 * 2**20)


class _Ends:
    """Of the rings between this rank and its neighbours, by their stages. new_stream: makes one that work may be added to."""

    def __init__(
        self, stage: int, channels: Channels, memory_of: Callable[[int], Tensor], new_stream: Callable[[], Stream]
    ):
        self.num_slots, self.slot_bytes = channels.num_slots, channels.slot_bytes
        peers = channels.peers[stage]
        self.senders = {other: Sender(channels.ring(stage, other, memory_of)) for other in peers}
        self.receivers = {other: Receiver(channels.ring(other, stage, memory_of), new_stream()) for other in peers}


class PeerCopies:
    """This rank's channels from and to its neighbours in a pipeline whose ranks share a host.

    in_place: rings by which one tensor of every message goes, the largest that fits a slot, to stay there if it may; what
    else a message has goes by the others, so that it is known how soon a slot is needed again. Made by `open_peer_copies`.
    """

    def __init__(self, copied: _Ends, in_place: _Ends | None, streams: Streams, new_stream: Callable[[], Stream]):
        self._copied, self._in_place, self._streams = copied, in_place, streams
        self._outgoing = {other: new_stream() for other in copied.senders}

    def send(self, message: Sequence[Tensor], stage: int) -> list[Copied]:
        """Post tensors of bytes [n], n > 0, to a stage, once the current stream has them."""
        queue, posted = self._outgoing[stage], self._streams.current().mark()
        chosen = self._chosen([data.numel() for data in message])
        works = []
        for k, data in enumerate(message):
            if loan_of(data) is not None:
                data = data.clone()  # whoever lent the memory must not have to wait for this to leave
                posted = self._streams.current().mark()
            self._ends(k == chosen).senders[stage].send(data.data_ptr(), data.numel(), posted, queue)
            works.append(Copied(queue.mark(), data))
        return works

    def receive(self, kinds: Sequence[TensorKind], stage: int, behind: int | None) -> list[Receiving]:
        """Post the receipt of the next message of a stage, tensors of at least one byte each; behind: see Transport."""
        chosen = self._chosen([kind.nbytes for kind in kinds])
        inbound = []
        for k, kind in enumerate(kinds):
            ends = self._ends(k == chosen)
            receiver = ends.receivers[stage]
            receiver.end_loans(self._streams.current())
            message: Arriving | Staying
            # The slot's next message, and the one before that, are posted when this one's tensors are gone.
            if k == chosen and behind is not None and behind + 2 <= ends.num_slots:
                message = receiver.expect_to_stay(kind, self._streams)
            else:
                message = receiver.expect(kind.empty(), self._streams.current().mark())
            inbound.append(Receiving(receiver, message, self._streams))
        return inbound

    def _ends(self, may_stay: bool) -> _Ends:
        return self._in_place if may_stay and self._in_place is not None else self._copied

    def _chosen(self, sizes: Sequence[int]) -> int | None:
        """Which tensor of a message may stay; the same on both ends."""
        if self._in_place is None:
            return None
        fitting = [k for k, size in enumerate(sizes) if size <= self._in_place.slot_bytes]
        return max(fitting, key=sizes.__getitem__, default=None)


def pipeline_channels(num_stages: int, in_place: bool = False) -> Channels:
    """Between the neighbours of a pipeline, its ends included. in_place: for messages that may stay."""
    peers = [sorted({(s - 1) % num_stages, (s + 1) % num_stages} - {s}) for s in range(num_stages)]
    return Channels(peers, *(_STAYING if in_place else _COPIED))


def ring_bytes(num_stages: int, in_place: bool) -> int:
    """Of a rank's memory that its rings take."""
    kinds = (False, True) if in_place else (False,)
    return sum(pipeline_channels(num_stages, kind).num_bytes for kind in kinds)


def open_peer_copies(
    groups: ProcessGroups, device: torch.device, by_kernel: bool = False, in_place: bool = False
) -> PeerCopies | None:
    """The channels of this rank's pipeline; None, on every rank, where they can't be had on any, or there is one stage.

    One warning says why what is asked for by in_place, that messages may stay in their slots, is not to be had. by_kernel: see
    open_message_wait. Collective over the world.
    """
    size, stage = groups.pipe.size, groups.coordinate("pipe")
    if size == 1:
        return None

    def new_stream() -> CudaStream:
        return CudaStream(torch.cuda.Stream(device))

    def open_ends(may_stay: bool) -> _Ends | Obstacle:
        channels = pipeline_channels(size, may_stay)
        shared = open_channels(groups, "pipe", channels, device, "stages")
        return shared if isinstance(shared, Obstacle) else _Ends(stage, channels, shared.of, new_stream)

    copied = open_ends(may_stay=False)
    if isinstance(copied, Obstacle):
        if in_place:
            _warn(groups, copied, f"{groups.backend} takes messages")
        return None
    staying = open_ends(may_stay=True) if in_place else None
    if isinstance(staying, Obstacle):
        _warn(groups, staying, "messages are copied out of their slots")
        staying = None
    return PeerCopies(copied, staying, CudaStreams(device, open_message_wait(device, by_kernel)), new_stream)


def _warn(groups: ProcessGroups, obstacle: Obstacle, instead: str) -> None:
    if groups.rank == 0:
        warnings.warn(f"pipeline.receive_in_place: {obstacle}; {instead} instead", stacklevel=2)
