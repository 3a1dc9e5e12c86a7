"""Messages between stages of a pipeline on one host, as copies into the receiver's memory (rings.py)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.message_wait import MessageWait, open_message_wait
from parallel3d.comm.rings import Channels, Receiver, Receiving, Sender, open_channels
from parallel3d.comm.streams import Copied, CudaStream, CudaStreams


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
    ):
        self._streams = CudaStreams(device, waits)
        self._senders: dict[int, tuple[Sender, CudaStream]] = {}
        self._receivers: dict[int, Receiver] = {}
        for other in channels.peers[stage]:
            outgoing, beside = (CudaStream(torch.cuda.Stream(device)) for _ in range(2))
            self._senders[other] = Sender(channels.ring(stage, other, memory_of)), outgoing
            self._receivers[other] = Receiver(channels.ring(other, stage, memory_of), beside)

    def send(self, data: Tensor, stage: int) -> Copied:
        """Post bytes [n] to a stage, n > 0, once the current stream has them."""
        sender, queue = self._senders[stage]
        queue.follow(self._streams.current().mark())
        sender.send(data.data_ptr(), data.numel(), queue)
        return Copied(queue.mark(), data)

    def receive(self, data: Tensor, stage: int) -> Receiving:
        """Post the receipt of the next bytes [n] of a stage."""
        return Receiving(self._receivers[stage], data, self._streams)


def pipeline_channels(num_stages: int) -> Channels:
    """Between the neighbours of a pipeline, its ends included."""
    return Channels([sorted({(s - 1) % num_stages, (s + 1) % num_stages} - {s}) for s in range(num_stages)])


def open_peer_copies(groups: ProcessGroups, device: torch.device, by_kernel: bool = False) -> PeerCopies | None:
    """The channels of this rank's pipeline, see open_channels. by_kernel: see open_message_wait."""
    channels = pipeline_channels(groups.pipe.size)
    shared = open_channels(groups, "pipe", channels, device)
    if shared is None:
        return None
    return PeerCopies(groups.coordinate("pipe"), channels, shared.of, device, open_message_wait(device, by_kernel))
