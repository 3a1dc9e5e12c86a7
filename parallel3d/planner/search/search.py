"""Search of a space for the layouts with the shortest steps, by lower bounds of their time and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from heapq import heappop, heappush
from itertools import count, islice, repeat
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel3d.config.layout import Layout
from parallel3d.costs.devices import compute_seconds
from parallel3d.costs.work import Work
from parallel3d.errors import PartitionError
from parallel3d.planner.network.placement import Grid
from parallel3d.planner.predict.costs import WORTH_HALVES, StepPrediction, fullness_of, reducing_seconds
from parallel3d.planner.predict.predict import Predictor
from parallel3d.planner.predict.timing import Floats, Integers, layer_times
from parallel3d.planner.search.result import StageMemory
from parallel3d.planner.search.space import LARGE, Space
from parallel3d.zero.layout import bucket_limit
from parallel3d.zero.memory import predict_state

MOST_NEAR = 6  # candidates that are improved
_OF_A_SHAPE = 3  # candidates of one shape that are listed
_ALTERNATIVES = 5  # shapes whose most likely layouts are evaluated, so that there is something to compare with
_LEANER = (0.2, 0.4, 0.6)  # shares of the memory whose most likely layouts are evaluated
_FURTHER = 20  # layouts that are looked at after the best one is found, for each that is to be listed
_TRIES = 8  # evaluated layouts of an alternative of which none fits
_QUICK = 512  # stages x stages x chunks of an alternative: its program is made soon
# The work of a micro-batch is proportional to its samples but for a constant part, which is at most this share of the bounds.
_SLACK = 0.99
# The stage with most micro-batches in flight may hold fewer activations of each than the mean stage does.
_EVEN = 0.8
# Share of a device's memory up to which a split is searched that makes the layout fit; with more chunks of all stages, or
# more ranks, the search would be too slow.
_NEARLY, _MOST_CHUNKS, _MOST_RANKS = 1.4, 16, 64


@dataclass(frozen=True)
class OutOfMemory:
    """Layout that isn't predicted, because it doesn't fit. least: a lower bound of its seconds."""

    layout: Layout
    predictor: Predictor
    least: float
    fits = False

    @cached_property
    def memory(self) -> tuple[StageMemory, ...]:
        """Memory of the stages that may be the fullest."""
        return tuple(self.predictor.rough_memory(self.layout))

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key, see StepPrediction."""
        return True, self.least


def out_of_memory(predictor: Predictor, layout: Layout, least: float) -> OutOfMemory | None:
    """Return a layout that doesn't fit by its rough memory, and that no other split of its layers makes fit, else None."""
    is_too_large = any(fullness_of([stage]) > _fullest_to_split(layout) for stage in predictor.rough_memory(layout))
    return OutOfMemory(layout, predictor, least) if is_too_large else None


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
    within = predictor.split_within(step)
    if within is None or within == step.split.bounds:
        return step
    other = predictor.predict(layout, places, within)
    return other if other.fits else step


