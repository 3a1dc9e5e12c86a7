"""When each instruction ran: host clock on the CPU, events on CUDA, with no synchronization while the batch runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from parallel3d.schedule.instructions import Instruction
from parallel3d.schedule.simulate import Span


class InstructionRecorder:
    """Records the spans of one batch on this rank; times are on a clock that ranks of one host share.

    On CUDA a span lasts from when the stream reaches the instruction to when it has passed it.
    """

    def __init__(self, rank: int, device: torch.device):
        self._rank = rank
        self._cuda = device.type == "cuda"
        self._host: list[tuple[Instruction, float, float]] = []
        self._events: list[tuple[Instruction, torch.cuda.Event, torch.cuda.Event]] = []
        if self._cuda:
            # Ties event times to the host clock, which ranks share and their GPUs don't.
            torch.cuda.synchronize(device)
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record()
            torch.cuda.synchronize(device)
        self._zero = time.monotonic()

    @contextmanager
    def __call__(self, instruction: Instruction) -> Iterator[None]:
        """Time what runs inside as `instruction`."""
        if self._cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((instruction, begin, end))
        else:
            start = time.monotonic()
            yield
            self._host.append((instruction, start, time.monotonic()))

    def spans(self) -> list[Span]:
        """What was recorded, in seconds; waits for the device."""
        if not self._cuda:
            return [Span(self._rank, i, start, end) for i, start, end in self._host]
        torch.cuda.synchronize()
        since = self._origin.elapsed_time
        return [
            Span(self._rank, i, self._zero + since(begin) / 1e3, self._zero + since(end) / 1e3)
            for i, begin, end in self._events
        ]
