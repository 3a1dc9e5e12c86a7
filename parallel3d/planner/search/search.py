"""Search of a space for the layouts with the shortest steps, by lower bounds of their time and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from heapq import heapify, heappop, heappush
from itertools import count, islice, repeat
from math import inf

import numpy as np

from parallel3d.config.layout import Layout
from parallel3d.planner.network.placement import Grid
from parallel3d.planner.predict.costs import WORTH_HALVES, StepPrediction
from parallel3d.planner.predict.predict import Predictor
from parallel3d.planner.predict.timing import Floats, Integers
from parallel3d.planner.search.bounds import SINGLE_POLICIES, Bounds, NearBounds
from parallel3d.planner.search.result import StageMemory, fullness_of
from parallel3d.planner.search.space import LARGE, Space
from parallel3d.planner.search.splits import split_within

MOST_NEAR = 6  # candidates that are improved
_OF_A_SHAPE = 3  # most candidates of one shape that are listed
_ALTERNATIVES = 5  # shapes whose most likely layouts are evaluated, so that there is something to compare with
_LEANER = (0.2, 0.4, 0.6)  # shares of the memory whose most likely layouts are evaluated
_FURTHER = 20  # layouts that are looked at after the best one is found, for each that is to be listed
_TRIES = 8  # evaluated layouts of an alternative of which none fits
_QUICK = 512  # most stages x stages x chunks of an alternative, so that its program is built quickly
# Share of a device's memory up to which a split is searched that makes the layout fit; with more chunks of all stages, or
# more ranks, the search would be too slow.
_NEARLY, _MOST_CHUNKS, _MOST_RANKS = 1.4, 16, 64
# Nearer bounds are 1.5 to 3% below predictions; choosing policies by layer takes long where there is less to win.
_LOOSE = 0.995


@dataclass(frozen=True)
class OutOfMemory:
    """Layout that isn't predicted, because it doesn't fit. least: a lower bound of its seconds."""

    layout: Layout
    near: NearBounds
    least: float
    fits = False

    @cached_property
    def memory(self) -> tuple[StageMemory, ...]:
        """Memory of the stages that may be the fullest."""
        return tuple(self.near.memory(self.layout))

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key, see StepPrediction."""
        return True, self.least


def out_of_memory(near: NearBounds, layout: Layout, least: float) -> OutOfMemory | None:
    """Return a layout that doesn't fit by its rough memory, and that no other split of its layers makes fit, else None.

    If all stages are too full, a split makes none of them leaner without another one that gets fuller.
    """
    # `near` computes a stage when it is asked for, and keeps it.
    is_too_large = any(fullness_of([stage]) > _fullest_to_split(layout) for stage in near.memory(layout))
    is_too_large = is_too_large or all(fullness_of([stage]) > 1.0 for stage in near.memory(layout))
    return OutOfMemory(layout, near, least) if is_too_large else None


def _fullest_to_split(layout: Layout) -> float:
    """Return how full a layout may be, as a share of the memory, so that another split of its layers may still make it fit."""
    is_worth_it = layout.stages * layout.chunks <= _MOST_CHUNKS and layout.world_size <= _MOST_RANKS
    return _NEARLY if layout.stages > 1 and is_worth_it else 1.0


def evaluate(
    predictor: Predictor,
    layout: Layout,
    places: Sequence[int] | None = None,
    bounds: Sequence[int] | None = None,
    best: float = inf,
) -> StepPrediction:
    """Predict a layout.

    If it nearly fits, and its chunks are few, its layers are split so that it does, if possible.

    - places, bounds: see Predictor.predict.
    - best: seconds of a step that fits already; no split is looked for by which a longer one fits.
    """
    step = predictor.predict(layout, places, bounds)
    if not 1.0 < fullness_of(step.memory) < _fullest_to_split(layout) or step.seconds >= best:
        return step
    within = split_within(predictor, step)
    if within is None or within == step.split.bounds:
        return step
    other = predictor.predict(layout, places, within)
    return other if other.fits else step


