"""Messages between stages of a pipeline on one host, as copies into the receiver's memory (rings.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.obstacles import Obstacle
from parallel3d.comm.peer.buffers import TensorKind
from parallel3d.comm.peer.channels import Channels, open_channels
from parallel3d.comm.peer.rings import Receiver, Receiving, Sender
from parallel3d.comm.peer.streams import Copied, CudaStream, CudaStreams, Stream, Streams

_NUM_SLOTS, _SLOT_BYTES = 4, 16 * 2**20


class PeerCopies:
    """This rank's channels from and to its neighbours in a pipeline whose ranks share a host. Made by `open_peer_copies`.

    new_stream: makes a stream that work may be added to.
    """

    def __init__(
        self,
        stage: int,
        channels: Channels,
        memory_of: Callable[[int], Tensor],
        streams: Streams,
        new_stream: Callable[[], Stream],
    ):
        peers = channels.peers[stage]
        self._streams = streams
        self._senders = {other: Sender(channels.ring(stage, other, memory_of)) for other in peers}
        self._receivers = {other: Receiver(channels.ring(other, stage, memory_of), new_stream()) for other in peers}
        self._outgoing = {other: new_stream() for other in peers}

    def send(self, message: Sequence[Tensor], stage: int) -> list[Copied]:
        """Post tensors of bytes [n], n > 0, to a stage, once the current stream has computed them."""
        queue, posted = self._outgoing[stage], self._streams.current().mark()
        works = []
        for data in message:
            self._senders[stage].send(data.data_ptr(), data.numel(), posted, queue)
            works.append(Copied(queue.mark(), data))
        return works

    def receive(self, kinds: Sequence[TensorKind], stage: int) -> list[Receiving]:
        """Post the receipt of the next message of a stage, tensors of at least one byte each."""
        receiver = self._receivers[stage]
        return [
            Receiving(receiver.expect(kind.empty(), self._streams.current().mark()), self._streams) for kind in kinds
        ]


def pipeline_channels(num_stages: int) -> Channels:
    """The channels between the neighbours of a pipeline, between its last and first stage included."""
    peers = [sorted({(s - 1) % num_stages, (s + 1) % num_stages} - {s}) for s in range(num_stages)]
    return Channels(peers, _NUM_SLOTS, _SLOT_BYTES)


def open_peer_copies(groups: ProcessGroups, device: torch.device) -> PeerCopies | None:
    """The channels of this rank's pipeline; None on every rank if any rank can't have them, or if there is one stage.

    Collective over the world.
    """
    size, stage = groups.pipe.size, groups.coordinate("pipe")
    if size == 1:
        return None
    channels = pipeline_channels(size)
    shared = open_channels(groups, "pipe", channels, device, "stages")
    if isinstance(shared, Obstacle):
        return None
    return PeerCopies(stage, channels, shared.of, CudaStreams(device), lambda: CudaStream(torch.cuda.Stream(device)))
