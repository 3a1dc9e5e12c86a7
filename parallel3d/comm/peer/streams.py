"""Queues of a device's work: the protocol, and CUDA's streams with the driver's copies and stream memory operations."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from parallel3d.comm.obstacles import Obstacle, no_device, no_symmetric_memory
from parallel3d.errors import CommunicationError

_QUEUES = 16
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_GREATER_OR_EQUAL = 0  # CU_STREAM_WAIT_VALUE_GEQ: of the difference as a signed number, so that counts may wrap around


class Stream(Protocol):
    """A queue of work, in order. Addresses are numbers."""

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """So many bytes at target = those at source."""

    def wait_for(self, word: int, count: int) -> None:
        """Go on when the int32 at `word` has reached the count."""

    def write(self, word: int, count: int) -> None:
        """The int32 at `word` = count, once all before it is done."""

    def mark(self) -> Any:
        """What is done when all that is queued now is."""

    def follow(self, mark: Any) -> None:
        """Go on when a stream's mark is done."""

    def hold(self, memory: Tensor) -> None:
        """Keep memory from being used anew before all that is queued now is done."""


class Streams(Protocol):
    """Of those who wait for messages."""

    def current(self) -> Stream:
        """Whose work the caller adds to."""


class CudaMark:
    """What a stream had queued when this was made. Events are used again: to create one costs the host as much as a message's
    copy does.
    """

    __slots__ = ("_event", "_handle", "stream")
    _unused: ClassVar[list[ctypes.c_void_p]] = []

    def __init__(self, stream: torch.cuda.Stream):
        self.stream, self._handle = stream, stream.cuda_stream
        try:
            self._event = self._unused.pop()
        except IndexError:
            self._event = _new_event()
        _check("cuEventRecord", _driver().cuEventRecord(self._event, self._handle))

    def __del__(self) -> None:
        # A wait that is queued is for what was recorded until then: the event may be recorded anew.
        self._unused.append(self._event)

    def let_wait(self, handle: int) -> None:
        """Let the stream of a handle go on when this is done."""
        if handle != self._handle:  # whose stream does its work in order
            _check("cuStreamWaitEvent", _driver().cuStreamWaitEvent(handle, self._event, 0))

    def wait(self) -> None:
        """Let the current stream go on when this is done."""
        self.let_wait(current_handle(self.stream.device_index))

    def query(self) -> bool:
        """Whether this is done, without waiting."""
        status = _driver().cuEventQuery(self._event)
        if status != _NOT_READY:
            _check("cuEventQuery", status)
        return bool(status == 0)


def current_handle(device: int) -> int:
    """Of a device's current stream: to make PyTorch's object for it costs the host as much as a kernel."""
    return torch._C._cuda_getCurrentRawStream(device)


def _new_event() -> ctypes.c_void_p:
    event = ctypes.c_void_p()
    _check("cuEventCreate", _driver().cuEventCreate(ctypes.byref(event), _NO_TIMING))
    return event


class CudaStream:
    """A stream of this process's device, with the driver's copies and stream memory operations.

    The driver is called directly: a message takes a dozen calls, which through PyTorch cost the host several times as much.
    """

    def __init__(self, stream: torch.cuda.Stream):
        self.stream = stream
        self._driver, self._handle = _driver(), stream.cuda_stream

    def mark(self) -> CudaMark:
        """See Stream."""
        return CudaMark(self.stream)

    def follow(self, mark: CudaMark) -> None:
        """See Stream."""
        mark.let_wait(self._handle)

    def hold(self, memory: Tensor) -> None:
        """See Stream."""
        memory.record_stream(self.stream)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """See Stream."""
        _check("cuMemcpyAsync", self._driver.cuMemcpyAsync(target, source, num_bytes, self._handle))

    def wait_for(self, word: int, count: int) -> None:
        """See Stream."""
        wait = self._driver.cuStreamWaitValue32_v2
        _check("cuStreamWaitValue32", wait(self._handle, word, count % 2**32, _GREATER_OR_EQUAL))

    def write(self, word: int, count: int) -> None:
        """See Stream."""
        _check("cuStreamWriteValue32", self._driver.cuStreamWriteValue32_v2(self._handle, word, count % 2**32, 0))


def _check(name: str, status: int) -> None:
    if status:
        raise CommunicationError(
            f"{name} failed with CUDA error {status}; set peer_copies of pipeline and tensor_parallel to "
            "false to send through NCCL"
        )


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    pointer, address, word = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint
    driver.cuEventCreate.argtypes = (pointer, word)
    driver.cuEventRecord.argtypes = (pointer, pointer)
    driver.cuEventQuery.argtypes = (pointer,)
    driver.cuStreamWaitEvent.argtypes = (pointer, pointer, word)
    driver.cuMemcpyAsync.argtypes = (address, address, ctypes.c_size_t, pointer)
    driver.cuStreamWaitValue32_v2.argtypes = driver.cuStreamWriteValue32_v2.argtypes = (pointer, address, word, word)
    return driver


def _no_driver() -> Obstacle | None:
    try:
        _driver()
    except (OSError, AttributeError):
        return Obstacle("this driver's streams can't wait for memory", "install a later driver")
    return None


@dataclass
class Copied:
    """A Work: a copy under way, and what its memory must outlive."""

    event: CudaMark | torch.cuda.Event
    data: Tensor

    def wait(self) -> None:
        """Let the current stream go on when the copy is done."""
        self.event.wait()

    def is_completed(self) -> bool:
        """Whether it is done, without waiting."""
        return self.event.query()


class CudaStreams:
    """The streams of a device that receive messages, by whichever is the current one."""

    def __init__(self, device: torch.device):
        self._device = device
        self._known: dict[int, CudaStream] = {}

    def current(self) -> CudaStream:
        """PyTorch's current stream."""
        handle = current_handle(self._device.index)
        known = self._known.get(handle)
        if known is None:
            known = self._known[handle] = CudaStream(torch.cuda.current_stream(self._device))
        return known


def copy_obstacle(device: torch.device | None = None, unset_queues: int = 8) -> Obstacle | None:
    """What keeps this process from copying into the memory of others, whoever they are.

    device: see local_obstacle; unset_queues: see queue_obstacle.
    """
    return no_device(device) or no_symmetric_memory() or queue_obstacle(unset_queues) or _no_driver()


def queue_obstacle(unset: int = 8) -> Obstacle | None:
    """Where streams that wait would hold up others, for want of a hardware queue of their own.

    unset: how many there are where the environment doesn't say; CUDA's own number, but 32 after init_distributed.
    """
    queues = int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", unset))
    if queues >= _QUEUES:
        return None
    return Obstacle(
        f"CUDA_DEVICE_MAX_CONNECTIONS is {queues}, so that streams which wait hold up others",
        f"set it to {_QUEUES} or more, or call parallel3d.init_distributed() before CUDA is used",
    )
