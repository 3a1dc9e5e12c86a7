"""Predictions of layouts one by one, in the order of their bounds."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from parallel3d.config.layout import Layout
from parallel3d.planner.predict.costs import Least
from parallel3d.planner.predict.predict import Predictor
from parallel3d.planner.search.found import Found, Refused, find, refuse
from parallel3d.planner.search.space import RECOMPUTED, Space

_SURELY = 0.9  # full, roughly: fits
FEW = 4  # predictions of a shape of which nothing fits


def without_recomputation_together(layout: Layout) -> Layout:
    """What layouts have in common that differ in how many layers they recompute together, if any."""
    return layout.model_copy(update={"recompute": min(1, layout.recompute)})


def _no_slower(layout: Layout) -> list[Layout]:
    """Layouts that take more memory than this one and no more time, for less is reduced, or fewer layers are recomputed at
    once."""
    others = [layout.model_copy(update={"zero": 1})] if layout.zero == 2 else []
    fewer = [n for n in RECOMPUTED if 0 < n < (layout.recompute)]
    return others + [layout.model_copy(update={"recompute": n}) for n in fewer]


class Trials:
    """Predictions of a space's layouts, by one predictor.

    found: all that were predicted, in that order; refused: those that can't fit, see refuse(); bounds: of those that were
    looked at nearer, see without_recomputation_together.
    """

    def __init__(self, predictor: Predictor, space: Space):
        self._predictor, self._space = predictor, space
        self.found: list[Found] = []
        self.refused: list[Refused] = []
        self.bounds: dict[Layout, Least] = {}

    def until_certain(self, bounds: Sequence[tuple[float, int]], best: float = np.inf) -> set[int]:
        """Predict layouts in the order of their bounds until none is below the shortest that fits; which were predicted.

        bounds: (seconds, layout); best: seconds of one that fits already. A layout's bound is first the given one, then the
        predictor's own, which is nearer and takes longer to find.
        """
        done: set[int] = set()
        fitting: set[Layout] = set()
        waiting = [(seconds, n, k, False) for n, (seconds, k) in enumerate(bounds)]
        heapify(waiting)
        while waiting and waiting[0][0] < best:
            least, n, k, is_near = heappop(waiting)
            layout = self._space.layout(k)
            if any(other in fitting for other in _no_slower(layout)):
                continue
            if not is_near:
                heappush(waiting, (self.least_seconds(layout), n, k, True))
                continue
            done.add(k)
            found = self._predict(layout, least)
            if found is None:
                continue
            if found.fits:
                best = min(best, found.outlook.seconds)
            if found.fullness < _SURELY:
                fitting.add(layout)
        return done

    def until_fits(self, order: Sequence[int]) -> set[int]:
        """Predict in order until one fits, at most a few."""
        done: set[int] = set()
        for k in order[:FEW]:
            done.add(k)
            layout = self._space.layout(k)
            found = self._predict(layout, self.least_seconds(layout))
            if found is not None and found.fits:
                break
        return done

    def least_seconds(self, layout: Layout) -> float:
        """The predictor's, the same however many layers are recomputed together."""
        key = without_recomputation_together(layout)
        if key not in self.bounds:
            self.bounds[key] = self._predictor.least(key)
        return self.bounds[key].seconds

    def _predict(self, layout: Layout, least: float) -> Found | None:
        """None for a layout that is refused. least: see Refused."""
        refused = refuse(self._predictor, layout, least)
        if refused is not None:
            self.refused.append(refused)
            return None
        self.found.append(find(self._predictor, layout))
        return self.found[-1]
