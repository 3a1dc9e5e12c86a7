"""The host's work for an instruction grows neither with the number of steps nor with the length of the list."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "bench"))

from overhead import SETTINGS, Rank

from parallel3d.pipe.messages import Messages


def count_calls(function: Callable[[], object]) -> int:
    """Count the calls of Python and C functions."""
    calls = 0

    def note(_: Any, event: str, __: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.disable()  # finalizers would count, whenever they come
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def held_by(*roots: object) -> int:
    """Count the entries of all Python containers that are reachable from objects of this project."""
    seen: set[int] = set()
    waiting, entries = list(roots), 0
    while waiting:
        found = waiting.pop()
        if id(found) in seen or isinstance(found, (type, nn.Module, Tensor)):
            continue
        seen.add(id(found))
        if isinstance(found, (dict, list, set, tuple)) or type(found).__name__ == "deque":
            entries += len(found)
            waiting += [*found.keys(), *found.values()] if isinstance(found, dict) else list(found)
        elif type(found).__module__.startswith("parallel3d") and hasattr(found, "__dict__"):
            waiting.append(vars(found))
    return entries


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_work_and_what_is_kept_do_not_grow_with_steps(setting: tuple[str, int, int, int]):
    rank = Rank(*setting, num_micro_batches=4)
    rank.step()
    rank.step()
    early = count_calls(rank.step), held_by(rank.executor, rank.messages, rank.reducer)
    for _ in range(297):
        rank.step()
    assert (count_calls(rank.step), held_by(rank.executor, rank.messages, rank.reducer)) == early
    assert early[1] > 0


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_work_of_an_instruction_does_not_grow_with_the_list(setting: tuple[str, int, int, int]):
    calls, lengths = [], []
    for num_micro_batches in (8, 16, 24):
        rank = Rank(*setting, num_micro_batches)
        for _ in range(3):
            rank.step()
        calls.append(count_calls(rank.step))
        lengths.append(len(rank.instructions))
    assert lengths[2] - lengths[1] == lengths[1] - lengths[0] > 0
    assert calls[2] - calls[1] == calls[1] - calls[0]


def test_what_is_measured_and_what_is_subtracted_do_the_same_work():
    rank = Rank("1f1b", 1, 1, 0, num_micro_batches=3)
    rank.step()
    rank.layers_alone()
    (bucket,) = rank.reducer.all_buckets()
    gradient = torch.full_like(rank.alone.layers[0].weight, 3.0)  # of the sum of outputs for three samples of ones
    assert bucket.gradients is not None
    assert torch.equal(bucket.view(bucket.gradients, 0), gradient)
    assert torch.equal(rank.alone.layers[0].weight.grad, gradient)


def test_what_is_in_transit_is_known_while_it_is_tracked():
    rank = Rank("1f1b", 2, 1, 1, num_micro_batches=1)
    messages: Messages = rank.messages
    messages.mark_in_transit([torch.ones(5)])
    with messages.tracking() as in_transit:
        assert in_transit() == 0
        sent, other = torch.ones(100), torch.ones(10)
        messages.mark_in_transit([sent[:50], other])
        assert in_transit() == 440
        del sent
        assert in_transit() == 40
    with messages.tracking() as in_transit:
        assert in_transit() == 0
