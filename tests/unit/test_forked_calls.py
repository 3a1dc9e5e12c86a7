"""Calls in a forked process: results, errors, work ahead, and a function that can't be sent."""

import os
from collections.abc import Iterable

import pytest

from parallel3d.costs.forked import ForkedCalls
from parallel3d.errors import PartitionError


class Numbered:
    """Returns (key, how many calls were begun before, process)."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, key: int) -> tuple[int, int, int]:
        if key < 0:
            raise PartitionError(f"{key} can't be split")
        self.calls += 1
        return key, self.calls - 1, os.getpid()

    def following(self, key: int) -> Iterable[int]:
        return [key + 100] if key == 1 else []


class Unsendable(Numbered):
    def __reduce__(self) -> str:
        return "no module has this name"


def test_another_process_works_ahead_and_its_results_and_errors_arrive():
    process = ForkedCalls(["parallel3d.errors"])
    assert not process.begin(Unsendable(), [])
    assert process.begin(Numbered(), [1])
    found = {key: process(key) for key in (1, 7, 101, 1)}
    assert [found[key][0] for key in (1, 7, 101)] == [1, 7, 101]
    assert sorted(calls for _, calls, _ in found.values()) == [0, 1, 2]  # each was called once, the first ahead
    assert found[1][1] == 0
    assert {pid for *_, pid in found.values()} != {os.getpid()}
    with pytest.raises(PartitionError, match="-3 can't be split"):
        process(-3)


def test_a_process_that_has_ended_gives_nothing():
    process = ForkedCalls()
    process._connection.send_bytes(b"no pickle")
    assert process(1) is None
