"""A collective whose end is noted: waited for once, by whoever is first, and never by who only notes it."""

from __future__ import annotations

import time
from threading import Event, Lock

import pytest
import torch

from parallel3d.clock import HostClock
from parallel3d.comm.collectives import Awaited


class Slow:
    """A work that ends when it is let go, and counts who waits for it, as gloo's reduce-scatters must not be twice."""

    def __init__(self, error: Exception | None = None):
        self.ending, self.error, self.waits, self.lock = Event(), error, 0, Lock()

    def wait(self) -> None:
        with self.lock:
            self.waits += 1
        assert self.ending.wait(20)
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        return False


def test_the_hosts_clock_notes_when_a_work_ends_and_waits_for_nothing():
    clock, slow = HostClock(), Slow()
    work = Awaited(slow, "a reduce-scatter", (0, 1))
    mark = clock.mark_after(work)
    before = clock.mark()
    assert not work.is_completed()
    time.sleep(0.02)
    slow.ending.set()
    work.wait()
    work.wait()
    after = clock.mark()
    assert work.is_completed()
    assert slow.waits == 1
    (ended,) = clock.read([mark])
    assert before + 0.02 <= ended <= after


def test_what_a_work_fails_with_reaches_who_waits():
    slow = Slow(torch.distributed.DistBackendError("connection closed by peer"))
    work = Awaited(slow, "an all-gather", (0, 1))
    mark = HostClock().mark_after(work)
    slow.ending.set()
    for wait in (work.wait, lambda: HostClock().read([mark])):
        with pytest.raises(torch.distributed.DistBackendError, match="connection closed by peer"):
            wait()