def listed(found: Sequence[StepPrediction], num_best: int) -> list[StepPrediction]:
    """Return the best candidates, more than a few of one shape only where there are too few others. found: the best first."""
    of_shape: Counter[Grid] = Counter()
    places: list[tuple[bool, int]] = []
    for place, candidate in enumerate(found):
        of_shape[candidate.layout.shape] += 1
        places.append((of_shape[candidate.layout.shape] > _OF_A_SHAPE, place))
    return [found[place] for place in sorted(place for _, place in sorted(places)[:num_best])]


_Waiting = tuple[float, int, int, bool]  # bound, order among equal ones, layout, whether the bound is a nearer one


class BranchAndBound:
    """Search for the shortest step of a space, over whole and half blocks alike.

    Bounds are found for all layouts at once. In their order, each layout gets a nearer bound of its own, and those that could
    still be the best are predicted.

    num_best: candidates that are to be listed; evaluated: all layouts that weren't ruled out by bounds; those that can't fit,
    which shows without a prediction, are OutOfMemory.
    """

    def __init__(self, predictor: Predictor, space: Space, num_best: int = 5):
        self._predictor, self.space, self._num_best = predictor, space, num_best
        self.bounds = Bounds(predictor, space)
        self.evaluated: dict[Layout, StepPrediction | OutOfMemory] = {}
        self._layout = cache(space.layout)
        self._near = NearBounds(predictor)
        self._least = cache(self._near.seconds)

    @property
    def _seconds(self) -> Floats:
        return self.bounds.seconds / np.where(self.space.halves, WORTH_HALVES, 1.0)

    @property
    def candidates(self) -> list[StepPrediction]:
        """All layouts that were predicted."""
        return [each for each in self.evaluated.values() if isinstance(each, StepPrediction)]

    @property
    def fitting(self) -> list[StepPrediction]:
        """The candidates that fit, the best first."""
        return sorted((c for c in self.candidates if c.fits), key=lambda c: c.rank)

    def run(self) -> list[StepPrediction]:
        """Return the candidates that fit, the best first; none if nothing fits."""
        possible = np.flatnonzero(np.isfinite(self.bounds.seconds) & (self.bounds.least_shares() <= 1.0))
        order = possible[np.argsort(self._seconds[possible], kind="stable")]
        if len(self._predictor.network.cluster.gpus) > LARGE:
            # Predictions take long: whole blocks are searched first, and then half blocks only in the best shape.
            is_half = self.space.halves[order] > 0
            self._find_best(order[~is_half])
            for best in self.fitting[:1]:
                self._find_best(order[is_half & (self.space.shapes[order] == best.layout.shape).all(axis=1)])
        else:
            self._find_best(order)
        if self.fitting:
            self._find_alternatives(order[self.space.policy[order] == 0])
        return self.fitting

    def _find_best(self, order: Integers) -> None:
        """Evaluate layouts, given in the order of their bounds, until no bound is below the best that fits.

        A layout that recomputes a part of each layer takes longer than its twin that recomputes less, and comes after it, if
        that one doesn't fit, or may fit only with a less even split. The one with policies by layer comes after all others: it
        takes the longest to predict.
        """
        following = self.space.recomputing_more(order)
        order = order[~np.isin(order, following)]
        waiting = list(
            zip(self._seconds[order].tolist(), count(), order.tolist(), repeat(False))
        )  # in order, and so a heap
        by_layer = self._evaluate_from(waiting, following, _FURTHER * self._num_best)
        heapify(by_layer)
        self._evaluate_from(by_layer, following)

    def _evaluate_from(self, waiting: list[_Waiting], following: Integers, further: int = 0) -> list[_Waiting]:
        """Evaluate from a heap until no bound is below the best that fits; return twins with policies by layer, for later.

        following: of each layout the one that comes after it if it doesn't fit, -1 for none. further: layouts to look at after
        the best one, until as many fit as are to be listed.
        """
        worth, by_layer = np.where(self.space.halves, WORTH_HALVES, 1.0), list[_Waiting]()
        best = min((c.rank[1] for c in self.fitting), default=np.inf)
        fitting = {c.layout for c in self.fitting}
        while waiting and (waiting[0][0] < best or (len(fitting) < self._num_best and further > 0)):
            bound, n, k, is_near = heappop(waiting)
            further -= bound >= best
            self.bounds.refine(self.space, k)
            layout, least = self._layout(k), float(self.bounds.seconds[k] / worth[k])
            if _with_whole_weights(layout) in fitting:
                continue
            if self.bounds.least_shares(k) <= 1.0 and not is_near:
                is_new = least > bound
                heappush(waiting, (least if is_new else max(bound, self._near_bound(layout, best)), n, k, not is_new))
                continue
            may_gain = True
            if is_near and (candidate := self._evaluate(layout, best)).fits:
                fitting.add(layout)
                best = min(best, candidate.rank[1])
                may_gain = _fullest_to_split(layout) > 1.0
            if (more := int(following[k])) < 0:
                continue
            if self._layout(more).is_by_layer and not layout.is_by_layer:
                by_layer.append((float(self.bounds.seconds[more] / worth[more]), n, more, False))
            elif may_gain:
                heappush(waiting, (bound, n, more, False))
        return by_layer

    def _find_alternatives(self, order: Integers) -> None:
        """Evaluate the most likely layouts with whole weights of other shapes and of little memory, until one of each fits."""
        order = order[self.space.zero[order] < 3]
        space, shapes = self.space, self.space.shapes[order]
        found = {candidate.layout.shape for candidate in self.fitting}
        others = [shape for shape in dict.fromkeys(map(tuple, shapes.tolist())) if shape not in found]
        groups = [order[(shapes == shape).all(axis=1)] for shape in others[: max(0, _ALTERNATIVES - len(found))]]
        groups += [order[self.bounds.bytes[order] <= share * self.bounds.capacity][:_TRIES] for share in _LEANER]
        is_quick = space.stages**2 * space.chunks <= _QUICK
        for group in groups:
            quick = map(space.layout, group[is_quick[group]].tolist())
            for layout in islice((layout for layout in quick if layout not in self.evaluated), _TRIES):
                if self._evaluate(layout).fits:
                    break

    def _near_bound(self, layout: Layout, best: float = inf) -> float:
        """Return the predictor's bound, the same however many layers are recomputed together, and for ZeRO-2 and 3.

        With policies by layer it may be any that isn't below `best`, if the exact one isn't either.
        """
        if layout.is_by_layer:
            return self._between_policies(layout, best)
        key = _with_whole_weights(layout).model_copy(update={"recompute": min(1, layout.recompute)})
        return self._least(key) / (WORTH_HALVES if layout.units else 1.0)

    def _between_policies(self, layout: Layout, best: float) -> float:
        """Return about the least seconds of a layout with policies by layer, by the memory.

        They are between those of a single policy that fits and of the next shorter one, which doesn't. Infinite if none fits.
        """
        single = [layout.model_copy(update={"policy": p, "recompute": r}) for p, r in SINGLE_POLICIES]
        if (least := self._near_bound(single[0]) / _LOOSE) >= best:  # all others take longer
            return least
        shares: list[float] = []
        for one in reversed(single):  # the leanest first
            shares.append(fullness_of([next(self._near.memory(one))]))
            if shares[-1] > 1.0:
                break
        if shares[0] > 1.0:
            return inf
        seconds = [self._near_bound(one) for one in single[::-1][len(shares) - 2 : len(shares)]]
        return min(seconds[0], float(np.interp(1.0, shares[-2:], seconds))) / _LOOSE

    def _evaluate(self, layout: Layout, best: float = np.inf) -> StepPrediction | OutOfMemory:
        """Predict a layout, see `evaluate`, unless it can't fit."""
        refused = out_of_memory(self._near, layout, self._near_bound(layout))
        self.evaluated[layout] = refused or evaluate(self._predictor, layout, best=best)
        return self.evaluated[layout]


def _with_whole_weights(layout: Layout) -> Layout:
    """Return the layout with whole weights that takes no more time than one with ZeRO-3. Others stay."""
    if layout.zero < 3:
        return layout
    chunks = 1 if layout.stages == 1 else layout.chunks
    named = {"schedule": "interleaved" if chunks > 1 else "1f1b"} if layout.schedule == "gpipe" else {}
    return layout.model_copy(update={"zero": 2 * (layout.replicas > 1), "chunks": chunks, **named})
