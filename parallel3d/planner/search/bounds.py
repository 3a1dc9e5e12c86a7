"""Lower bounds of time and memory: of all layouts of a space at once, and nearer ones of one layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel3d.config import SelectivePolicy
from parallel3d.config.layout import Layout
from parallel3d.costs.devices import typical_seconds
from parallel3d.errors import PartitionError
from parallel3d.planner.predict.chunks import Chunks
from parallel3d.planner.predict.costs import of_stages, reducing_seconds
from parallel3d.planner.predict.predict import Predictor
from parallel3d.planner.predict.program import timed_micro_batches, untimed_flight
from parallel3d.planner.predict.timing import Floats, Integers, layer_times
from parallel3d.planner.search.result import StageMemory
from parallel3d.planner.search.space import POLICIES, Space
from parallel3d.schedule.builders import WHOLE_BACKWARDS
from parallel3d.zero.layout import bucket_limit
from parallel3d.zero.memory import predict_state

# The work of a micro-batch is proportional to its samples, except for a constant part. Bounds are scaled by this factor for it.
_SLACK = 0.99
# The stage with most micro-batches in flight may hold fewer activations of each than the mean stage does.
_EVEN = 0.8
# Policies of all layers, the shortest step first, and layers recomputed together.
SINGLE_POLICIES: tuple[tuple[SelectivePolicy | None, int], ...] = (
    (None, 0),
    ("cheap", 1),
    ("attention", 1),
    (None, 1),
)


class Bounds:
    """Lower bounds of every layout of a space.

    - seconds: of a step whose layers are spread evenly over the stages, on the fastest device, with the filling and draining
      of its pipeline and reductions in every micro-batch. No less than that of a micro-batch which passes all chunks
      forward and back: the last one or the first one on the slowest chunk, whose forwards or backwards of all others come
      before or after it. Infinite if the model can't be split over this number of tensor-parallel ranks.
    - bytes: of the fullest rank, with state and activations in flight spread evenly, and the allocator's gaps; before `refine`
      as if layers that are recomputed in part were recomputed whole. host: of what it offloads to the host's memory.
    - capacity: bytes of the largest device; host_capacity: of a host's memory for a rank.
    - why_not_sharded: number of tensor-parallel ranks -> the reason why layers can't be split over them.
    """

    def __init__(self, predictor: Predictor, space: Space):
        self._predictor = predictor
        devices = {gpu.device for gpu in predictor.network.cluster.gpus}
        fastest = min(devices, key=typical_seconds)
        self._device = fastest.model_copy(update={"host_seconds": min(device.host_seconds for device in devices)})
        self.why_not_sharded: dict[int, str] = {}
        sizes = [predictor.capacity([device]) for device in devices]
        self.capacity, self.host_capacity = map(max, zip(*sizes, strict=True))
        self._refined: set[tuple[Any, ...]] = set()
        self._reduction = cache(self._seconds_reducing)
        self.seconds, found = self._bound_seconds(space), np.zeros((2, len(space)))
        possible = np.isfinite(self.seconds)
        found[:, possible] = self._bound_bytes(space.where(possible))
        self.bytes, self.host = found

    def least_shares(self, chosen: int | Integers | slice = slice(None)) -> Floats:
        """Return at least the used share of the device or host of some layouts of the space, by default of all."""
        shares: Floats = np.maximum(self.bytes[chosen] / self.capacity, self.host[chosen] / self.host_capacity)
        return shares

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
        if POLICIES[same[2]] == "auto":
            # With policies by layer the time is between those of two single ones, by the memory; infinite if none fits.
            single = [some.under(policy, recompute) for policy, recompute in SINGLE_POLICIES]
            seconds = [self._bound_seconds(own, by_policy=True) for own in single]
            shares = [self._bound_bytes(own, by_policy=True)[0] / self.capacity for own in single]
            columns = zip(np.array(shares[::-1]).T, np.array(seconds[::-1]).T, strict=True)
            self.seconds[rows] = [np.interp(1.0, share, each, left=np.inf) for share, each in columns]
            return
        self.seconds[rows] = self._bound_seconds(some, by_policy=True)
        self.bytes[rows], _ = self._bound_bytes(some, by_policy=True)

    def _bound_seconds(self, space: Space, by_policy: bool = False) -> Floats:
        predictor, num_chunks, whole = self._predictor, space.chunks, space.whole_backwards
        sharding = space.tensor_ranks, space.sequence_parallel
        # Seconds of a micro-batch: filling, mean stage, passing all chunks, and the host's calls.
        found = np.full((4, len(space)), np.inf)
        # Recomputation of a part takes at least as long as none.
        full, policy = (space.recompute > 0) & ((space.policy == 0) | by_policy), space.policy * by_policy
        for chosen in groups_of(*sharding, full, policy, space.micro_batch, space.halves, whole):
            layout, is_whole = space.layout(chosen[0]), bool(whole[chosen[0]])
            if layout.policy is not None and not by_policy:
                layout = layout.model_copy(update={"recompute": 0, "policy": None})
            try:
                # Half blocks together take as long as whole ones, whose profile is needed anyway.
                layers = predictor.layers(layout.model_copy(update={"units": None}), roughly=True)
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
        unsplit = Layout(tensor_ranks=tensor_ranks)
        (whole,) = profile.stage_parameters(Chunks.one(unsplit, len(profile.specs)))
        sizes = np.array([info.parameter.numel() for info in whole])
        # The least number of buckets: each has the most elements that one may have, or a larger parameter.
        limit = bucket_limit(int(sizes.sum()), policy, policy.num_shards(replicas))
        count = max(1, int(np.minimum(1.0, sizes / limit).sum()))
        each = (int(sizes.sum()) // count,)
        return count * min(sum(reducing_seconds(policy, links, each, stage)) for stage in range(stages)) / stages

    def _bound_bytes(self, space: Space, by_policy: bool = False) -> Floats:
        predictor, found = self._predictor, np.zeros((2, len(space)))
        profile, memory = predictor.profile(), predictor.memory_model(None)
        for chosen in groups_of(space.tensor_ranks, space.replicas, space.zero):
            layout = space.layout(chosen[0])
            unsplit = Layout(tensor_ranks=layout.tensor_ranks)
            (whole,) = profile.stage_parameters(Chunks.one(unsplit, len(profile.specs)), merged=True)
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


class NearBounds:
    """Nearer bounds of one layout at a time, from the trace of a single sample and the layers of each stage."""

    def __init__(self, predictor: Predictor):
        self._predictor = predictor
        self._memory: dict[tuple[Layout, int], StageMemory] = {}

    def seconds(self, layout: Layout) -> float:
        """Return a lower bound of the seconds of a layout's step.

        Every stage computes all micro-batches, after those before it have begun the first one, and before they end the last
        one if backwards are whole; and its replicas exchange all gradients and weights. Then the optimizer steps.
        """
        predictor = self._predictor
        split = predictor.split(_uniform(layout, recompute=0), roughly=True)
        # Seconds by which each chunk delays the start of those after it, and the end of those before it.
        late = split.times.compute[0]
        if layout.schedule in WHOLE_BACKWARDS:
            late = split.times.total
        elif layout.schedule == "zb-h1":
            late = np.maximum(late, late + split.times.compute[1] - split.times.compute[2])
        waits = (np.cumsum(late) - late)[[split.placement.index(stage) for stage in range(layout.stages)]]
        loads = of_stages(split.times.total, split.placement) * layout.micro_batches
        computing = predictor.cooled(float((loads + waits).max()), float(loads.mean()))
        host = layout.micro_batches * of_stages(split.times.host.sum(axis=0), split.placement)
        longest = max(computing, float(split.reduction_seconds().max()), float(host.max()))
        largest = max(
            range(layout.stages), key=lambda stage: sum(info.parameter.numel() for info in split.stages[stage])
        )
        return longest + predictor.calibration.factors["optimizer"].value * split.update_seconds(largest)

    def memory(self, layout: Layout) -> Iterator[StageMemory]:
        """Yield about the memory of the stages that may be the fullest, scaled from that of a single sample.

        No prediction is needed, only those stages' lists of instructions. With policies by layer it is the least that these can
        make of it.
        """
        predictor, layout = self._predictor, _uniform(layout, recompute=1)
        links, timed = predictor.links(layout), timed_micro_batches(layout, roughly=True)
        model, replay = predictor.memory_model(layout.units), predictor.programs.replay(layout, timed, roughly=True)
        chunks, _ = predictor.chunks(layout, links, roughly=True)
        samples = layout.micro_batch * untimed_flight(layout, timed)
        one = replace(chunks, layout=layout.model_copy(update={"micro_batch": 1}))
        # A long pipeline is the fullest at its ends, or in the middle.
        for stage in sorted({0, 1, layout.stages // 2, layout.stages - 2, layout.stages - 1}):
            if 0 <= stage < layout.stages:
                if (layout, stage) not in self._memory:
                    found = model.stage(replay, one, stage, predictor.capacity(links.devices[stage]), samples)
                    self._memory[layout, stage] = predictor.calibration.correct_memory(found)
                yield self._memory[layout, stage]


def _uniform(layout: Layout, recompute: int) -> Layout:
    """Return the layout, with policies by layer as one in which all layers are recomputed, or none is."""
    return layout.model_copy(update={"policy": None, "recompute": recompute}) if layout.is_by_layer else layout
