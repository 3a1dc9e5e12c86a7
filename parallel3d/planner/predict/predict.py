"""A training step of one layout, predicted: the program that the executor would run, timed by simulation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch

from parallel3d.config.layout import Layout
from parallel3d.costs.profilers import LayerSeconds
from parallel3d.errors import PartitionError
from parallel3d.parameters import ParameterInfo
from parallel3d.partition.chain import cut, segment_costs
from parallel3d.partition.limit import StageLimit
from parallel3d.partition.split import partition_layers
from parallel3d.planner.calibrate.calibration import Calibration
from parallel3d.planner.cluster.cluster import Device
from parallel3d.planner.network.links import Network
from parallel3d.planner.predict.costs import (
    Least,
    host_of_stages,
    least_computing,
    makespan,
    reducing,
    reduction_seconds,
    reductions,
    step_cost,
    traffic_of_each,
    with_reducing,
)
from parallel3d.planner.predict.flight import Replays
from parallel3d.planner.predict.memory import MemoryModel
from parallel3d.planner.predict.outlook import Outlook
from parallel3d.planner.predict.profile import LayerProfile, ModelProfile
from parallel3d.planner.predict.program import (
    Buckets,
    Programs,
    make_buckets,
    one_sample,
    rough_buckets,
    timed_micro_batches,
    untimed_flight,
    with_collectives,
)
from parallel3d.planner.predict.timing import Floats, LayoutLinks, Shape, StepCost, Times, chunk_times, layer_times
from parallel3d.planner.search.model import PlannedModel
from parallel3d.planner.search.result import StageMemory
from parallel3d.schedule.builders import WHOLE_BACKWARDS, placement_of
from parallel3d.schedule.instructions import Program
from parallel3d.schedule.lowering import lower
from parallel3d.schedule.memory import ChunkBytes, bytes_in_flight
from parallel3d.schedule.timing import Simulation
from parallel3d.specs import TiedLayerSpec
from parallel3d.zero.memory import update_traffic
from parallel3d.zero.policy import ZeroPolicy

_Seconds = TypeVar("_Seconds", float, Floats)
_SMALL = 256  # ranks; on more, a rough prediction takes all stages' links to be alike


class Predictor:
    """Predicts steps of one model on one cluster, of which it takes as many GPUs as a layout has ranks.

    network: of the cluster as the calibration corrects it; moments: see predict_state; measured: seconds
    of each layer on the cluster's device, by which what its work would take is multiplied, in whatever layout; beside: one of
    the same network, to share what its layouts have in common.
    """

    def __init__(
        self,
        model: PlannedModel,
        profile: ModelProfile,
        network: Network,
        calibration: Calibration | None = None,
        moments: int = 2,
        measured: Sequence[LayerSeconds] | None = None,
        beside: Predictor | None = None,
    ):
        self.model, self.profile, self.network = model, profile, network
        self.calibration = calibration or Calibration()
        self.moments = moments
        self._measured = measured
        self._memory = MemoryModel(profile)
        self._links: dict[tuple[Shape, tuple[int, ...] | None, bool], LayoutLinks] = {}
        self._times: dict[tuple[object, ...], Times] = {}
        self._of_chunks: dict[tuple[object, ...], tuple[tuple[int, ...], tuple[int, ...], Times]] = {}
        self._buckets: dict[int, Buckets] = {}
        self._sizes: dict[int, list[int]] = {}
        self._bounds: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._programs = Programs()
        if beside is not None:
            self._programs, self._links = beside._programs, beside._links

    def layers(self, layout: Layout) -> tuple[LayerProfile, ...]:
        """Profiles of the layers on a rank of the layout."""
        return self.profile.layers(layout.slices, layout.sequence_parallel, layout.micro_batch, layout.recompute)

    def links(self, layout: Layout, places: Sequence[int] | None = None, exactly: bool = True) -> LayoutLinks:
        """places: the GPU of each rank, in the cluster's order by default."""
        shape = (layout.stages, layout.replicas, layout.slices)
        roughly = not exactly and layout.world_size > _SMALL
        key = (shape, None if places is None else tuple(places), roughly)
        if key not in self._links:
            placed = range(layout.world_size) if places is None else places
            self._links[key] = LayoutLinks(self.network, shape, placed, roughly)
        return self._links[key]

    def times(self, layout: Layout, links: LayoutLinks, device: Device, exactly: bool = True) -> Times:
        """Of each layer of the layout on one kind of device; else from what a single sample asks for."""
        numbers = (layout.slices, layout.sequence_parallel, layout.micro_batch, bool(layout.recompute))
        splits = layout.schedule not in WHOLE_BACKWARDS
        key = (numbers, device, id(links), exactly, splits)
        if key not in self._times:
            layers = self.layers(layout if exactly else one_sample(layout))
            samples = 1 if exactly else layout.micro_batch
            times = layer_times(layers, device, links.over_slices, samples, links.overlap, splits)
            self._times[key] = times if self._measured is None else times.scaled(self._factors)
        return self._times[key]

    @cached_property
    def _factors(self) -> Floats:
        assert self._measured is not None
        return self.expected.factors_of(self._measured)

    @cached_property
    def expected(self) -> Times:
        """Of each layer whole, by its work alone, on the device that layers are measured on."""
        return layer_times(self.profile.layers(), self.network.cluster.gpus[0].device, lambda collective: 0.0)

    @property
    def least_factor(self) -> float:
        """By how much all layers together take less time than their work would, 1 where they don't."""
        if self._measured is None:
            return 1.0
        return min(1.0, float(np.array(self._measured).sum() / self.expected.total.sum()))

    def predict(
        self,
        layout: Layout,
        places: Sequence[int] | None = None,
        exactly: bool = False,
        whole: bool = False,
        bounds: Sequence[int] | None = None,
        compute: Program | None = None,
    ) -> Outlook:
        """Predict one step of a fully specified layout.

        exactly: with all gradient buckets, and with micro-batches of their real size.
        whole: simulate more micro-batches, in most cases all of them.
        bounds: the stages' layers, if they are split already.
        compute: the schedule, if it isn't a named one.
        """
        links, layers = self.links(layout, places, exactly), self.layers(layout if exactly else one_sample(layout))
        placement, bounds, times = self._chunks(layout, links, exactly, bounds)
        policy = self.policy(layout)
        stages = self._stage_parameters(layout, bounds, placement)
        if exactly:
            buckets = make_buckets(stages, len(placement), policy, layout.replicas)
        else:
            buckets = self._rough_buckets(stages, len(placement))
        beside = reducing(links, placement, buckets, policy)
        times = with_reducing(times, beside)
        samples = 1 if exactly else layout.micro_batch
        cost = step_cost(layout, links, layers, bounds, placement, times, buckets, policy, samples)
        if compute is None:
            timed = timed_micro_batches(layout, exactly, whole)
            simulation = self._programs.simulation(layout, buckets, policy, timed, roughly=not exactly)
        else:
            timed = compute.num_micro_batches
            simulation = Simulation(with_collectives(lower(compute), layout, buckets, policy))
        cost, seconds = self._timed(layout, simulation, cost, placement, timed)
        optimizer = self._optimizer_seconds(stages, policy, links, exactly)
        total, reduced = seconds + optimizer + self.calibration.fixed.value, reductions(layout, buckets, policy)
        return Outlook(
            layout, bounds, links, simulation, cost, timed, exactly, seconds, optimizer, total, reduced, beside
        )

    def _timed(
        self, layout: Layout, simulation: Simulation, cost: StepCost, placement: Sequence[int], timed: int
    ) -> tuple[StepCost, float]:
        """(the costs at the clock of a device that has computed and idled so long, the pipeline's seconds)."""
        times = cost.times
        untimed = layout.micro_batches - timed
        seconds = makespan(simulation.length(cost.cost(), cost.host()), times, placement, untimed)
        if self.calibration.idle.value > 0:
            computing = float(times.total.sum()) * layout.micro_batches / layout.stages
            times = times.scaled(np.full(times.exchanges.shape, self.cooled(seconds, computing) / seconds))
            cost = replace(cost, times=times)
            seconds = makespan(simulation.length(cost.cost(), cost.host()), times, placement, untimed)
        return cost, seconds

    def cooled(self, seconds: _Seconds, computing: _Seconds) -> _Seconds:
        """What devices that compute for so many of these seconds, and idle for the others, take (see Calibration.idle)."""
        return seconds - self.calibration.idle.value * (seconds - computing)

    def held(self, slices: int, sequence_parallel: bool, recompute: int) -> int:
        """Bytes of activations that a micro-batch of one sample leaves for its backward, over all layers."""
        layout = Layout(slices=slices, sequence_parallel=sequence_parallel, recompute=recompute, micro_batch=1)
        return self._memory.held(layout)

    def least(self, layout: Layout) -> Least:
        """Bounds of a prediction of the layout.

        Every stage works off all micro-batches, after those before it have begun the first one, and before they end the last
        one where backwards are whole; and its replicas exchange all gradients and weights. Then the optimizer steps.
        """
        links = self.links(layout, exactly=False)
        placement, bounds, times = self._chunks(layout, links, exactly=False)
        policy, stages = self.policy(layout), self._stage_parameters(layout, bounds, placement)
        buckets = self._rough_buckets(stages, len(placement))
        times = with_reducing(times, reducing(links, placement, buckets, policy))
        exchanging = reduction_seconds(links, placement, reductions(layout, buckets, policy))
        optimizer = self._optimizer_seconds(stages, policy, links, exactly=False)
        computing, evenly, mean = least_computing(layout, times, placement)
        host = layout.micro_batches * host_of_stages(times, placement)
        return Least(
            max(self.cooled(computing, mean), float(exchanging.max()), float(host.max())) + optimizer,
            max(self.cooled(evenly, mean), float(exchanging.mean()), float(host.mean())) + optimizer,
        )

    def _rough_buckets(self, stages: list[list[ParameterInfo]], num_chunks: int) -> Buckets:
        """Made once for each of the profile's stage_parameters, which it keeps."""
        if id(stages) not in self._buckets:
            self._buckets[id(stages)] = rough_buckets(stages, num_chunks)
        return self._buckets[id(stages)]

    def _chunks(
        self,
        layout: Layout,
        links: LayoutLinks,
        exactly: bool,
        bounds: Sequence[int] | None = None,
    ) -> tuple[tuple[int, ...], tuple[int, ...], Times]:
        """(the stage of each, bounds in layers, seconds)."""
        shape = (layout.stages, layout.chunks, layout.placement, layout.schedule not in WHOLE_BACKWARDS)
        numbers = (layout.slices, layout.sequence_parallel, layout.micro_batch, bool(layout.recompute))
        key = (*shape, *numbers, id(links), exactly, None if bounds is None else tuple(bounds))
        if key not in self._of_chunks:
            placement = placement_of(layout.placement, layout.stages, layout.chunks)
            of_stages = self._stage_times(layout, links, exactly)
            if bounds is None:
                # Roughly, a split that is even for one sample is so for any number.
                of_even = of_stages if exactly else self._stage_times(one_sample(layout), links, exactly)
                bounds = self._split(layout, of_even, placement)
            times = chunk_times([of_stages[stage] for stage in placement], bounds)
            self._of_chunks[key] = placement, tuple(bounds), times
        return self._of_chunks[key]

    def _stage_parameters(
        self, layout: Layout, bounds: tuple[int, ...], placement: tuple[int, ...]
    ) -> list[list[ParameterInfo]]:
        return self.profile.stage_parameters(layout.slices, layout.sequence_parallel, bounds, placement)

    def _optimizer_seconds(
        self, stages: list[list[ParameterInfo]], policy: ZeroPolicy, links: LayoutLinks, exactly: bool
    ) -> float:
        """Of the slowest stage's step. stages: their parameters."""
        if exactly:
            traffic = [float(update_traffic(own, policy, links.shape[1], self.moments)) for own in stages]
        else:
            if id(stages) not in self._sizes:
                self._sizes[id(stages)] = [sum(info.parameter.numel() for info in own) for own in stages]
            dtypes = [own[0].parameter.dtype if own else torch.float32 for own in stages]
            each = {d: traffic_of_each(d, policy, links.shape[1], self.moments) for d in dict.fromkeys(dtypes)}
            traffic = [each[dtype] * numel for dtype, numel in zip(dtypes, self._sizes[id(stages)], strict=True)]
        bandwidths = [min(device.memory_bandwidth for device in links.devices(s)) for s in range(len(stages))]
        slowest = max(nbytes / bandwidth for nbytes, bandwidth in zip(traffic, bandwidths, strict=True))
        return self.calibration.factors["optimizer"].value * slowest

    def memory(self, outlook: Outlook, every: bool = False) -> tuple[StageMemory, ...]:
        """Of each stage, as the calibration corrects it; of a rough prediction roughly, from what one sample takes.

        Of a rough one's long pipeline but the stages that may be the fullest, unless `every` one is wanted.
        """
        replays = Replays.of_program(outlook.program)
        only = None if outlook.exact or every else _ends(outlook.layout)
        return self._stage_memories(
            outlook.layout, outlook.links, outlook.bounds, outlook.timed, replays, outlook.exact, only
        )

    def chunk_bytes(self, outlook: Outlook) -> list[ChunkBytes]:
        """What a micro-batch holds on each chunk of an exact prediction, with weight gradients deferred."""
        return self._memory.chunk_bytes(outlook.program.placement, outlook.bounds, outlook.layout)

    def rough_memory(self, layout: Layout) -> Iterator[StageMemory]:
        """`memory` of a rough prediction of the layout, without one: of its programs only those stages' lists are needed."""
        links, timed = self.links(layout, exactly=False), timed_micro_batches(layout, exactly=False)
        _, bounds, _ = self._chunks(layout, links, exactly=False)
        replays = self._programs.replays(layout, timed, roughly=True)
        for stage in sorted(_ends(layout)):
            yield from self._stage_memories(layout, links, bounds, timed, replays, False, {stage})

    def _stage_memories(
        self,
        layout: Layout,
        links: LayoutLinks,
        bounds: Sequence[int],
        timed: int,
        replays: Replays,
        exactly: bool,
        only: Collection[int] | None,
    ) -> tuple[StageMemory, ...]:
        traced = layout if exactly else one_sample(layout)
        samples = 1 if exactly else layout.micro_batch * untimed_flight(layout, timed)
        stages = self._memory.stages(replays, bounds, traced, links.capacities, samples, only)
        return tuple(map(self.calibration.correct_memory, stages))

    def policy(self, layout: Layout) -> ZeroPolicy:
        """What ZeRO does under the layout's configuration."""
        return self.profile.policy(layout.zero)

    def _stage_times(self, layout: Layout, links: LayoutLinks, exactly: bool) -> list[Times]:
        """Of each stage on the slowest of the devices that it lies on, all of whose ranks wait for each other."""
        slowest = {}
        for stage in set(links.first_alike):
            times = [self.times(layout, links, device, exactly) for device in links.devices(stage)]
            slowest[stage] = max(times, key=lambda times: float(times.total.sum()))
        return [slowest[stage] for stage in links.first_alike]

    def split_carefully(self, layout: Layout, links: LayoutLinks) -> tuple[int, ...]:
        """Bounds of the chunks in layers by which stages' sums are even and a step is the shortest; takes its time."""
        placement = placement_of(layout.placement, layout.stages, layout.chunks)
        of_stages = self._stage_times(layout, links, exactly=True)
        return self._split(layout, of_stages, placement, carefully=True)

    def split_within(self, outlook: Outlook, memory: Sequence[StageMemory]) -> tuple[int, ...] | None:
        """Bounds for a layout that was predicted and doesn't fit: even within what the devices hold; None where that can't be.

        memory: of the prediction. What isn't the layers' own is taken to stay.
        """
        layout, links = outlook.layout, outlook.links
        traced = layout if outlook.exact else one_sample(layout)
        samples = 1 if outlook.exact else layout.micro_batch
        state, activations = self._memory.of_layers(traced)
        placement = outlook.program.placement
        one = {c: ChunkBytes(saved=1, deferred=1) for c in range(len(placement))}
        flights = [
            max(bytes_in_flight(outlook.program.instructions[stage], {c: one[c]})) for c, stage in enumerate(placement)
        ]
        ties = [spec.key if isinstance(spec, TiedLayerSpec) else None for spec in self.profile.specs]
        limit = StageLimit(0.0, state, [samples * a for a in activations], flights, ties)
        own = cut(outlook.bounds, limit.chunk_bytes()).loads(placement)
        most = min(m.capacity - m.reserved + own[m.stage] for m in memory)
        of_stages = self._stage_times(layout, links, outlook.exact)
        fastest = min(of_stages, key=lambda times: float(times.total.sum()))
        paces = [float(of_stages[stage].total.sum() / fastest.total.sum()) for stage in placement]
        try:
            found = partition_layers(
                segment_costs(fastest.total.tolist()),
                len(placement),
                placement=placement,
                limit=replace(limit, limit=most),
                paces=paces,
            )
        except PartitionError:
            return None
        return found.bounds

    def _split(
        self, layout: Layout, of_stages: Sequence[Times], placement: Sequence[int], carefully: bool = False
    ) -> tuple[int, ...]:
        """Bounds of the chunks in layers: those with the smallest slowest chunk, or else see split_carefully."""
        shape = (layout.stages, layout.chunks, layout.placement)
        totals = [float(times.total.sum()) for times in of_stages]
        paces = tuple(total / min(totals) for total in totals)
        fastest = of_stages[totals.index(min(totals))]
        key = (*shape, paces, carefully, id(fastest))
        if key not in self._bounds:
            segments, count = segment_costs(fastest.total.tolist()), len(placement)
            several = placement if carefully and layout.chunks != 1 else None
            of_chunks = None if min(paces) == max(paces) else [paces[stage] for stage in placement]
            step = self._step_length(layout, fastest) if several is not None else None
            self._bounds[key] = partition_layers(segments, count, placement=several, step=step, paces=of_chunks).bounds
        return self._bounds[key]

    def _step_length(self, layout: Layout, times: Times) -> Callable[[Sequence[float]], float]:
        """How long the schedule takes with chunks of given costs, that are divided as the whole model's are."""
        shares = times.shares()
        none = Buckets(((),) * (layout.stages * layout.chunks), ())
        policy, timed = replace(self.policy(layout), stage=0), timed_micro_batches(layout, exactly=False)
        simulation = self._programs.simulation(layout, none, policy, timed, roughly=True)
        return lambda costs: simulation.makespan(lambda i: shares.get(i.op, 0.0) * costs[i.chunk])


def _ends(layout: Layout) -> set[int]:
    """Of a long pipeline the fullest stage is at one of its ends, or else in the middle."""
    return {0, 1, layout.stages // 2, layout.stages - 2, layout.stages - 1}
