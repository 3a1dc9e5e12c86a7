"""Messages between stages of a pipeline on one host, as copies into the receiver's memory (rings.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from parallel3d.comm.buffers import TensorKind, loan_of
from parallel3d.comm.channels import Channels, open_channels
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.message_wait import MessageWait, open_message_wait
from parallel3d.comm.rings import Arriving, Receiver, Sender, Staying
from parallel3d.comm.streams import Copied, CudaStream, CudaStreams

# (slots, bytes of each): of rings whose messages are copied out, and of those whose messages may stay, each in one slot.
_COPIED, _STAYING = (4, 16 * 2**20), (6, 32 * 2**20)


class Inbound:
    """A tensor that comes from a stage. stays: in the slot it comes into, as long as anything refers to it."""

    def __init__(self, receiver: Receiver, kind: TensorKind, streams: CudaStreams, stays: bool):
        self._receiver, self._kind, self._streams = receiver, kind, streams
        self._message: Arriving | Staying
        if stays:
            self._message = receiver.expect_to_stay(kind, self._spare)
        else:
            self._buffer, posted = self._spare()
            self._message = receiver.expect(self._buffer.reshape(-1).view(torch.uint8), posted)

    def _spare(self) -> tuple[Tensor, object]:
        return self._kind.empty(), self._streams.current().mark()

    def wait(self) -> Tensor:
        """The tensor, for what the current stream does from now on; to be called once. Raises CommunicationError."""
        stream = self._streams.current()
        self._receiver.prepare(self._message, stream)
        if isinstance(self._message, Staying):
            return self._message.take(stream)
        self._message.take(stream)
        return self._buffer

    def is_completed(self) -> bool:
        """Whether it was taken. (What has come is not known before.)"""
        return self._message.taken


class _Ends:
    """Of the rings between this rank and its neighbours, by their stages."""

    def __init__(self, stage: int, channels: Channels, memory_of: Callable[[int], Tensor], device: torch.device):
        self.num_slots, self.slot_bytes = channels.num_slots, channels.slot_bytes
        self.senders = {other: Sender(channels.ring(stage, other, memory_of)) for other in channels.peers[stage]}
        self.receivers = {
            other: Receiver(channels.ring(other, stage, memory_of), CudaStream(torch.cuda.Stream(device)))
            for other in channels.peers[stage]
        }


class PeerCopies:
    """This rank's channels from and to its neighbours in a pipeline whose ranks share a host.

    in_place: rings by which one tensor of every message goes, the largest that fits a slot, to stay there if it may; what
    else a message has goes by the others, so that it is known how soon a slot is needed again. Made by `open_peer_copies`.
    """

    def __init__(self, copied: _Ends, in_place: _Ends | None, device: torch.device, waits: MessageWait | None):
        self._copied, self._in_place, self._streams = copied, in_place, CudaStreams(device, waits)
        self._outgoing = {other: CudaStream(torch.cuda.Stream(device)) for other in copied.senders}

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

    def receive(self, kinds: Sequence[TensorKind], stage: int, behind: int | None) -> list[Inbound]:
        """Post the receipt of the next message of a stage, tensors of at least one byte each; behind: see Transport."""
        chosen = self._chosen([kind.nbytes for kind in kinds])
        inbound = []
        for k, kind in enumerate(kinds):
            ends = self._ends(k == chosen)
            receiver = ends.receivers[stage]
            receiver.end_loans(self._streams.current())
            # The slot's next message, and the one before that, are posted when this one's tensors are gone.
            stays = k == chosen and behind is not None and behind + 2 <= ends.num_slots
            inbound.append(Inbound(receiver, kind, self._streams, stays))
        return inbound

    def _ends(self, chosen: bool) -> _Ends:
        return self._in_place if chosen and self._in_place is not None else self._copied

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
    """The channels of this rank's pipeline, see open_channels.

    by_kernel: see open_message_wait; in_place: what is received may stay in its slot.
    """
    stage, ends = groups.coordinate("pipe"), []
    for kind in (False, True) if in_place else (False,):
        channels = pipeline_channels(groups.pipe.size, kind)
        shared = open_channels(groups, "pipe", channels, device)
        if shared is None:
            return None
        ends.append(_Ends(stage, channels, shared.of, device))
    return PeerCopies(ends[0], ends[1] if in_place else None, device, open_message_wait(device, by_kernel))