class Bounds:
    """Lower bounds of every layout of a space.

    - seconds: of a step whose layers are spread evenly over the stages, on the fastest device, with the filling and draining
      of its pipeline and reductions in every micro-batch. No less than that of a micro-batch which passes all chunks
      forward and back: the last one or the first one on the slowest chunk, whose forwards or backwards of all others come
      before or after it. Infinite if the model can't be split over this number of tensor-parallel ranks.
    - bytes: of the fullest rank, with state and activations in flight spread evenly, and the allocator's gaps; before `refine`
      as if layers that are recomputed in part were recomputed whole. host: of what it offloads to the host's memory.
    - why_not_sharded: number of tensor-parallel ranks -> the reason why layers can't be split over them.
    """

    def __init__(self, predictor: Predictor, space: Space):
        self._predictor = predictor
        devices = {gpu.device for gpu in predictor.network.cluster.gpus}
        fastest = min(devices, key=lambda device: compute_seconds(Work(1e15, 1e14, 1e12), device))
        self._device = fastest.model_copy(update={"host_seconds": min(device.host_seconds for device in devices)})
        self.why_not_sharded: dict[int, str] = {}
        self._refined: set[tuple[Any, ...]] = set()
        self._reduction = cache(self._seconds_reducing)
        self.seconds, found = self._bound_seconds(space), np.zeros((2, len(space)))
        possible = np.isfinite(self.seconds)
        found[:, possible] = self._bound_bytes(space.where(possible))
        self.bytes, self.host = found

    def refine(self, space: Space, k: int) -> None:
        """Bound layout k of a space again, by the traces of its policy, and all others that share them."""
        if not space.policy[k]:
            return
        same = space.tensor_ranks[k], space.sequence_parallel[k], space.policy[k]
        if same in self._refined:
            return
        self._refined.add(same)
        rows = (space.tensor_ranks == same[0]) & (space.sequence_parallel == same[1]) & (space.policy == same[2])
        some = space.where(rows)
        self.seconds[rows] = self._bound_seconds(some, by_policy=True)
        self.bytes[rows], _ = self._bound_bytes(some, by_policy=True)

    def _bound_seconds(self, space: Space, by_policy: bool = False) -> Floats:
        predictor, num_chunks, whole = self._predictor, space.chunks, space.whole_backwards
        sharding = space.tensor_ranks, space.sequence_parallel
        # Of a micro-batch: filling, mean stage, passing all chunks, and the host's calls.
        found = np.full((4, len(space)), np.inf)
        # Recomputation of a part takes at least as long as none.
        full, policy = (space.recompute > 0) & ((space.policy == 0) | by_policy), space.policy * by_policy
        for chosen in groups_of(*sharding, full, policy, space.micro_batch, space.halves, whole):
            layout, is_whole = space.layout(chosen[0]), bool(whole[chosen[0]])
            if layout.policy is not None and not by_policy:
                layout = layout.model_copy(update={"recompute": 0, "policy": None})
            try:
                # Half blocks together take as long as whole ones, whose profile is needed anyway.
                layers = predictor.layers(layout.model_copy(update={"units": None}), exactly=False)
            except PartitionError as error:
                self.why_not_sharded.setdefault(layout.tensor_ranks, str(error))
                continue
            links = predictor.links(layout)
            sent = links.over_tensor_ranks, layout.micro_batch, links.overlap
            times = layer_times(layers, self._device, *sent, splits=not is_whole)
            p, m, chunks = space.stages[chosen], space.micro_batches[chosen], num_chunks[chosen]
            # The last rank starts p - 1 chunks' forwards late. If backwards are whole, the first one ends as many late.
            late = times.total.sum() if is_whole else times.compute[0].sum()
            forward, backward = times.compute[0].sum(), times.compute[1 : 3 if is_whole else 2].sum()
            passing = forward + backward + (m - 1) * max(forward, backward) / (p * chunks)
            filling, mean = late * (p - 1) / (p * chunks), times.total.sum() / p
            found[:, chosen] = np.broadcast_arrays(filling, mean, passing, times.host.sum() / p)
        possible = np.isfinite(found[0])
        m, (filling, mean, passing, host) = space.micro_batches[possible], found[:, possible]
        computing = m * (mean + self._reducing(space.where(possible)))
        steps = np.maximum(predictor.cooled(np.maximum(computing + filling, passing), computing), m * host)
        bounds = np.full(len(space), np.inf)
        bounds[possible] = _SLACK * predictor.least_factor * steps
        return bounds

    def _reducing(self, space: Space) -> Floats:
        """Return at least the seconds by which reductions in every micro-batch make each of its backwards longer, [layouts]."""
        found, columns = np.zeros(len(space)), (space.stages, space.replicas, space.tensor_ranks, space.zero)
        for chosen in groups_of(*columns):
            found[chosen] = self._reduction(*(int(column[chosen[0]]) for column in columns))
        return found

    def _seconds_reducing(self, stages: int, replicas: int, tensor_ranks: int, zero: int) -> float:
        profile, policy = self._predictor.profile(), self._predictor.profile().policy(zero)
        if not policy.reduce_per_micro_batch:
            return 0.0
        layout = Layout(stages=stages, replicas=replicas, tensor_ranks=tensor_ranks)
        links = self._predictor.links(layout)
        (whole,) = profile.stage_parameters(tensor_ranks, False, (0, len(profile.specs)), (0,))
        sizes = np.array([info.parameter.numel() for info in whole])
        # At least so many buckets: each has the most elements that one may have, or a larger parameter.
        limit = bucket_limit(int(sizes.sum()), policy, policy.num_shards(replicas))
        count = max(1, int(np.minimum(1.0, sizes / limit).sum()))
        each = (int(sizes.sum()) // count,)
        return count * min(sum(reducing_seconds(policy, links, each, stage)) for stage in range(stages)) / stages

    def _bound_bytes(self, space: Space, by_policy: bool = False) -> Floats:
        predictor, found = self._predictor, np.zeros((2, len(space)))
        profile, memory = predictor.profile(), predictor.memory_model(None)
        for chosen in groups_of(space.tensor_ranks, space.replicas, space.zero):
            layout = space.layout(chosen[0])
            bounds = 0, len(profile.specs)
            (whole,) = profile.stage_parameters(layout.tensor_ranks, False, bounds, (0,), merged=True)
            policy = profile.policy(layout.zero)
            if (offload := policy.offload) is not None:  # of some of the buckets, which are one here
                state = predict_state(whole, replace(policy, offload=None), layout.replicas)
                all_in_memory = offload.ratio == 1 and offload.disk is None
                found[1, chosen] = (state.masters + state.optimizer) * all_in_memory / space.stages[chosen]
                policy = replace(policy, offload=replace(offload, ratio=1.0))
            state = predict_state(whole, policy, layout.replicas)
            found[0, chosen] = state.steady / space.stages[chosen]
        in_flight, late = np.minimum(space.in_flight, space.micro_batches), space.deferred
        for chosen in groups_of(space.tensor_ranks, space.sequence_parallel, space.recompute, space.policy * by_policy):
            one = space.layout(chosen[0]).model_copy(update={"micro_batch": 1, "units": None})
            one = one if by_policy else one.model_copy(update={"policy": None})
            stages, samples = space.stages[chosen], _EVEN * space.micro_batch[chosen]
            held, deferred = memory.held(one)
            kept = np.where(space.whole_backwards[chosen], held, min(held, deferred))
            found[0, chosen] += samples * np.maximum(kept * in_flight[chosen], deferred * late[chosen]) / stages
        found[0] *= 1.0 + predictor.calibration.memory["slack"].value * memory.gaps
        return found


def groups_of(*columns: npt.NDArray[Any]) -> list[Integers]:
    """Return the indices of the rows that have equal values, group by group."""
    rows = np.zeros(len(columns[0]), dtype=np.int64)  # a number for each row
    for column in columns:
        rows = rows * (int(column.max(initial=0)) + 1) + column
    order = np.argsort(rows, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(rows[order])) + 1) if len(rows) else []


