"""CUDA streams with the driver's copies and stream memory operations."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from parallel3d.comm.peer.symmetric import Unavailable, check_device
from parallel3d.errors import CommunicationError

_QUEUES = 16
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_GREATER_OR_EQUAL = 0  # CU_STREAM_WAIT_VALUE_GEQ: of the difference as a signed number, so that counts may wrap around


class CudaMark:
    """Mark in a stream's queue: it is done when all work that was queued before it is done.

    unused: events of earlier marks, to use again: creating one costs the host as much as copying a message.
    """

    __slots__ = ("_event", "_handle", "_unused", "stream")

    def __init__(self, stream: torch.cuda.Stream, unused: list[ctypes.c_void_p]):
        self.stream, self._handle, self._unused = stream, stream.cuda_stream, unused
        if unused:
            self._event = unused.pop()
        else:
            self._event = ctypes.c_void_p()
            _check("cuEventCreate", _driver().cuEventCreate(ctypes.byref(self._event), _NO_TIMING))
        _check("cuEventRecord", _driver().cuEventRecord(self._event, self._handle))

    def __del__(self) -> None:
        # A queued wait is for what was recorded until then: the event may be recorded again.
        self._unused.append(self._event)

    def let_wait(self, handle: int) -> None:
        """Let the stream with this handle go on when the mark is done."""
        if handle != self._handle:  # a stream does its own work in order
            _check("cuStreamWaitEvent", _driver().cuStreamWaitEvent(handle, self._event, 0))

    def wait(self) -> None:
        """Let the current stream go on when the mark is done."""
        self.let_wait(current_handle(self.stream.device_index))

    def query(self) -> bool:
        """Return whether the mark is done, without waiting."""
        status = _driver().cuEventQuery(self._event)
        if status != _NOT_READY:
            _check("cuEventQuery", status)
        return bool(status == 0)


def current_handle(device: int) -> int:
    """Return the handle of a device's current stream: making PyTorch's object for it costs the host as much as a kernel."""
    return torch._C._cuda_getCurrentRawStream(device)


class CudaStream:
    """A stream of this process's device, with the driver's copies and stream memory operations. Addresses are integers.

    The driver is called directly: a message takes a dozen calls, which through PyTorch cost the host several times as much.
    """

    def __init__(self, stream: torch.cuda.Stream):
        self.stream = stream
        self._driver, self._handle = _driver(), stream.cuda_stream
        self._unused: list[ctypes.c_void_p] = []

    def mark(self) -> CudaMark:
        """Return a mark that is done when all that is queued now is done."""
        return CudaMark(self.stream, self._unused)

    def follow(self, mark: CudaMark) -> None:
        """Go on when a mark is done."""
        mark.let_wait(self._handle)

    def hold(self, memory: Tensor) -> None:
        """Keep memory from being reused before all that is queued now is done."""
        memory.record_stream(self.stream)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Copy num_bytes between two addresses."""
        _check("cuMemcpyAsync", self._driver.cuMemcpyAsync(target, source, num_bytes, self._handle))

    def wait_for(self, word: int, count: int) -> None:
        """Go on when the int32 at `word` has reached the count."""
        wait = self._driver.cuStreamWaitValue32_v2
        _check("cuStreamWaitValue32", wait(self._handle, word, count % 2**32, _GREATER_OR_EQUAL))

    def write(self, word: int, count: int) -> None:
        """Write the count to the int32 at `word`, once all earlier work is done."""
        _check("cuStreamWriteValue32", self._driver.cuStreamWriteValue32_v2(self._handle, word, count % 2**32, 0))


def _check(name: str, status: int) -> None:
    if status:
        raise CommunicationError(
            f"{name} failed with CUDA error {status}; set peer_copies of pipeline, tensor_parallel and zero_optimization to "
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


@dataclass
class Copied:
    """Work of a copy in progress. data: kept alive until the copy is done."""

    event: CudaMark | torch.cuda.Event
    data: Tensor

    def wait(self) -> None:
        """Let the current stream go on when the copy is done."""
        self.event.wait()

    def is_completed(self) -> bool:
        """Return whether it is done, without waiting."""
        return self.event.query()


class CudaStreams:
    """The current streams of a device, each made once."""

    def __init__(self, device: torch.device):
        self._device = device
        self._known: dict[int, CudaStream] = {}

    def current(self) -> CudaStream:
        """Return PyTorch's current stream."""
        handle = current_handle(self._device.index)
        if handle not in self._known:
            self._known[handle] = CudaStream(torch.cuda.current_stream(self._device))
        return self._known[handle]


def check_copies(device: torch.device | None = None, unset_queues: int = 8) -> Unavailable | None:
    """Return why this process can't copy into the memory of peers, whoever they are, or None.

    - device: the one that this process computes on; by default the first CUDA device.
    - unset_queues: the number of hardware queues where the environment doesn't say; CUDA's own default, but 32 after
      init_distributed.
    """
    if (missing := check_device(device)) is not None:
        return missing
    queues = int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", unset_queues))
    if queues < _QUEUES:
        return Unavailable(
            f"CUDA_DEVICE_MAX_CONNECTIONS is {queues}, so that streams which wait hold up others",
            f"set it to {_QUEUES} or more, or call parallel3d.init_distributed() before CUDA is used",
        )
    try:
        _driver()
    except (OSError, AttributeError):
        return Unavailable("this driver's streams can't wait for memory", "install a later driver")
    return None
