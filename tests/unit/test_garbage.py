"""Objects that exist after the first steps are hidden from the collector, until the next training.

The checks run in Pythons of their own: with torch imported a collection visits a million objects.
"""

from __future__ import annotations

import gc
import runpy
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

GARBAGE = Path(__file__).parents[2] / "parallel3d" / "engine" / "garbage.py"  # imports nothing of the package


class Node:
    """In a cycle with itself."""

    def __init__(self) -> None:
        self.me = self


def num_frozen() -> int:
    """Return the number of objects hidden from the collector, but those that Python itself hides since 3.12."""
    return max(gc.get_freeze_count() - 1000, 0)


def freeze_what_stands(GarbageFreezer: Any, STEPS: Any, **_: Any) -> None:
    freezer = GarbageFreezer(True)
    counts = []
    for _step in range(STEPS[-1] + 2):
        freezer.after_step()
        counts.append(num_frozen())
    assert [count > 0 for count in counts] == [step >= STEPS[0] for step in range(1, len(counts) + 1)]
    assert counts[STEPS[0] - 1] > 1000
    assert counts[-1] <= counts[STEPS[-1] - 1]  # what is frozen may die
    later = weakref.ref(Node())
    gc.collect()
    assert later() is None


def train_again(GarbageFreezer: Any, STEPS: Any, **_: Any) -> None:
    freezer, node = GarbageFreezer(True), Node()
    for _step in range(STEPS[-1]):
        freezer.after_step()
    reference = weakref.ref(node)
    del node
    gc.collect()
    assert reference() is not None
    GarbageFreezer(True)
    assert reference() is None
    assert num_frozen() == 0


def do_not_ask(GarbageFreezer: Any, STEPS: Any, **_: Any) -> None:
    freezer = GarbageFreezer(False)
    for _step in range(STEPS[-1]):
        freezer.after_step()
    assert num_frozen() == 0
    gc.freeze()
    GarbageFreezer(False)
    assert num_frozen() > 0, "somebody else's"
    GarbageFreezer(True)
    assert num_frozen() == 0


def run_alone(check: Callable[..., None]) -> None:
    done = subprocess.run([sys.executable, __file__, check.__name__], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_stands_is_frozen_after_the_first_steps_and_what_comes_later_is_not() -> None:
    run_alone(freeze_what_stands)


def test_the_next_training_collects_what_the_last_one_left() -> None:
    run_alone(train_again)


def test_nothing_is_frozen_unless_asked_for() -> None:
    run_alone(do_not_ask)


if __name__ == "__main__":
    globals()[sys.argv[1]](**runpy.run_path(str(GARBAGE)))
