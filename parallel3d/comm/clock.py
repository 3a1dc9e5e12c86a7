"""Clocks of devices: marks are made in order and without waiting, and read later, all at once.

Times are seconds of `time.monotonic`, which the ranks of one host share.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch


class Clock:
    """Clock of the host: a mark is the time itself. Marks are compared only with those of the same clock."""

    def mark(self) -> Any:
        """Return a mark of the present time, without waiting."""
        return time.monotonic()

    def read(self, marks: Sequence[Any]) -> list[float]:
        """Return the times of marks; may wait for the device."""
        return list(marks)


class CudaClock(Clock):
    """Clock of a CUDA device: a mark is an event, the time at which the device's current stream reaches it."""

    def __init__(self, device: torch.device):
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """Return a mark of the present time, without waiting."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def read(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        """Return the times of marks; waits for the device."""
        if not marks:
            return []
        # The device's time is related to the host's only here, so that nothing has to wait earlier.
        now_on_device = self.mark()
        now_on_device.synchronize()
        now = time.monotonic()
        # CUDA returns milliseconds in single precision: the nearer two marks are, the more exact is the time between them.
        first = now - marks[0].elapsed_time(now_on_device) / 1e3
        return [first + marks[0].elapsed_time(mark) / 1e3 for mark in marks]


def clock_of(device: torch.device) -> Clock:
    """Return the clock that times work on `device`."""
    return CudaClock(device) if device.type == "cuda" else Clock()
