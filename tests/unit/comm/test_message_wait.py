"""Who waits for messages: a kernel where it is asked for and can be had, else the driver, whose errors have a remedy."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from parallel3d.comm.peer import streams
from parallel3d.comm.peer.message_wait import open_message_wait
from parallel3d.comm.peer.streams import CudaStream
from parallel3d.errors import CommunicationError


class Driver:
    """In libcuda's place: notes its calls, and answers each with the status that it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.status = 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append((name, *arguments))
            return self.status

        return call


class Stream:
    cuda_stream = 42


class Waits:
    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []

    def wait(self, stream: int, word: int, count: int) -> None:
        self.calls.append((stream, word, count))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(streams, "_driver", lambda: found)
    return found


def test_the_driver_waits_writes_and_copies_on_the_stream(driver: Driver) -> None:
    stream: Any = Stream()
    queue = CudaStream(stream)
    del driver.calls[:]
    queue.wait_for(1000, 3)
    queue.write(1004, -1)
    queue.copy(2000, 3000, 64)
    assert driver.calls == [
        ("cuStreamWaitValue32_v2", 42, 1000, 3, 0),
        ("cuStreamWriteValue32_v2", 42, 1004, 2**32 - 1, 0),
        ("cuMemcpyAsync", 2000, 3000, 64, 42),
    ]


def test_a_kernel_waits_in_the_drivers_place(driver: Driver) -> None:
    stream: Any = Stream()
    waits: Any = Waits()
    queue = CudaStream(stream, waits)
    del driver.calls[:]
    queue.wait_for(1000, 3)
    assert waits.calls == [(42, 1000, 3)]
    assert driver.calls == []


def test_an_error_of_the_driver_says_what_turns_it_off(driver: Driver) -> None:
    stream: Any = Stream()
    queue = CudaStream(stream)
    driver.status = 201
    with pytest.raises(CommunicationError, match=r"cuMemcpyAsync failed with CUDA error 201; set peer_copies"):
        queue.copy(1, 2, 3)


def test_without_cuda_one_warning_says_that_the_driver_waits() -> None:
    device = torch.device("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_message_wait(device, asked=False) is None
    with pytest.warns(UserWarning, match=r"kernels.message_wait: .*CUDA.*; the driver waits for messages instead"):
        assert open_message_wait(device, asked=True) is None
