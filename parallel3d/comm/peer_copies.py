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

# (slots, bytes of each): of rings whose messages are copied out; and of those whose messages may stay, each in one slot.
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


class PeerCopies:
    """This rank's channels from and to its neighbours in a pipeline whose ranks share a host.

    Made by `open_peer_copies`.
    """

    def __init__(
        self,
        stage: int,
        channels: Channels,
        memory_of: Callable[[int], Tensor],
        device: torch.device,
        waits: MessageWait | None,
        in_place: bool,
    ):
        self._streams, self._in_place = CudaStreams(device, waits), in_place
        self._num_slots, self._slot_bytes = channels.num_slots, channels.slot_bytes
        self._senders: dict[int, tuple[Sender, CudaStream]] = {}
        self._receivers: dict[int, Receiver] = {}
        self._most_pieces = dict.fromkeys(channels.peers[stage], 1)  # of a message
        for other in channels.peers[stage]:
            outgoing, beside = (CudaStream(torch.cuda.Stream(device)) for _ in range(2))
            self._senders[other] = Sender(channels.ring(stage, other, memory_of)), outgoing
            self._receivers[other] = Receiver(channels.ring(other, stage, memory_of), beside)

    def send(self, data: Tensor, stage: int) -> Copied:
        """Post bytes [n] to a stage, n > 0, once the current stream has them."""
        if loan_of(data) is not None:
            data = data.clone()  # whoever lent the memory must not have to wait for this to leave
        sender, queue = self._senders[stage]
        sender.send(data.data_ptr(), data.numel(), self._streams.current().mark(), queue)
        return Copied(queue.mark(), data)

    def receive(self, kinds: Sequence[TensorKind], stage: int, behind: int | None) -> list[Inbound]:
        """Post the receipt of the next message of a stage, tensors of at least one byte each; behind: see Transport."""
        receiver = self._receivers[stage]
        receiver.end_loans(self._streams.current())
        pieces = sum(-(-kind.nbytes // self._slot_bytes) for kind in kinds)
        self._most_pieces[stage] = most = max(pieces, self._most_pieces[stage])
        # The slot's next message, and the one before that, are posted when this one's tensors are gone.
        stays = self._in_place and behind is not None and (behind + 2) * most <= self._num_slots
        return [Inbound(receiver, kind, self._streams, stays and kind.nbytes <= self._slot_bytes) for kind in kinds]


def pipeline_channels(num_stages: int, in_place: bool = False) -> Channels:
    """Between the neighbours of a pipeline, its ends included. in_place: for messages that may stay."""
    peers = [sorted({(s - 1) % num_stages, (s + 1) % num_stages} - {s}) for s in range(num_stages)]
    return Channels(peers, *(_STAYING if in_place else _COPIED))


def open_peer_copies(
    groups: ProcessGroups, device: torch.device, by_kernel: bool = False, in_place: bool = False
) -> PeerCopies | None:
    """The channels of this rank's pipeline, see open_channels.

    by_kernel: see open_message_wait; in_place: what is received may stay in its slot.
    """
    channels = pipeline_channels(groups.pipe.size, in_place)
    shared = open_channels(groups, "pipe", channels, device)
    if shared is None:
        return None
    waits = open_message_wait(device, by_kernel)
    return PeerCopies(groups.coordinate("pipe"), channels, shared.of, device, waits, in_place)
