"""Objects that exist after the first steps are hidden from the collector, until the next training."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from parallel3d.engine.garbage import STEPS, GarbageFreezer


class Node:
    """In a cycle with itself."""

    def __init__(self) -> None:
        self.me = self


def num_frozen() -> int:
    """Return the number of objects hidden from the collector, but those that Python itself hides since 3.12."""
    return max(gc.get_freeze_count() - 1000, 0)


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.freeze()  # as it was: other tests need visit nothing that was imported


def test_what_stands_is_frozen_after_the_first_steps_and_what_comes_later_is_not() -> None:
    freezer = GarbageFreezer(True)
    counts = []
    for _ in range(STEPS[-1] + 2):
        freezer.after_step()
        counts.append(num_frozen())
    assert [count > 0 for count in counts] == [step >= STEPS[0] for step in range(1, len(counts) + 1)]
    assert counts[STEPS[0] - 1] > 1000
    assert counts[-1] <= counts[STEPS[-1] - 1]  # what is frozen may die
    later = weakref.ref(Node())
    gc.collect()
    assert later() is None


def test_the_next_training_collects_what_the_last_one_left() -> None:
    freezer, node = GarbageFreezer(True), Node()
    for _ in range(STEPS[-1]):
        freezer.after_step()
    reference = weakref.ref(node)
    del node
    gc.collect()
    assert reference() is not None
    GarbageFreezer(True)
    assert reference() is None
    assert num_frozen() == 0


def test_nothing_is_frozen_unless_asked_for() -> None:
    freezer = GarbageFreezer(False)
    for _ in range(STEPS[-1]):
        freezer.after_step()
    assert num_frozen() == 0
    gc.freeze()
    GarbageFreezer(False)
    assert num_frozen() > 0, "somebody else's"
    GarbageFreezer(True)
    assert num_frozen() == 0
