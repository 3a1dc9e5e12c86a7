"""Branch and bound over a space of layouts: bounds for all of them, predictions of those that could be the best."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from parallel3d.config.layout import Layout
from parallel3d.planner.predict.predict import Predictor
from parallel3d.planner.search.bounds import Bounds
from parallel3d.planner.search.candidate import WORTH_HALVES, Candidate, OutOfMemory, evaluate, out_of_memory
from parallel3d.planner.search.space import RECOMPUTED, VARIANTS, Space

_ROOMY = 0.9  # share of the memory below which layers weren't split unevenly to fit
_TRIES = 8  # predictions of a group of layouts of which none fits
_ALTERNATIVES = 5  # shapes whose best layout is predicted too
_LEANER = (0.2, 0.4, 0.6)  # shares of the memory whose best layout is predicted too
_QUICK = 512  # stages x stages x chunks of a layout that is only an alternative: its program is made soon


class BranchAndBound:
    """Search for the shortest step of a space.

    - bounds: of each layout of the space.
    - candidates: all layouts that were predicted; refused: those whose memory shows that they can't fit. In order of search.
    """

    def __init__(self, predictor: Predictor, space: Space):
        self._predictor, self.space = predictor, space
        self.bounds = Bounds(predictor, space)
        self.capacity = max(gpu.device.memory for gpu in predictor.network.cluster.gpus)
        self.candidates: dict[Layout, Candidate] = {}
        self.refused: list[OutOfMemory] = []
        self._least: dict[Layout, float] = {}
        self._tried: set[int] = set()

    def run(self) -> list[Candidate]:
        """Return the candidates that fit, the best first: the best of all, and of some shapes and shares of the memory."""
        seconds = self.bounds.seconds * np.where(self.space.halves, 1 / WORTH_HALVES, 1.0)
        possible = np.flatnonzero(np.isfinite(seconds) & (self.bounds.bytes <= self.capacity))
        order = possible[np.argsort(seconds[possible], kind="stable")]
        self._find_best(list(zip(seconds[order].tolist(), order.tolist(), strict=True)))
        if any(candidate.fits for candidate in self.candidates.values()):
            self._find_alternatives(order)
        return sorted((c for c in self.candidates.values() if c.fits), key=lambda c: c.rank)

    def _find_best(self, bounds: Sequence[tuple[float, int]]) -> None:
        """Predict layouts in the order of their bounds until none is below the best that fits.

        A layout's bound is first the given one, then the predictor's own, which is nearer and takes longer to find.
        """
        best, roomy = np.inf, set[Layout]()
        waiting = [(seconds, n, k, False) for n, (seconds, k) in enumerate(bounds)]
        heapify(waiting)
        while waiting and waiting[0][0] < best:
            _, n, k, is_near = heappop(waiting)
            layout = self.space.layout(k)
            if any(other in roomy for other in _no_slower(layout)):
                continue
            if not is_near:
                heappush(waiting, (self._bound(layout), n, k, True))
                continue
            candidate = self._predict(k, best)
            if candidate is not None and candidate.fits:
                best = min(best, candidate.rank[1])
                if candidate.fullness < _ROOMY:
                    roomy.add(layout)

    def _find_alternatives(self, order) -> None:
        """Predict the likeliest layouts of other shapes, and of those that take little memory, for comparison."""
        space = self.space
        shapes = np.stack([space.stages, space.replicas, space.slices], axis=1)[order]
        tried = {c.shape for c in self.candidates.values() if c.fits}
        others = [shape for shape in dict.fromkeys(map(tuple, shapes.tolist())) if shape not in tried]
        groups = [order[(shapes == shape).all(axis=1)] for shape in others[: max(0, _ALTERNATIVES - len(tried))]]
        groups = [g[[k not in self._tried for k in g.tolist()]] for g in groups]
        lean = [order[self.bounds.bytes[order] <= share * self.capacity] for share in _LEANER]
        quick = space.stages**2 * np.array([v.chunks for v in VARIANTS])[space.variant] <= _QUICK
        for group in groups + [g[:_TRIES] for g in lean]:
            for k in group[quick[group]][:_TRIES].tolist():
                if k in self._tried:
                    continue
                candidate = self._predict(k)
                if candidate is not None and candidate.fits:
                    break

    def _bound(self, layout: Layout) -> float:
        """Return the predictor's bound, the same however many layers are recomputed together."""
        key = layout.model_copy(update={"recompute": min(1, layout.recompute)})
        if key not in self._least:
            self._least[key] = self._predictor.least(key) / (WORTH_HALVES if layout.units else 1.0)
        return self._least[key]

    def _predict(self, k: int, best: float = np.inf) -> Candidate | None:
        """Return None for a layout that can't fit."""
        self._tried.add(k)
        layout = self.space.layout(k)
        refused = out_of_memory(self._predictor, layout, self._bound(layout))
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
