"""Keeps Python's garbage collector away from objects that live as long as the training.

A full collection visits every object of the process: a quarter of a second with PyTorch and its compiler loaded. If it starts
on one rank in the middle of a step, all ranks wait. torchtitan collects on all ranks between steps instead; here the objects
that exist after the first steps are frozen (gc.freeze), so that a later collection has little to visit.
"""

from __future__ import annotations

import gc

# By then everything is loaded and compiled, also with schedule "auto", which first runs whole backwards in its fourth step.
STEPS = (2, 4)


class GarbageFreezer:
    """Freezes the objects that exist after certain steps, if enabled.

    A frozen object that later becomes garbage in a cycle is collected when the next freezer is made.
    """

    def __init__(self, enabled: bool):
        self._enabled, self._steps = enabled, 0
        if enabled and gc.get_freeze_count():
            gc.unfreeze()
            gc.collect()

    def after_step(self) -> None:
        """Count a step; to be called after each."""
        self._steps += 1
        if self._enabled and self._steps in STEPS:
            gc.collect()
            gc.freeze()
