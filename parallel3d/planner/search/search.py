"""Search of a space for the layouts with the shortest steps."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from parallel3d.config.layout import Layout
from parallel3d.planner.predict.links import Integers
from parallel3d.planner.predict.predict import Predictor
from parallel3d.planner.search.bounds import Bounds
from parallel3d.planner.search.candidate import (
    WORTH_HALVES,
    Candidate,
    OutOfMemory,
    evaluate,
    fullness_of,
    out_of_memory,
    shape_of,
)
from parallel3d.planner.search.space import RECOMPUTED, Space

_ROOMY = 0.9  # share of the memory below which layers weren't split unevenly to fit
_ALTERNATIVES = 5  # shapes whose likeliest layouts are evaluated, so that there is something to compare with
_LEANER = (0.2, 0.4, 0.6)  # shares of the memory whose likeliest layouts are evaluated
_TRIES = 8  # evaluated layouts of an alternative of which none fits
_QUICK = 512  # stages x stages x chunks of an alternative: its program is made soon


class BranchAndBound:
    """Search for the shortest step of a space, over whole and half blocks alike.

    Bounds are found for all layouts at once. In their order, each layout gets a nearer bound of its own, and those that could
    still be the best are predicted.

    - candidates: all layouts that were predicted; refused: those that can't fit, which shows without a prediction.
    """

    def __init__(self, predictor: Predictor, space: Space):
        self._predictor, self.space = predictor, space
        self.bounds = Bounds(predictor, space)
        self.capacity = max(gpu.device.memory for gpu in predictor.network.cluster.gpus)
        self.candidates: dict[Layout, Candidate] = {}
        self.refused: list[OutOfMemory] = []
        self._least: dict[Layout, float] = {}
        self._evaluated: set[int] = set()

    @property
    def evaluated(self) -> list[Candidate | OutOfMemory]:
        """All layouts that weren't ruled out by bounds."""
        return [*self.candidates.values(), *self.refused]

    def run(self) -> list[Candidate]:
        """Return the candidates that fit, the best first; none if nothing fits."""
        seconds = self.bounds.seconds / np.where(self.space.halves, WORTH_HALVES, 1.0)
        possible = np.flatnonzero(np.isfinite(seconds) & (self.bounds.bytes <= self.capacity))
        order = possible[np.argsort(seconds[possible], kind="stable")]
        self._find_best(list(zip(seconds[order].tolist(), order.tolist(), strict=True)))
        if any(candidate.fits for candidate in self.candidates.values()):
            self._find_alternatives(order)
        return sorted((c for c in self.candidates.values() if c.fits), key=lambda c: c.rank)

    def _find_best(self, bounds: Sequence[tuple[float, int]]) -> None:
        """Evaluate layouts, given as (bound, index), in the order of their bounds until none is below the best that fits."""
        best, roomy = np.inf, set[Layout]()
        waiting = [(least, n, k, False) for n, (least, k) in enumerate(bounds)]
        heapify(waiting)
        while waiting and waiting[0][0] < best:
            _, n, k, is_near = heappop(waiting)
            layout = self.space.layout(k)
            if any(other in roomy for other in _no_slower(layout)):
                continue
            if not is_near:
                heappush(waiting, (self._near_bound(layout), n, k, True))
                continue
            candidate = self._evaluate(k, best)
            if candidate is not None and candidate.fits:
                best = min(best, candidate.rank[1])
                if fullness_of(candidate.memory) < _ROOMY:
                    roomy.add(layout)

    def _find_alternatives(self, order: Integers) -> None:
        """Evaluate the likeliest layouts of other shapes and of little memory, until one of each fits."""
        space, shapes = self.space, self.space.shapes[order]
        found = {shape_of(candidate.layout) for candidate in self.candidates.values() if candidate.fits}
        others = [shape for shape in dict.fromkeys(map(tuple, shapes.tolist())) if shape not in found]
        groups = [order[(shapes == shape).all(axis=1)] for shape in others[: max(0, _ALTERNATIVES - len(found))]]
        groups += [order[self.bounds.bytes[order] <= share * self.capacity][:_TRIES] for share in _LEANER]
        is_quick = space.stages**2 * space.chunks <= _QUICK
        for group in groups:
            quick = [k for k in group[is_quick[group]].tolist() if k not in self._evaluated]
            for k in quick[:_TRIES]:
                candidate = self._evaluate(k)
                if candidate is not None and candidate.fits:
                    break

    def _near_bound(self, layout: Layout) -> float:
        """Return the predictor's bound, the same however many layers are recomputed together."""
        key = layout.model_copy(update={"recompute": min(1, layout.recompute)})
        if key not in self._least:
            self._least[key] = self._predictor.least(key) / (WORTH_HALVES if layout.units else 1.0)
        return self._least[key]

    def _evaluate(self, k: int, best: float = np.inf) -> Candidate | None:
        """Predict layout k, see `evaluate`; return None if it can't fit."""
        self._evaluated.add(k)
        layout = self.space.layout(k)
        refused = out_of_memory(self._predictor, layout, self._near_bound(layout))
        if refused is not None:
            self.refused.append(refused)
            return None
        self.candidates[layout] = evaluate(self._predictor, layout, best=best)
        return self.candidates[layout]


def _no_slower(layout: Layout) -> list[Layout]:
    """Return layouts that take no more time but more memory: they reduce less often, or recompute fewer layers at once."""
    others = [layout.model_copy(update={"zero": 1})] if layout.zero == 2 else []
    fewer = [n for n in RECOMPUTED if 0 < n < layout.recompute]
    return others + [layout.model_copy(update={"recompute": n}) for n in fewer]