def listed(found: Sequence[StepPrediction], num_best: int) -> list[StepPrediction]:
    """Return the best candidates, more than a few of one shape only where there are too few others. found: the best first."""
    of_shape: Counter[Grid] = Counter()
    places: list[tuple[bool, int]] = []
    for place, candidate in enumerate(found):
        of_shape[candidate.layout.shape] += 1
        places.append((of_shape[candidate.layout.shape] > _OF_A_SHAPE, place))
    return [found[place] for place in sorted(place for _, place in sorted(places)[:num_best])]


class BranchAndBound:
    """Search for the shortest step of a space, over whole and half blocks alike.

    Bounds are found for all layouts at once. In their order, each layout gets a nearer bound of its own, and those that could
    still be the best are predicted.

    num_best: candidates that are to be listed; capacity: bytes of the largest device, and host_capacity: of a host's memory for
    a rank; evaluated: all layouts that weren't ruled out by bounds; those that can't fit,
    which shows without a prediction, are OutOfMemory.
    """

    def __init__(self, predictor: Predictor, space: Space, num_best: int = 5):
        self._predictor, self.space, self._num_best = predictor, space, num_best
        self.bounds = Bounds(predictor, space)
        sizes = [predictor.capacity([device]) for device in {gpu.device for gpu in predictor.network.cluster.gpus}]
        self.capacity, self.host_capacity = map(max, zip(*sizes, strict=True))
        self.evaluated: dict[Layout, StepPrediction | OutOfMemory] = {}
        self._layout = cache(space.layout)
        self._least = cache(predictor.least)

    @property
    def _seconds(self) -> Floats:
        return self.bounds.seconds / np.where(self.space.halves, WORTH_HALVES, 1.0)

    @property
    def least_shares(self) -> Floats:
        """At least the used share of each layout's device or host, [layouts]."""
        shares: Floats = np.maximum(self.bounds.bytes / self.capacity, self.bounds.host / self.host_capacity)
        return shares

    def _least_share(self, k: int) -> float:
        return float(max(self.bounds.bytes[k] / self.capacity, self.bounds.host[k] / self.host_capacity))

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
        possible = np.flatnonzero(np.isfinite(self.bounds.seconds) & (self.least_shares <= 1.0))
        order = possible[np.argsort(self._seconds[possible], kind="stable")]
        if len(self._predictor.network.cluster.gpus) > LARGE:
            # Predictions take long: whole blocks are searched first, and then half blocks in the best shape alone.
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
        that one doesn't fit.
        """
        best = min((c.rank[1] for c in self.fitting), default=np.inf)
        fitting = {c.layout for c in self.fitting}
        worth, following = np.where(self.space.halves, WORTH_HALVES, 1.0), self.space.recomputing_more(order)
        order = order[~np.isin(order, following)]
        waiting = list(
            zip(self._seconds[order].tolist(), count(), order.tolist(), repeat(False))
        )  # in order, and so a heap
        further = _FURTHER * self._num_best
        while waiting and (waiting[0][0] < best or (len(fitting) < self._num_best and further > 0)):
            bound, n, k, is_near = heappop(waiting)
            further -= bound >= best
            self.bounds.refine(self.space, k)
            layout, least = self._layout(k), float(self.bounds.seconds[k] / worth[k])
            if _with_whole_weights(layout) in fitting:
                continue
            if self._least_share(k) <= 1.0 and not is_near:
                is_new = least > bound
                heappush(waiting, (least if is_new else max(bound, self._near_bound(layout)), n, k, not is_new))
                continue
            if is_near:
                candidate = self._evaluate(layout, best)
                if candidate.fits:
                    fitting.add(layout)
                    best = min(best, candidate.rank[1])
                    continue
            if following[k] >= 0:
                heappush(waiting, (bound, n, int(following[k]), False))

    def _find_alternatives(self, order: Integers) -> None:
        """Evaluate the most likely layouts with whole weights of other shapes and of little memory, until one of each fits."""
        order = order[self.space.zero[order] < 3]
        space, shapes = self.space, self.space.shapes[order]
        found = {candidate.layout.shape for candidate in self.fitting}
        others = [shape for shape in dict.fromkeys(map(tuple, shapes.tolist())) if shape not in found]
        groups = [order[(shapes == shape).all(axis=1)] for shape in others[: max(0, _ALTERNATIVES - len(found))]]
        groups += [order[self.bounds.bytes[order] <= share * self.capacity][:_TRIES] for share in _LEANER]
        is_quick = space.stages**2 * space.chunks <= _QUICK
        for group in groups:
            quick = map(space.layout, group[is_quick[group]].tolist())
            for layout in islice((layout for layout in quick if layout not in self.evaluated), _TRIES):
                if self._evaluate(layout).fits:
                    break

    def _near_bound(self, layout: Layout) -> float:
        """Return the predictor's bound, the same however many layers are recomputed together, and for ZeRO-2 and 3."""
        key = _with_whole_weights(layout).model_copy(update={"recompute": min(1, layout.recompute)})
        return self._least(key) / (WORTH_HALVES if layout.units else 1.0)

    def _evaluate(self, layout: Layout, best: float = np.inf) -> StepPrediction | OutOfMemory:
        """Predict a layout, see `evaluate`, unless it can't fit."""
        refused = out_of_memory(self._predictor, layout, self._near_bound(layout))
        self.evaluated[layout] = refused or evaluate(self._predictor, layout, best=best)
        return self.evaluated[layout]


def _with_whole_weights(layout: Layout) -> Layout:
    """Return the layout with whole weights that takes no more time than one with ZeRO-3. Others stay."""
    if layout.zero < 3:
        return layout
    chunks = 1 if layout.stages == 1 else layout.chunks
    named = {"schedule": "interleaved" if chunks > 1 else "1f1b"} if layout.schedule == "gpipe" else {}
    return layout.model_copy(update={"zero": 2 * (layout.replicas > 1), "chunks": chunks, **named})
