"""Calls in a forked process: results, errors, work ahead, and a function that can't be sent."""

import os
from collections.abc import Iterable
from typing import Any

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

    def process(self, key: int) -> int:
        return int(key == 7)


class Unsendable(Numbered):
    def __reduce__(self) -> str:
        return "no module has this name"


class Unloadable(Numbered):
    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def test_other_processes_work_ahead_and_their_results_and_errors_arrive():
    process = ForkedCalls(["parallel3d.errors"])
    assert not process.begin(Unsendable(), [])
    assert process.begin(Numbered(), [1])
    found = {key: process(key) for key in (1, 7, 101, 1)}
    assert [found[key][:2] for key in (1, 7, 101)] == [(1, 0), (7, 0), (101, 1)]  # each was called once
    assert len({os.getpid(), *(pid for *_, pid in found.values())}) == 3
    with pytest.raises(PartitionError, match="-3 can't be split"):
        process(-3)


def test_a_process_that_cannot_load_its_function_gives_nothing():
    process = ForkedCalls()
    assert process.begin(Unloadable(), [])
    assert process(1) is None
