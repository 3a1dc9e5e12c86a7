"""What time it is on a device: marks made without waiting, and read later, all at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks are made in order and compared with marks of the same clock alone."""

    def mark(self) -> Any:
        """Now. Waits for nothing."""

    def read(self, marks: Sequence[Any]) -> list[float]:
        """When each was made, in seconds of `time.monotonic`, which ranks of one host share; may wait for the device once."""


class HostClock:
    """A mark is the time itself."""

    def mark(self) -> float:
        """See Clock."""
        return time.monotonic()

    def read(self, marks: Sequence[float]) -> list[float]:
        """See Clock."""
        return list(marks)


class CudaClock:
    """A mark is an event: the time at which the current stream of `device` reaches it."""

    def __init__(self, device: torch.device):
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """See Clock."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def read(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        """See Clock."""
        if not marks:
            return []
        # The device's time is tied to the host's when it is read: nothing needs to wait before.
        now_on_device = self.mark()
        now_on_device.synchronize()
        now = time.monotonic()
        # Milliseconds come in single precision: times between marks are exact to less the nearer the marks are.
        first = now - marks[0].elapsed_time(now_on_device) / 1e3
        return [first + marks[0].elapsed_time(mark) / 1e3 for mark in marks]


def clock_of(device: torch.device) -> Clock:
    """The clock by which work on `device` is timed."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
