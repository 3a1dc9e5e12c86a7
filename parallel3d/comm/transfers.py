"""Copies between devices and host memory, in both directions at once, which overlap with computations."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

Event = torch.cuda.Event | None  # None: nothing to wait for


class Copy(NamedTuple):
    """Copy in progress. A stream that has waited for `done` may read `tensor`."""

    tensor: Tensor
    done: Event


class Transfers:
    """Copies between CUDA devices and host memory, on a stream for each direction besides the current one.

    Copies overlap with computations only from and to pinned memory. Between tensors on the CPU a copy is done at once.
    """

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}

    def leaves(self, tensor: Tensor) -> bool:
        """Return whether `to_host` can copy a tensor: a strided tensor on CUDA."""
        return tensor.is_cuda and tensor.layout is torch.strided

    def to_host(self, tensor: Tensor) -> Copy:
        """Start to copy a tensor to new pinned memory; its own memory is free for others when that is done."""
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        done = self.copy(host, tensor, self.now(tensor.device))
        # The allocator must not give this memory away before the copy is done.
        tensor.record_stream(self._streams[tensor.device, "out"])
        return Copy(host, done)

    def to_device(self, copy: Copy, device: torch.device) -> Copy:
        """Start to copy a tensor back to its device, once it has arrived on the host."""
        tensor = torch.empty_like(copy.tensor, device=device)
        done = self.copy(tensor, copy.tensor, self.now(device), copy.done)
        tensor.record_stream(self._streams[device, "back"])  # a prefetched tensor may be dropped unread
        return Copy(tensor, done)

    def copy(self, target: Tensor, source: Tensor, *after: Event) -> Event:
        """Start to copy after these events; return the event of the end. The caller keeps the memory of both until then."""
        device, direction = (target.device, "back") if target.is_cuda else (source.device, "out")
        if device.type != "cuda":
            target.copy_(source)
            return None
        stream = self._stream(device, direction)
        for event in after:
            if event is not None:
                stream.wait_event(event)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    def _stream(self, device: torch.device, direction: str) -> torch.cuda.Stream:
        if (device, direction) not in self._streams:
            self._streams[device, direction] = torch.cuda.Stream(device)
        return self._streams[device, direction]

    def after_copies_to(self, device: torch.device) -> AbstractContextManager[object]:
        """Launch collectives in this context after the copies to the device, but not after its current stream."""
        return torch.cuda.stream(self._stream(device, "back")) if device.type == "cuda" else nullcontext()

    def now(self, device: torch.device) -> Event:
        """Return the event of the end of what is queued on the device's current stream."""
        return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def wait(self, copy: Copy) -> None:
        """Make the current stream wait for a copy to the device."""
        self.wait_for(copy.done, copy.tensor.device)

    def wait_for(self, done: Event, device: torch.device) -> None:
        """Make the device's current stream wait for an event."""
        if done is not None:
            torch.cuda.current_stream(device).wait_event(done)

    def join(self, device: torch.device) -> None:
        """Make the device's current stream wait for all copies that were started."""
        for stream in self._streams.values():
            torch.cuda.current_stream(device).wait_stream(stream)
