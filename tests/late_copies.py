"""Copies that run as late as they may, on the CPU: whoever forgets to wait for one computes with stale values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from parallel3d.zero import host_shards, offload


class LateEvent:
    """End of a copy, which runs when something waits for it, after the events that it waits for itself."""

    _lock = RLock()

    def __init__(self, target: Tensor, source: Tensor, after: list[LateEvent | None]):
        self._copy: tuple[Tensor, Tensor] | None = (target, source)
        self._after = after

    def synchronize(self) -> None:
        with self._lock:
            if self._copy is None:
                return
            (target, source), self._copy = self._copy, None
            for event in self._after:
                if event is not None:
                    event.synchronize()
            target.copy_(source)

    def query(self) -> bool:
        return self._copy is None


class LateFill:
    """Fills of new memory of the device, which run when something waits for an event that was recorded after them."""

    pending: ClassVar[list[Tensor]] = []

    def __init__(self) -> None:
        self._before = list(self.pending)

    def synchronize(self) -> None:
        for memory in self._before:
            if any(memory is other for other in self.pending):
                memory.fill_(255)  # NaN of every dtype
        self.pending[:] = [other for other in self.pending if all(other is not memory for memory in self._before)]

    def query(self) -> bool:
        return not self.pending


class LateTransfers:
    """Stands in for comm.transfers.Transfers. Copies of one direction run in order, as on a CUDA stream."""

    def __init__(self) -> None:
        self._last: dict[bool, LateEvent | None] = {}

    def copy(self, target: Tensor, source: Tensor, *after: LateEvent | None) -> LateEvent:
        to_host = not target.untyped_storage().resizable()  # slabs and mapped files are not
        self._last[to_host] = event = LateEvent(target, source, [self._last.get(to_host), *after])
        return event

    def now(self, device: torch.device) -> LateFill:
        return LateFill()

    def wait_for(self, done: LateEvent | None, device: torch.device) -> None:
        if done is not None:
            done.synchronize()
        LateFill().synchronize()  # those that the copies have not waited for come last

    def after_copies_to(self, device: torch.device) -> Any:
        """Run a collective, which the CPU does at once, after all copies to the device."""
        self.wait_for(self._last.get(False), device)
        return torch.no_grad()

    def join(self, device: torch.device) -> None:
        for event in self._last.values():
            self.wait_for(event, device)


@contextmanager
def late_copies() -> Iterator[None]:
    """Let the engines that are made in this context copy, and fill the window's new memory, as late as they may."""
    allocate, bring = offload.OffloadedState._on_device, offload.OffloadedState._bring

    def filled_late(state: offload.OffloadedState, itemsize: int) -> Tensor:
        memory = allocate(state, itemsize)
        LateFill.pending.append(memory)
        return memory

    def bring_early(state: offload.OffloadedState, *args: Any) -> Any:
        # What is allocated elsewhere is used by the stream that fills it.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(offload.OffloadedState, "_on_device", filled_late)
            return bring(state, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload.OffloadedState, "_bring", bring_early)
        for module in (host_shards, offload):
            patch.setattr(module, "Transfers", LateTransfers)
        yield
