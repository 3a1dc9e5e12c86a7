"""Marks on a stream, read later on the host's clock."""

from __future__ import annotations

import time

import pytest
import torch

from parallel3d.clock import CudaClock


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_marks_lie_in_order_within_the_hosts_time():
    clock = CudaClock(torch.device("cuda", torch.cuda.current_device()))
    torch.cuda.synchronize()
    begin = time.monotonic()
    first = clock.mark()
    torch.cuda._sleep(10_000_000)
    second = clock.mark()
    assert not second.query(), "a mark waits for nothing"
    torch.cuda._sleep(10_000_000)
    start, middle, end = clock.read([first, second, clock.mark()])
    assert begin - 1e-3 < start < middle < end < time.monotonic() + 1e-3
    assert middle - start == pytest.approx(end - middle, rel=0.5)
    assert clock.read([]) == []


class _OnAnotherStream:
    """A work such as NCCL's: `wait` lets the current stream wait for another one's."""

    def __init__(self, cycles: int):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
            self._end = torch.cuda.Event()
            self._end.record()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._end)

    def then(self, call: object) -> object:
        raise AssertionError("on a device no thread waits")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_end_of_a_collective_is_marked_beside_the_stream_that_goes_on():
    clock = CudaClock(torch.device("cuda", torch.cuda.current_device()))
    begin = clock.mark()
    short = clock.mark_after(_OnAnotherStream(20_000_000))
    long = clock.mark_after(_OnAnotherStream(60_000_000))
    beside = clock.mark()
    assert not long.query(), "a mark waits for nothing"
    start, going_on, first, second = clock.read([begin, beside, short, long])
    assert going_on - start < 0.5 * (first - start), "the current stream has not waited"
    assert second - start == pytest.approx(3 * (first - start), rel=0.5)
