"""Python's garbage collector, kept from what stands all through a training.

A full collection looks at every object of the process, a quarter of a second with PyTorch and its compiler loaded; where it
comes over a rank in the middle of a step, all ranks wait. torchtitan collects on all ranks between steps instead; here what
is there after the first steps is frozen (gc.freeze), so that a collection has little to look at, whenever it comes.
"""

from __future__ import annotations

import gc

# All is loaded and compiled by then: of the schedule "auto", which tries whole backwards in its fourth step, too.
STEPS = (2, 4)


class Standing:
    """Freezes what there is after some steps on all ranks, if that is asked for.

    What is frozen and later left in a cycle is not collected before `thaw`, which the next one of these begins with.
    """

    def __init__(self, asked: bool):
        self._asked, self._steps = asked, 0
        if asked:
            thaw()

    def after_step(self) -> None:
        """To be called after each step."""
        self._steps += 1
        if self._asked and self._steps in STEPS:
            gc.collect()
            gc.freeze()


def thaw() -> None:
    """Collect what was frozen and is in use no more."""
    if gc.get_freeze_count():
        gc.unfreeze()
        gc.collect()
