"""Prediction of a layout's training step: the program that the executor would run, timed by simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import chain
from typing import Literal, TypeVar

import numpy as np

from parallel3d.config.layout import Layout
from parallel3d.costs.devices import Device
from parallel3d.costs.layer_profile import LayerProfile
from parallel3d.costs.profilers import LayerCost
from parallel3d.partition.chain import segment_costs
from parallel3d.partition.split import partition_layers
from parallel3d.planner.calibrate.calibration import Calibration
from parallel3d.planner.network.links import Network
from parallel3d.planner.predict.chunk_memory import MemoryReplay
from parallel3d.planner.predict.chunks import Chunks
from parallel3d.planner.predict.costs import SplitLayout, StepCost, StepPrediction
from parallel3d.planner.predict.memory import MemoryModel, Room
from parallel3d.planner.predict.policies import choose_policies
from parallel3d.planner.predict.profile import ModelProfile, frozen_infos, layer_units
from parallel3d.planner.predict.program import (
    Programs,
    make_buckets,
    rough_buckets,
    timed_micro_batches,
    untimed_flight,
)
from parallel3d.planner.predict.sharded import sharded_weights
from parallel3d.planner.predict.timing import Floats, LayoutLinks, Times, chunk_times, layer_times
from parallel3d.planner.search.model import PlannedModel
from parallel3d.planner.search.result import StageMemory
from parallel3d.schedule.builders import WHOLE_BACKWARDS, placement_of
from parallel3d.schedule.instructions import Program
from parallel3d.schedule.lifetimes import LiveLimits
from parallel3d.schedule.lowering import lower
from parallel3d.schedule.timing import Simulation
from parallel3d.zero.policy import live_limits

Units = Literal["half"] | None  # of layers, see Layout
_Seconds = TypeVar("_Seconds", float, Floats)


class Predictor:
    """Predicts steps of one model on one cluster, on as many of its GPUs as a layout has ranks.

    Predictions have all gradient buckets, and micro-batches of their real size. A rough prediction, as for bounds, has a few
    buckets, and estimates micro-batches from those of a single sample.

    - profile: of the layers as they are given. A layout whose units are "half" is predicted by the profile of half blocks,
      which is made when it is first needed.
    - network: of the cluster as the calibration corrects it.
    - measured: seconds of each layer on the cluster's device. Predicted times are corrected by the ratio, in every layout.
    """

    def __init__(
        self,
        model: PlannedModel,
        profile: ModelProfile,
        network: Network,
        calibration: Calibration | None = None,
        measured: Sequence[LayerCost] | None = None,
    ):
        self.model, self.network, self.calibration = model, network, calibration or Calibration()
        self._on_host = max(Counter(gpu.host for gpu in network.cluster.gpus).values())
        self._memories: dict[Units, MemoryModel] = {None: MemoryModel(profile)}
        self._factors: dict[Units, Floats | float] = {None: 1.0, "half": 1.0}
        if measured is not None:
            seconds, expected = np.array(measured).T, self.expected.compute
            factors = np.divide(seconds, expected, out=np.ones_like(expected), where=(seconds > 0) & (expected > 0))
            blocks = [k for k, name in enumerate(profile.names) for _ in range(1 + (name == "Block"))]
            self._factors = {None: factors, "half": factors[:, blocks]}
        self.programs = Programs()
        self._links = cache(partial(LayoutLinks, network))
        self._stage_times: dict[tuple[object, ...], list[Times]] = {}
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

    def layers(self, layout: Layout, roughly: bool = False) -> tuple[LayerProfile, ...]:
        """Return the profiles of the layers on a rank of the layout, of a single sample if roughly."""
        return self.profile(layout.units).layers(layout, 1 if roughly else None)

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
        if layout.is_by_layer:
            split = self.split(layout.model_copy(update={"policy": "cheap"}), places, bounds)
            layout = self._choose(split, places, compute)
            if bounds is None and (even := self.split(layout, places)).bounds != split.bounds:
                layout, split = self._choose(even, places, compute), even
            bounds = split.bounds
        split = self.split(layout, places, bounds)
        limits = self._limits(split)
        best = self._step(split, compute, limits[0])
        # More room for gathered weights leaves less for the rest: bisect for the largest limit that fits, while it helps.
        fits, over = 0, len(limits) if best.fits else 1
        while over - fits > 1:
            k = min(2 * fits + 1, over - 1) if over == len(limits) else (fits + over) // 2
            step = self._step(split, compute, limits[k])
            if not step.fits:
                over = k
            elif step.seconds < best.seconds:
                best, fits = step, k
            else:
                break
        return best

    def _limits(self, split: SplitLayout) -> Sequence[LiveLimits | None]:
        """Return the limits of sharded weights that may be gathered, the least room first; None if all weights are whole."""
        if split.sharded is None:
            return [None]
        return live_limits(self.profile().config.zero_optimization, split.sharded.elements)

    def _choose(self, split: SplitLayout, places: Sequence[int] | None, compute: Program | None) -> Layout:
        """Return the layout with a policy for each layer, as it is split."""
        layout, least = split.layout, self._limits(split)[0]

        def memory_of(own: Layout) -> tuple[StageMemory, ...]:
            other = split if split.sharded is None else self.split(own, places, split.bounds)
            return self._fill(replace(other, layout=own), compute, least)[1]

        program = self._fill(split, compute, least)[0].program
        samples = untimed_flight(layout, timed_micro_batches(layout))
        return choose_policies(self.profile(layout.units), split, program, samples, memory_of)

    def _fill(
        self, split: SplitLayout, compute: Program | None, limits: LiveLimits | None
    ) -> tuple[Simulation, tuple[StageMemory, ...]]:
        """Return the program of a split layout, and the memory of each stage. limits: see _limits."""
        layout, micro_batches = split.layout, timed_micro_batches(split.layout)
        replay = self.programs.replay(layout, micro_batches) if compute is None else MemoryReplay(lower(compute))
        given = layout, split.buckets, split.policy, micro_batches, compute
        if split.sharded is None or limits is None:
            simulation, gathered = self.programs.make(*given), [0] * layout.stages
        else:
            freed, overlap = self._freed(split, replay), split.sharded.overlap(split.links)
            simulation = self.programs.make(*given, partial(split.sharded.simulation, limits, freed, overlap))
            gathered = split.sharded.gathered(simulation.program, freed)
        return simulation, self._memory_of(split, replay, simulation.program.num_micro_batches, gathered)

    def _step(self, split: SplitLayout, compute: Program | None, limits: LiveLimits | None) -> StepPrediction:
        """Predict a split layout. limits: see _limits."""
        simulation, memory = self._fill(split, compute, limits)
        cost, makespan = self._timed(split, simulation)
        optimizer = self.calibration.factors["optimizer"].value * max(
            map(split.update_seconds, range(split.layout.stages))
        )
        seconds = makespan + optimizer + self.calibration.fixed.value
        return StepPrediction(split, simulation, cost, makespan, optimizer, seconds, memory, limits)

    def cooled(self, seconds: _Seconds, computing: _Seconds) -> _Seconds:
        """Return `seconds` of devices that compute for `computing` of them, corrected for the idle time (Calibration.idle)."""
        return seconds - self.calibration.idle.value * (seconds - computing)

    def _timed(self, split: SplitLayout, simulation: Simulation) -> tuple[StepCost, float]:
        """Return the costs at the clock of a device with the step's share of idle time, and the pipeline's seconds."""
        cost, layout = split.cost, split.layout
        seconds = cost.makespan(simulation, layout.micro_batches)
        if self.calibration.idle.value > 0:
            computing = float(cost.times.total.sum()) * layout.micro_batches / layout.stages
            factor = self.cooled(seconds, computing) / seconds
            cost = replace(cost, times=cost.times.scaled(factor))
            seconds = cost.makespan(simulation, layout.micro_batches)
        return cost, seconds

    def split(
        self,
        layout: Layout,
        places: Sequence[int] | None = None,
        bounds: Sequence[int] | None = None,
        roughly: bool = False,
    ) -> SplitLayout:
        """Split a layout; roughly, the parameters of equal owners count as one. places, bounds: see predict."""
        links, profile = self.links(layout, places), self.profile(layout.units)
        chunks, times = self.chunks(layout, links, bounds, roughly)
        stages = profile.stage_parameters(chunks, merged=roughly)
        layers, samples = self.layers(layout, roughly), layout.micro_batch if roughly else 1
        frozen = [frozen_infos(layers, () if roughly else chunks.layers_on(k)) for k in range(layout.stages)]
        policies = [profile.policy(layout.zero, layout.replicas, infos) for infos in map(chain, stages, frozen)]
        count = len(chunks.placement)
        buckets = (rough_buckets if roughly else make_buckets)(stages, count, policies[0], layout.replicas)
        units = layer_units(profile.specs, layers) if layout.zero == 3 and not roughly else ()
        sharded = sharded_weights(chunks, policies, layers, units, stages, frozen) if units else None
        where, moments = (layout, chunks.placement, chunks.bounds), self.memory_model(layout.units).moments
        return SplitLayout(*where, links, layers, samples, times, policies, stages, buckets, moments, sharded)

    def links(self, layout: Layout, places: Sequence[int] | None = None) -> LayoutLinks:
        """Return the links of the layout's ranks. places: see predict."""
        return self._links(layout.shape, range(layout.world_size) if places is None else tuple(places))

    def chunks(
        self, layout: Layout, links: LayoutLinks, bounds: Sequence[int] | None = None, roughly: bool = False
    ) -> tuple[Chunks, Times]:
        """Return the split of the layers over chunks, and the times of these. bounds: see predict."""
        given = None if bounds is None else tuple(bounds)
        placement = placement_of(layout.placement, layout.stages, layout.chunks)
        splits, samples = layout.schedule not in WHOLE_BACKWARDS, layout.micro_batch if roughly else 1
        key = placement, splits, id(self.layers(layout, roughly)), samples, id(links), given
        if key not in self._splits:
            times = self.stage_times(layout, links, roughly, samples)
            if given is None:
                # Roughly, a split that is even for one sample is even for any number.
                fastest, paces = fastest_of(self.stage_times(layout, links, roughly), placement)
                given = self._even_bounds(tuple(fastest.total.tolist()), len(placement), paces)
            self._splits[key] = given, chunk_times([times[stage] for stage in placement], given)
        found, times_of = self._splits[key]
        return Chunks(layout, placement, found), times_of

    def stage_times(self, layout: Layout, links: LayoutLinks, roughly: bool = False, samples: int = 1) -> list[Times]:
        """Return all layers' times for each stage, on the slowest of its devices: its ranks wait for each other.

        Roughly, the times are estimated for micro-batches of this many samples.
        """
        splits, layers = layout.schedule not in WHOLE_BACKWARDS, self.layers(layout, roughly)
        key = (id(layers), id(links), splits, samples)  # the profile keeps layers
        if key not in self._stage_times:
            of_device: dict[object, Times] = {}
            for device in {device: None for devices in links.devices for device in devices}:
                times = layer_times(layers, device, links.over_tensor_ranks, samples, links.overlap, splits)
                of_device[device] = times.scaled(self._factors[layout.units])
            self._stage_times[key] = [
                max((of_device[d] for d in devices), key=lambda times: float(times.total.sum()))
                for devices in links.devices
            ]
        return self._stage_times[key]

    def _memory_of(
        self, split: SplitLayout, replay: MemoryReplay, timed: int, gathered: Iterable[int]
    ) -> tuple[StageMemory, ...]:
        """Return the memory of each stage, as the calibration corrects it.

        timed: micro-batches of the program; gathered: bytes of sharded weights at a time, of each stage.
        """
        model, samples = self.memory_model(split.layout.units), untimed_flight(split.layout, timed)
        stages = enumerate(zip(map(self.capacity, split.links.devices), gathered, strict=True))
        found = (model.stage(replay, split, k, room, samples, live) for k, (room, live) in stages)
        return tuple(map(self.calibration.correct_memory, found))

    def _freed(self, split: SplitLayout, replay: MemoryReplay) -> list[list[int]]:
        """Return the bytes that activations leave in each run of each stage below their peak, if weights fill them."""
        offload, layout = split.policy.weight_offload, split.layout
        if offload is None or not offload.fills or self.profile(layout.units).device != "cuda":
            return []
        model, found = self.memory_model(layout.units), []
        for stage in range(layout.stages):
            chunks = model.chunks(replay, split, stage)
            most = replay.peak(stage, chunks).within
            found.append([most - nbytes for nbytes in replay.runs(stage, chunks)])
        return found

    def capacity(self, devices: Sequence[Device]) -> Room:
        """Return the bytes of the smallest of some devices, and of the memory of its host that each rank may take."""
        given = self.profile().config.offload.host_memory_gib
        host = min(device.host_memory for device in devices) if given is None else int(given * 2**30 / self._on_host)
        return Room(min(device.memory for device in devices), host)


def fastest_of(times: Sequence[Times], placement: Sequence[int]) -> tuple[Times, tuple[float, ...] | None]:
    """Return the times of the fastest stage, and each chunk's total over that one's; None if all stages are equally fast."""
    if len({id(each) for each in times}) == 1:
        return times[0], None
    totals = [float(each.total.sum()) for each in times]
    least = min(totals)
    return times[totals.index(least)], None if least == max(totals) else tuple(totals[s] / least for s in placement)
