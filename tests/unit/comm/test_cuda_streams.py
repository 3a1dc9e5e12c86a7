"""CUDA's streams by a driver that writes down what it is asked for."""

from __future__ import annotations

import ctypes
from typing import Any, cast

import pytest

from parallel3d.comm.peer import streams
from parallel3d.errors import CommunicationError


class FakeDriver:
    """A CUDA driver that notes calls with their integers. Events count from 1. `pending`: the result of a query."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.created = self.pending = 0

    def cuEventCreate(self, event: Any, flags: int) -> int:
        self.created += 1
        event._obj.value = self.created
        return 0

    def cuEventRecord(self, event: ctypes.c_void_p, stream: int) -> int:
        self.calls.append((f"record {event.value}", f"on {stream}"))
        return 0

    def cuStreamWaitEvent(self, stream: int, event: ctypes.c_void_p, flags: int) -> int:
        self.calls.append((f"wait {event.value}", f"on {stream}"))
        return 0

    def cuEventQuery(self, event: ctypes.c_void_p) -> int:
        return self.pending


class FakeStream:
    """A torch.cuda stream that has only a handle."""

    def __init__(self, handle: int):
        self.cuda_stream = handle


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(streams, "_driver", lambda: fake)
    return fake


def test_a_stream_waits_for_the_marks_of_others_alone(driver: FakeDriver) -> None:
    """Its own work is in order."""
    one, two = (streams.CudaStream(cast(Any, FakeStream(handle))) for handle in (7, 8))
    mark = one.mark()
    one.follow(mark)
    two.follow(mark)
    assert driver.calls == [("record 1", "on 7"), ("wait 1", "on 8")]


def test_events_are_used_again_once_their_marks_are_gone(driver: FakeDriver) -> None:
    """And no sooner: a mark that is kept has an event that nobody else records."""
    stream = streams.CudaStream(cast(Any, FakeStream(7)))
    kept = stream.mark()
    for _ in range(5):
        stream.mark()
    assert driver.created == 2
    assert [call for call, _ in driver.calls] == ["record 1"] + ["record 2"] * 5
    del kept
    both = stream.mark(), stream.mark()
    assert driver.created == len(both) == 2


def test_a_mark_says_whether_it_is_done_and_what_went_wrong(driver: FakeDriver) -> None:
    mark = streams.CudaStream(cast(Any, FakeStream(7))).mark()
    assert mark.query()
    driver.pending = 600
    assert not mark.query()
    driver.pending = 700
    with pytest.raises(CommunicationError, match="cuEventQuery failed with CUDA error 700"):
        mark.query()
