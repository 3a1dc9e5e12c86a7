"""Point-to-point transports: post a send, post a receive, wait on the stream.

A transport moves tensors between neighbours of one pipeline, named by their stages. Each ordered pair of stages is one FIFO
channel. Tensors are sent as bytes, so every dtype works.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.comm.collectives import DONE, Awaited, Work, as_bytes, receive_bytes
from parallel3d.comm.environment import local_device
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.peer.copies import open_peer_copies
from parallel3d.comm.values import dump, load

_HEADER_TAG, _HOST_TAG = 1, 2
# A receive posted early spins on its multiprocessors until its message comes, while other kernels compute: with NCCL's own
# choice, 1F1B of the 7b model on 4 stages took 4% longer. A single CTA is too slow for the message itself.
_CHANNEL_CTAS = 2


class Incoming(Work, Protocol):
    """Work of receiving a tensor."""

    def wait(self) -> Tensor:
        """Return the tensor, for what the current stream does from now on; to be called once."""


@dataclass
class _Buffered:
    """A receive into a buffer, or into host memory (`staging`) that is then copied there."""

    work: Work
    buffer: Tensor
    staging: Tensor | None = None

    def wait(self) -> Tensor:
        self.work.wait()
        if self.staging is not None:
            as_bytes(self.buffer).copy_(self.staging)
        return self.buffer

    def is_completed(self) -> bool:
        return self.work.is_completed()


class Transport:
    """Point-to-point communication over gloo or NCCL, as the executor uses it.

    Under NCCL each channel has its own communicator, so that directions don't wait for each other.

    peer_copies: if the ranks of each pipeline share a host, tensors are copied between devices instead (peer/copies.py).

    gloo reports that a send is complete only when it is waited for, so under gloo sent tensors are held until `finish`.
    """

    def __init__(self, groups: ProcessGroups, peer_copies: bool = True):
        self._groups = groups
        self._channels: dict[tuple[int, int], dist.ProcessGroup] = {}
        self._sent: deque[tuple[Work, Tensor]] = deque()
        self._stage = groups.coordinate("pipe")
        self._by_host = False
        self._copies = open_peer_copies(groups, local_device()) if peer_copies else None
        if groups.backend == "nccl" and groups.pipe.size > 1 and self._copies is None:
            self._open_channels()

    def _open_channels(self) -> None:
        """Make and warm up a communicator per ordered pair of neighbours, in the same order on all ranks.

        NCCL connects at the first use and blocks the host meanwhile: better now than in the middle of a step.
        """
        # torch warns that point-to-point on a shared communicator is serialized; these are not shared.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
        size = self._groups.pipe.size
        neighbours = [(s, (s + 1) % size) for s in range(size)]
        for source, target in dict.fromkeys([*neighbours, *((t, s) for s, t in neighbours)]):
            group = self._groups.across_stages((source, target), max_ctas=_CHANNEL_CTAS)
            if self._stage in (source, target):
                assert group.handle is not None
                self._channels[source, target] = group.handle
                probe = torch.zeros(1, device="cuda")
                if self._stage == source:
                    dist.send(probe, self._groups.pipe.ranks[target], group=group.handle)
                else:
                    dist.recv(probe, self._groups.pipe.ranks[source], group=group.handle)
            torch.cuda.synchronize()

    def send(self, tensors: Sequence[Tensor], stage: int) -> None:
        """Post tensors to `stage`; never blocks. They are kept alive here until they are sent."""
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        target = self._groups.pipe.ranks[stage]
        message = [as_bytes(tensor.detach().contiguous()) for tensor in tensors if tensor.numel()]
        works: Sequence[Work | None]
        if self._copies is not None and not self._by_host:
            works = self._copies.send(message, stage)
        else:
            message = [data.cpu() for data in message] if self._by_host else message
            group, tag = self._channel(self._stage, stage)
            works = [dist.isend(data, target, group=group, tag=tag) for data in message]
        for work, data in zip(works, message, strict=True):
            self._keep(work, data, target)

    def receive(self, buffers: Sequence[Tensor], stage: int) -> Sequence[Incoming]:
        """Post the receive of the next message of the channel from `stage` into these buffers, contiguous."""
        source = self._groups.pipe.ranks[stage]
        waiting = self._groups.pipe.waiting(f"a message of rank {source}", (source,))
        full = [buffer for buffer in buffers if buffer.nbytes]
        if self._copies is not None and not self._by_host:
            inbound: Iterator[Incoming] = iter(self._copies.receive(full, stage))
        else:
            inbound = (self._receive_by_backend(buffer, stage) for buffer in full)
        return [Awaited(next(inbound), waiting) if buffer.nbytes else _Buffered(DONE, buffer) for buffer in buffers]

    def _receive_by_backend(self, buffer: Tensor, stage: int) -> _Buffered:
        group, tag = self._channel(stage, self._stage)
        staging = torch.empty(buffer.nbytes, dtype=torch.uint8) if self._by_host else None
        data = as_bytes(buffer) if staging is None else staging
        work = dist.irecv(data, self._groups.pipe.ranks[stage], group=group, tag=tag)
        assert work is not None
        return _Buffered(work, buffer, staging)

    def _channel(self, source: int, target: int) -> tuple[dist.ProcessGroup | None, int]:
        """Return the group and the tag of messages between two stages."""
        if self._by_host:
            return self._groups.control.handle, _HOST_TAG
        return self._channels.get((source, target), self._groups.pipe.handle), 0

    def use_host(self, use: bool) -> None:
        """Send tensors through host memory from now on, or no longer; the same on both ends of every message."""
        self._by_host = use

    def send_header(self, header: Any, stage: int) -> None:
        """Send a value (comm/values.py) on the host; never blocks."""
        payload = torch.frombuffer(bytearray(dump(header)), dtype=torch.uint8)
        target = self._groups.pipe.ranks[stage]
        for data in (as_bytes(torch.tensor([payload.numel()])), payload):
            self._keep(dist.isend(data, target, group=self._groups.control.handle, tag=_HEADER_TAG), data, target)

    def _keep(self, work: Work | None, data: Tensor, target: int) -> None:
        """Keep data alive until its send to a rank is complete."""
        assert work is not None
        waiting = self._groups.pipe.waiting(f"rank {target} to take a message", (target,))
        self._sent.append((Awaited(work, waiting), data))

    def receive_header(self, stage: int) -> Any:
        """Return the next value that `stage` sent by send_header; blocks the host."""
        source, group = self._groups.pipe.ranks[stage], self._groups.control
        size = receive_bytes((1,), torch.int64, source, group, _HEADER_TAG)
        payload = receive_bytes((int(size),), torch.uint8, source, group, _HEADER_TAG)
        return load(payload.numpy().tobytes())

    def finish(self) -> None:
        """Wait until all posted messages have been sent."""
        while self._sent:
            self._sent.popleft()[0].wait()
