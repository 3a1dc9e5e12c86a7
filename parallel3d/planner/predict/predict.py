"""Prediction of a layout's training step: the program that the executor would run, timed by simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import chain
from typing import Literal, TypeVar

import numpy as np

from parallel3d.config.layout import Layout
from parallel3d.costs.devices import Device
from parallel3d.costs.layer_costs import LayerCost
from parallel3d.costs.layer_profile import LayerProfile
from parallel3d.errors import PartitionError
from parallel3d.partition.chain import cut, segment_costs
from parallel3d.partition.split import StageLimit, partition_layers
from parallel3d.planner.calibrate.calibration import Calibration
from parallel3d.planner.network.links import Network
from parallel3d.planner.predict.chunk_memory import MemoryReplay
from parallel3d.planner.predict.costs import (
    SplitLayout,
    StepCost,
    StepPrediction,
    of_stages,
)
from parallel3d.planner.predict.memory import MemoryModel
from parallel3d.planner.predict.policies import choose_policies
from parallel3d.planner.predict.profile import ModelProfile, frozen_infos, layer_units, stage_layers
from parallel3d.planner.predict.program import (
    Buckets,
    Programs,
    make_buckets,
    rough_buckets,
    timed_micro_batches,
    untimed_flight,
)
from parallel3d.planner.predict.sharded import sharded_weights
from parallel3d.planner.predict.timing import Floats, LayoutLinks, Times, by_op, chunk_times, layer_times
from parallel3d.planner.search.model import PlannedModel
from parallel3d.planner.search.result import StageMemory
from parallel3d.schedule.builders import WHOLE_BACKWARDS, placement_of
from parallel3d.schedule.instructions import Program
from parallel3d.schedule.lifetimes import LiveLimits, peak_live
from parallel3d.schedule.lowering import lower
from parallel3d.schedule.memory import most_in_flight
from parallel3d.schedule.timing import Simulation
from parallel3d.specs import TiedLayerSpec
from parallel3d.zero.policy import live_limits

Units = Literal["half"] | None  # of layers, see Layout
_Seconds = TypeVar("_Seconds", float, Floats)


class Predictor:
    """Predicts steps of one model on one cluster, on as many of its GPUs as a layout has ranks.

    Predictions have all gradient buckets, and micro-batches of their real size. Bounds are found roughly: with a few buckets,
    and micro-batches estimated from those of a single sample.

    - profile: of the layers as they are given. A layout whose units are "half" is predicted by the profile of half blocks,
      which is made when it is first needed.
    - network: of the cluster as the calibration corrects it.
    - measured: seconds of each layer on the cluster's device. Predicted times are corrected by the ratio, in every layout.
    - like: predictor of the same model and profile: its programs and what it knows of memory are used again.
    """

    def __init__(
        self,
        model: PlannedModel,
        profile: ModelProfile,
        network: Network,
        calibration: Calibration | None = None,
        measured: Sequence[LayerCost] | None = None,
        like: Predictor | None = None,
    ):
        self.model, self.network, self.calibration = model, network, calibration or Calibration()
        self._on_host = max(Counter(gpu.host for gpu in network.cluster.gpus).values())
        self._memories: dict[Units, MemoryModel] = {None: MemoryModel(profile)} if like is None else like._memories
        self._factors: dict[Units, Floats | float] = {None: 1.0, "half": 1.0}
        if measured is not None:
            seconds, expected = np.array([cost.parts for cost in measured]).T, self.expected.compute
            factors = np.divide(seconds, expected, out=np.ones_like(expected), where=(seconds > 0) & (expected > 0))
            blocks = [k for k, name in enumerate(profile.names) for _ in range(1 + (name == "Block"))]
            self._factors = {None: factors, "half": factors[:, blocks]}
        self._programs: Programs = Programs() if like is None else like._programs
        self._links: dict[tuple[object, ...], LayoutLinks] = {}
        self._stage_times: dict[tuple[object, ...], list[Times]] = {}
        self._rough: dict[tuple[Layout, int], StageMemory] = {}
        self._splits: dict[tuple[object, ...], tuple[tuple[int, ...], Times]] = {}
        # The bounds of chunks in layers with the smallest slowest chunk.
        segments = cache(segment_costs)
        self._even_bounds = cache(lambda costs, n, paces: partition_layers(segments(costs), n, paces=paces).bounds)

    def profile(self, units: Units = None) -> ModelProfile:
        """Return the profile of the layers, or of their half blocks. Raises ConfigError if half blocks aren't known."""
        return self.memory_model(units).model

    def memory_model(self, units: Units) -> MemoryModel:
        """Return the memory of the layers, or of their half blocks."""
        if units not in self._memories:
            self._memories[units] = MemoryModel(self.profile().of_layers(self.model.in_halves().layers))
        return self._memories[units]

    def layers(self, layout: Layout, exactly: bool = True) -> tuple[LayerProfile, ...]:
        """Return the profiles of the layers on a rank of the layout, of a single sample unless exactly."""
        return self.profile(layout.units).of_layout(layout, layout.micro_batch if exactly else 1)

    @cached_property
    def expected(self) -> Times:
        """Expected times of each unsplit layer on the reference device, from its FLOPs and bytes."""
        return layer_times(self.profile().layers(), self.network.cluster.gpus[0].device, lambda collective: 0.0)

    @cached_property
    def least_factor(self) -> float:
        """Measured over expected seconds of all layers together, at most 1."""
        measured = self.expected.scaled(self._factors[None])
        return min(1.0, float(measured.total.sum() / self.expected.total.sum()))

    def predict(
        self,
        layout: Layout,
        places: Sequence[int] | None = None,
        bounds: Sequence[int] | None = None,
        compute: Program | None = None,
    ) -> StepPrediction:
        """Predict one step of a fully specified layout.

        - places: the GPU of each rank, in the cluster's order by default.
        - bounds: the chunks' layers, if they are split already.
        - compute: the schedule, if it isn't a named one.
        """
        found: list[StepPrediction] = []
        if layout.is_by_layer:
            split = self._split_layout(layout.model_copy(update={"policy": "cheap"}), places, bounds=bounds)
            layout = self._choose(split, places, compute)
            if bounds is None and (even := self._split_layout(layout, places)).bounds != split.bounds:
                layout, split = self._choose(even, places, compute), even
            bounds = split.bounds
        split = self._split_layout(layout, places, bounds=bounds)
        for limits in self._limits(split):
            step = self._step(split, compute, limits)
            if step.fits or not found:
                found.append(step)
            if not step.fits:  # with more room even less
                break
        return min(found, key=lambda step: step.rank)

    def _limits(self, split: SplitLayout) -> Sequence[LiveLimits | None]:
        """Return the limits of sharded weights that may be gathered, the least room first; None if all weights are whole."""
        if split.sharded is None:
            return [None]
        return live_limits(self.profile().config.zero_optimization, split.sharded.elements)

    def _choose(self, split: SplitLayout, places: Sequence[int] | None, compute: Program | None) -> Layout:
        """Return the layout with a policy for each layer, as it is split."""
        layout, least = split.layout, self._limits(split)[0]

        def memory_of(own: Layout) -> tuple[StageMemory, ...]:
            other = split if split.sharded is None else self._split_layout(own, places, bounds=split.bounds)
            return self._fill(replace(other, layout=own), compute, least)[1]

        program, samples = (
            self._fill(split, compute, least)[0].program,
            untimed_flight(layout, timed_micro_batches(layout)),
        )
        return choose_policies(self.profile(layout.units), layout, split.bounds, program, samples, memory_of)

    def _fill(
        self, split: SplitLayout, compute: Program | None, limits: LiveLimits | None
    ) -> tuple[Simulation, tuple[StageMemory, ...]]:
        """Return the program of a split layout, and the memory of each stage. limits: see _limits."""
        layout, micro_batches = split.layout, timed_micro_batches(split.layout)
        replay = self._programs.replay(layout, micro_batches) if compute is None else MemoryReplay(lower(compute))
        sharded, freed = None, list[list[int]]()
        if split.sharded is not None and limits is not None:
            freed = self._freed(split, replay)
            sharded = split.sharded.lifetimes(limits), split.sharded.in_elements(freed)
        given = layout, split.buckets, split.policy, micro_batches
        simulation = self._programs.make(*given, compute=compute, sharded=sharded)
        gathered: Iterable[int] = [0] * layout.stages
        if split.sharded is not None:
            sizes = [{unit: size.nbytes for unit, size in own.items()} for own in split.sharded.sizes]
            gathered = map(peak_live, simulation.program.instructions, sizes, freed or [[]] * layout.stages)
        return simulation, self._memory_of(split, replay, simulation.program.num_micro_batches, gathered)

    def _step(self, split: SplitLayout, compute: Program | None, limits: LiveLimits | None) -> StepPrediction:
        """Predict a split layout. limits: see _limits."""
        simulation, memory = self._fill(split, compute, limits)
        cost, makespan = self._timed(split, simulation)
        optimizer = self.calibration.factors["optimizer"].value * split.optimizer_seconds()
        seconds = makespan + optimizer + self.calibration.fixed.value
        return StepPrediction(split, simulation, cost, makespan, optimizer, seconds, memory, limits)

    def least(self, layout: Layout) -> float:
        """Return a lower bound of the seconds of a layout's step.

        Every stage computes all micro-batches, after those before it have begun the first one, and before they end the last
        one if backwards are whole; and its replicas exchange all gradients and weights. Then the optimizer steps.
        """
        split = self._split_layout(_uniform(layout, recompute=0), exactly=False)
        # By which each chunk makes those after it start late, and those before it end late.
        late = split.times.compute[0]
        if layout.schedule in WHOLE_BACKWARDS:
            late = split.times.total
        elif layout.schedule == "zb-h1":
            late = np.maximum(late, late + split.times.compute[1] - split.times.compute[2])
        waits = (np.cumsum(late) - late)[[split.placement.index(stage) for stage in range(layout.stages)]]
        loads = of_stages(split.times.total, split.placement) * layout.micro_batches
        computing = self.cooled(float((loads + waits).max()), float(loads.mean()))
        host = layout.micro_batches * of_stages(split.times.host.sum(axis=0), split.placement)
        longest = max(computing, float(split.reduction_seconds().max()), float(host.max()))
        return longest + self.calibration.factors["optimizer"].value * split.optimizer_seconds()

    def cooled(self, seconds: _Seconds, computing: _Seconds) -> _Seconds:
        """Return `seconds` of devices that compute during `computing` of them and idle else (see Calibration.idle)."""
        return seconds - self.calibration.idle.value * (seconds - computing)

    def _timed(self, split: SplitLayout, simulation: Simulation) -> tuple[StepCost, float]:
        """Return the costs at the clock of a device with the step's share of idle time, and the pipeline's seconds."""
        cost, layout = split.cost(), split.layout
        seconds = cost.makespan(simulation, layout.micro_batches)
        if self.calibration.idle.value > 0:
            computing = float(cost.times.total.sum()) * layout.micro_batches / layout.stages
            factor = self.cooled(seconds, computing) / seconds
            cost = replace(cost, times=cost.times.scaled(factor))
            seconds = cost.makespan(simulation, layout.micro_batches)
        return cost, seconds

    def _split_layout(
        self,
        layout: Layout,
        places: Sequence[int] | None = None,
        exactly: bool = True,
        bounds: Sequence[int] | None = None,
    ) -> SplitLayout:
        """Split a layout; the parameters of equal owners count as one unless exactly."""
        links = self.links(layout, places)
        placement = placement_of(layout.placement, layout.stages, layout.chunks)
        bounds, times = self._chunks(layout, links, placement, exactly, bounds)
        profile, slicing = self.profile(layout.units), (layout.tensor_ranks, layout.sequence_parallel)
        stages = profile.stage_parameters(*slicing, bounds, placement, merged=not exactly)
        layers, samples = self.layers(layout, exactly), 1 if exactly else layout.micro_batch
        owned = (stage_layers(bounds, placement, k) if exactly else () for k in range(layout.stages))
        frozen = [frozen_infos(layers, own) for own in owned]
        policies = [profile.policy(layout.zero, layout.replicas, infos) for infos in map(chain, stages, frozen)]
        buckets = (make_buckets if exactly else rough_buckets)(stages, len(placement), policies[0], layout.replicas)
        units = layer_units(profile.specs, layers) if exactly and layout.zero == 3 else ()
        sharded = sharded_weights(layout, policies, layers, units, stages, frozen, placement, bounds) if units else None
        return SplitLayout(layout, links, layers, samples, placement, bounds, times, policies, stages, buckets, sharded)

    def links(self, layout: Layout, places: Sequence[int] | None = None) -> LayoutLinks:
        """Return the links of the layout's ranks. places: see predict."""
        key = (layout.shape, None if places is None else tuple(places))
        if key not in self._links:
            placed = range(layout.world_size) if places is None else places
            self._links[key] = LayoutLinks(self.network, layout.shape, placed)
        return self._links[key]

    def _chunks(
        self,
        layout: Layout,
        links: LayoutLinks,
        placement: Sequence[int],
        exactly: bool,
        bounds: Sequence[int] | None = None,
    ) -> tuple[tuple[int, ...], Times]:
        """Return the bounds of the chunks in layers, and their times."""
        given = None if bounds is None else tuple(bounds)
        splits, layers = layout.schedule not in WHOLE_BACKWARDS, self.layers(layout, exactly)
        key = (placement, layout.chunks, splits, id(layers), exactly or layout.micro_batch, id(links), given)
        if key not in self._splits:
            times = self.stage_times(layout, links, exactly, 1 if exactly else layout.micro_batch)
            if given is None:
                # Roughly, a split that is even for one sample is so for any number.
                fastest, paces = _fastest(self.stage_times(layout, links, exactly), placement)
                given = self._even_bounds(tuple(fastest.total.tolist()), len(placement), paces)
            self._splits[key] = given, chunk_times([times[stage] for stage in placement], given)
        return self._splits[key]

    def stage_times(self, layout: Layout, links: LayoutLinks, exactly: bool = True, samples: int = 1) -> list[Times]:
        """Return all layers' times for each stage, on the slowest of its devices: its ranks wait for each other.

        Roughly, the times are estimated for micro-batches of this many samples.
        """
        splits, layers = layout.schedule not in WHOLE_BACKWARDS, self.layers(layout, exactly)
        key = (id(layers), id(links), splits, samples)  # the profile keeps layers
        if key not in self._stage_times:
            of_device: dict[object, Times] = {}
            for device in {device: None for devices in links.devices for device in devices}:
                times = layer_times(layers, device, links.over_tensor_ranks, samples, links.overlap, splits)
                of_device[device] = times.scaled(self._factors[layout.units])
            slowest = {
                stage: max((of_device[d] for d in links.devices[stage]), key=lambda times: float(times.total.sum()))
                for stage in set(links.first_alike)
            }
            self._stage_times[key] = [slowest[stage] for stage in links.first_alike]
        return self._stage_times[key]

    def _memory_of(
        self, split: SplitLayout, replay: MemoryReplay, timed: int, gathered: Iterable[int]
    ) -> tuple[StageMemory, ...]:
        """Return the memory of each stage, as the calibration corrects it.

        timed: micro-batches of the program; gathered: bytes of sharded weights at a time, of each stage.
        """
        model, samples = self.memory_model(split.layout.units), untimed_flight(split.layout, timed)
        stages = enumerate(zip(map(self.capacity, split.links.devices), gathered, strict=True))
        found = (model.stage(replay, split.bounds, split.layout, k, *room, samples, live) for k, (room, live) in stages)
        return tuple(map(self.calibration.correct_memory, found))

    def _freed(self, split: SplitLayout, replay: MemoryReplay) -> list[list[int]]:
        """Return the bytes that activations leave in each run of each stage below their peak, if weights fill them."""
        offload, layout = split.policy.weight_offload, split.layout
        if offload is None or not offload.fills or self.profile(layout.units).device != "cuda":
            return []
        model, found = self.memory_model(layout.units), []
        for stage in range(layout.stages):
            chunks = model.chunks(replay, split.bounds, layout, stage)
            most = replay.peak(stage, chunks).within
            found.append([most - nbytes for nbytes in replay.runs(stage, chunks)])
        return found

    def capacity(self, devices: Sequence[Device]) -> tuple[int, int]:
        """Return the bytes of the smallest of some devices, and of the memory of its host that each rank may take."""
        given = self.profile().config.offload.host_memory_gib
        host = min(device.host_memory for device in devices) if given is None else int(given * 2**30 / self._on_host)
        return min(device.memory for device in devices), host

    def rough_memory(self, layout: Layout) -> Iterator[StageMemory]:
        """Yield about the memory of the stages that may be the fullest, scaled from that of a single sample.

        No prediction is needed, only those stages' lists of instructions. With policies by layer it is the least that these can
        make of it.
        """
        layout = _uniform(layout, recompute=1)
        links, timed = self.links(layout), timed_micro_batches(layout, exactly=False)
        memory, replay = self.memory_model(layout.units), self._programs.replay(layout, timed, roughly=True)
        bounds, _ = self._chunks(layout, links, replay.placement, exactly=False)
        samples, one = layout.micro_batch * untimed_flight(layout, timed), layout.model_copy(update={"micro_batch": 1})
        # A long pipeline is the fullest at its ends, or in the middle.
        for stage in sorted({0, 1, layout.stages // 2, layout.stages - 2, layout.stages - 1}):
            if 0 <= stage < layout.stages:
                if (layout, stage) not in self._rough:
                    found = memory.stage(replay, bounds, one, stage, *self.capacity(links.devices[stage]), samples)
                    self._rough[layout, stage] = self.calibration.correct_memory(found)
                yield self._rough[layout, stage]

    def split_carefully(self, layout: Layout, links: LayoutLinks) -> tuple[int, ...]:
        """Return the chunks' bounds in layers with even stages and the shortest step; takes its time."""
        placement = placement_of(layout.placement, layout.stages, layout.chunks)
        fastest, paces = _fastest(self.stage_times(layout, links), placement)
        # A step's length is the schedule's makespan. Each chunk's cost is divided into parts as the whole model's.
        shares = by_op(fastest.compute.sum(axis=1) / fastest.total.sum())
        policy, timed = replace(self.profile().policy(layout.zero), stage=0), timed_micro_batches(layout, exactly=False)
        none = Buckets(((),) * len(placement), ())
        simulation = self._programs.make(layout, none, policy, timed, roughly=True)

        def step(costs: Sequence[float]) -> float:
            return simulation.makespan(lambda i: shares.get(i.op, 0.0) * costs[i.chunk])

        costs = segment_costs(fastest.total.tolist())
        return partition_layers(costs, len(placement), placement=placement, step=step, paces=paces).bounds

    def split_within(self, step: StepPrediction) -> tuple[int, ...] | None:
        """Return the most even bounds within the devices' memory, for a layout that doesn't fit; None if there are none.

        Memory that isn't the layers' own is assumed to stay.
        """
        layout, links, placement = step.layout, step.split.links, step.program.placement
        state, activations = self.memory_model(layout.units).of_layers(layout)
        ties = [spec.key if isinstance(spec, TiedLayerSpec) else None for spec in self.profile(layout.units).specs]
        limit = StageLimit(0.0, state, activations, most_in_flight(step.program), ties)
        own = cut(step.split.bounds, limit.chunk_bytes()).loads(placement)
        limit = replace(limit, limit=min(m.capacity - m.reserved + own[m.stage] for m in step.memory))
        fastest, paces = _fastest(self.stage_times(layout, links), placement)
        costs = segment_costs(fastest.total.tolist())
        try:
            return partition_layers(costs, len(placement), placement=placement, limit=limit, paces=paces).bounds
        except PartitionError:
            return None


def _uniform(layout: Layout, recompute: int) -> Layout:
    """Return the layout, with policies by layer as one in which all layers are recomputed, or none is."""
    return layout.model_copy(update={"policy": None, "recompute": recompute}) if layout.is_by_layer else layout


def _fastest(times: Sequence[Times], placement: Sequence[int]) -> tuple[Times, tuple[float, ...] | None]:
    """Return the times of the fastest stage, and each chunk's total over that one's; None if all stages are equally fast."""
    if len({id(each) for each in times}) == 1:
        return times[0], None
    totals = [float(each.total.sum()) for each in times]
    least = min(totals)
    return times[totals.index(least)], None if least == max(totals) else tuple(totals[s] / least for s in placement)
