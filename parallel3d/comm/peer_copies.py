"""Messages between stages of one host as copies into the receiver's memory: no multiprocessor, no host.

A channel is a ring of slots in the receiver's symmetric memory. The sender's stream waits until a slot is free, copies a
piece into it by the copy engine and writes a count beside it; the receiver's stream waits for the count, copies the slot
out and writes back how many are free again. Waits and counts are the driver's stream memory operations, so compute kernels
share the device with nothing, where NCCL's spin on multiprocessors until their message comes.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from parallel3d.comm.collectives import all_gather_integers, all_gather_object
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.symmetric import map_memory, reaches
from parallel3d.errors import CommunicationError

SLOT_BYTES = 16 * 2**20
NUM_SLOTS = 4
_FLAGS = 16  # int32 words ahead of the rings: counts of what arrived, then of what is free again
_HEADER_BYTES = 4096  # that the flags take, so that the slots are aligned
_QUEUES = 16
_GREATER_OR_EQUAL = 0  # CU_STREAM_WAIT_VALUE_GEQ: of the difference as a signed number, so that counts may wrap around


class Stream(Protocol):
    """A queue of work, in order."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """target = source, as many bytes."""

    def wait_for(self, flag: Tensor, count: int) -> None:
        """Go on when the flag, of one int32, has reached the count."""

    def write(self, flag: Tensor, count: int) -> None:
        """flag = count, once all before it is done."""


@dataclass(frozen=True)
class Ring:
    """One end of a channel: the slots in the receiver's memory, and where each end counts for the other.

    arrived: pieces written, in the receiver's memory; freed: pieces read, in the sender's.
    """

    slots: Sequence[Tensor]
    arrived: Tensor
    freed: Tensor


class Sender:
    """The end that copies into a ring."""

    def __init__(self, ring: Ring, stream: Stream):
        self._ring, self._stream, self._count = ring, stream, 0

    def send(self, data: Tensor) -> None:
        """data: bytes, [n] with n > 0, in as many pieces as it takes."""
        slots = self._ring.slots
        for piece in data.split(slots[0].numel()):
            if self._count >= len(slots):
                self._stream.wait_for(self._ring.freed, _int32(self._count - len(slots) + 1))
            self._stream.copy(slots[self._count % len(slots)][: piece.numel()], piece)
            self._count += 1
            self._stream.write(self._ring.arrived, _int32(self._count))


class Receiver:
    """The end that copies out of a ring."""

    def __init__(self, ring: Ring, stream: Stream):
        self._ring, self._stream, self._count = ring, stream, 0

    def receive(self, data: Tensor) -> None:
        """Fill data, bytes [n] with n > 0, with what was sent as so many bytes."""
        slots = self._ring.slots
        for piece in data.split(slots[0].numel()):
            slot = slots[self._count % len(slots)][: piece.numel()]
            self._count += 1
            self._stream.wait_for(self._ring.arrived, _int32(self._count))
            self._stream.copy(piece, slot)
            self._stream.write(self._ring.freed, _int32(self._count))


def _int32(count: int) -> int:
    """The count as the flags hold it."""
    return (count + 2**31) % 2**32 - 2**31


class CudaStream:
    """A stream of this process's device, with the driver's stream memory operations."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)
        self._driver = _driver()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See Stream."""
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)

    def wait_for(self, flag: Tensor, count: int) -> None:
        """See Stream."""
        self._call("cuStreamWaitValue32_v2", flag, count, _GREATER_OR_EQUAL)

    def write(self, flag: Tensor, count: int) -> None:
        """See Stream."""
        self._call("cuStreamWriteValue32_v2", flag, count, 0)

    def _call(self, name: str, flag: Tensor, count: int, option: int) -> None:
        handle, address = ctypes.c_void_p(self.stream.cuda_stream), ctypes.c_uint64(flag.data_ptr())
        status = getattr(self._driver, name)(handle, address, ctypes.c_uint32(count % 2**32), ctypes.c_uint(option))
        if status:
            raise CommunicationError(
                f"{name} failed with CUDA error {status}; set pipeline.peer_copies to false to send through NCCL"
            )


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _has_driver() -> bool:
    try:
        _driver()
    except OSError:
        return False
    return True


@dataclass
class Copied:
    """A Work: a copy under way, and what its memory must outlive."""

    event: torch.cuda.Event
    data: Tensor

    def wait(self) -> None:
        """Let the current stream go on when the copy is done."""
        self.event.wait()

    def is_completed(self) -> bool:
        """Whether it is done, without waiting."""
        return self.event.query()


class PeerCopies:
    """This rank's channels from and to its neighbours in a pipeline whose ranks share a host.

    Made by `open_peer_copies`. The streams of a channel wait for the stream that posts, as NCCL's do.
    """

    def __init__(self, stage: int, num_stages: int, buffer_of: Callable[[int], Tensor], device: torch.device):
        self._senders: dict[int, tuple[Sender, CudaStream]] = {}
        self._receivers: dict[int, tuple[Receiver, CudaStream]] = {}
        for other in neighbours(stage, num_stages):
            outgoing, incoming = CudaStream(device), CudaStream(device)
            self._senders[other] = Sender(ring_of(stage, other, num_stages, buffer_of), outgoing), outgoing
            self._receivers[other] = Receiver(ring_of(other, stage, num_stages, buffer_of), incoming), incoming

    def reaches(self, stage: int) -> bool:
        """Whether there are channels to and from this stage."""
        return stage in self._senders

    def send(self, data: Tensor, stage: int) -> Copied:
        """Post bytes [n] to a stage, n > 0."""
        sender, queue = self._senders[stage]
        queue.stream.wait_stream(torch.cuda.current_stream())
        sender.send(data)
        return Copied(queue.stream.record_event(), data)

    def receive(self, data: Tensor, stage: int) -> Copied:
        """Post the receipt of the next bytes [n] of a stage."""
        receiver, queue = self._receivers[stage]
        # The memory of `data` may be in use until here.
        queue.stream.wait_stream(torch.cuda.current_stream())
        receiver.receive(data)
        # The copy comes when the sender does, even if a failure has made everyone here forget the memory.
        data.record_stream(queue.stream)
        return Copied(queue.stream.record_event(), data)


def neighbours(stage: int, num_stages: int) -> list[int]:
    """The stages that a stage may send to, and from which it may receive."""
    return sorted({(stage - 1) % num_stages, (stage + 1) % num_stages} - {stage})


def ring_of(source: int, target: int, num_stages: int, buffer_of: Callable[[int], Tensor]) -> Ring:
    """The channel from one stage to another. buffer_of: stage -> its bytes, `buffer_bytes` long."""
    into, out = neighbours(target, num_stages).index(source), neighbours(source, num_stages).index(target)
    memory = buffer_of(target)
    start = _HEADER_BYTES + into * NUM_SLOTS * SLOT_BYTES
    slots = memory[start : start + NUM_SLOTS * SLOT_BYTES].split(SLOT_BYTES)
    flags = memory[: 4 * _FLAGS].view(torch.int32)
    freed = buffer_of(source)[: 4 * _FLAGS].view(torch.int32)[_FLAGS // 2 + out :]
    return Ring(slots, flags[into : into + 1], freed[:1])


def buffer_bytes(num_stages: int) -> int:
    """The symmetric memory of each rank: flags, and a ring for each neighbour."""
    return _HEADER_BYTES + len(neighbours(0, num_stages)) * NUM_SLOTS * SLOT_BYTES


def open_peer_copies(groups: ProcessGroups, device: torch.device) -> PeerCopies | None:
    """The channels of this rank's pipeline; None on every rank where on any they can't be had. Collective over the world.

    They need CUDA devices of one host that reach each other's memory.
    """
    found = None
    if _may_share(groups, device):
        found = map_memory(groups.pipe, groups.control, device, buffer_bytes(groups.pipe.size))
    everywhere = all_gather_integers([int(found is not None)], groups.control)
    if found is None or not all(row[0] for row in everywhere):
        return None
    buffer_of = found.of
    buffer_of(groups.coordinate("pipe"))[:_HEADER_BYTES].zero_()
    torch.cuda.synchronize()
    all_gather_integers([0], groups.control)  # nobody writes into flags that are not cleared yet
    return PeerCopies(groups.coordinate("pipe"), groups.pipe.size, buffer_of, device)


def _may_share(groups: ProcessGroups, device: torch.device) -> bool:
    """Whether all ranks of every pipeline are on one host with devices that reach each other; the same on every rank."""
    mine = (socket.gethostname(), device.index if device.type == "cuda" else None, groups.backend)
    everyone = all_gather_object(mine, groups.control)
    pipelines = groups.topology.get_axis_comm_lists("pipe")
    for pipeline in pipelines:
        places = [everyone[rank] for rank in pipeline]
        if len({host for host, _, _ in places}) > 1 or any(index is None for _, index, _ in places):
            return False
    if groups.backend != "nccl" or groups.pipe.size == 1:
        return False
    # Streams that wait must not hold up others: each needs a hardware queue of its own.
    apart = int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")) >= _QUEUES
    reached = apart and _has_driver() and reaches(device, [everyone[rank][1] for rank in groups.pipe.ranks])
    return all(row[0] for row in all_gather_integers([int(reached)], groups.control))
