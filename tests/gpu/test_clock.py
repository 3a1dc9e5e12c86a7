"""Marks on a stream, read later on the host's clock."""

from __future__ import annotations

import time

import pytest
import torch

from parallel3d.comm.clock import CudaClock


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_marks_lie_in_order_within_the_hosts_time():
    clock = CudaClock(torch.device("cuda", torch.cuda.current_device()))
    torch.cuda._sleep(500_000_000)  # an idle device raises its frequency first
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
