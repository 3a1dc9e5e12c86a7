"""Seconds of each instruction of a layout's program, bounds of its step, and its prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch

from parallel3d.config.layout import Layout
from parallel3d.costs.devices import compute_seconds
from parallel3d.costs.layer_profile import LayerProfile
from parallel3d.costs.work import Collective, CollectiveKind, Work
from parallel3d.parameters import ParameterInfo
from parallel3d.planner.predict.chunks import Chunks
from parallel3d.planner.predict.program import Buckets
from parallel3d.planner.predict.sharded import ShardedWeights
from parallel3d.planner.predict.timing import Floats, LayoutLinks, Times, by_op
from parallel3d.planner.search.result import StageMemory, fullness_of
from parallel3d.schedule.instructions import Op, Program
from parallel3d.schedule.lifetimes import LiveLimits
from parallel3d.schedule.timing import Cost, CriticalPath, Simulation, Timeline
from parallel3d.zero.memory import update_traffic
from parallel3d.zero.policy import ZeroPolicy

# Collectives over a chunk's replicas, and how often they run in a step.
Reductions = tuple[tuple[Collective, float], ...]


@dataclass(frozen=True)
class StepCost:
    """Seconds of each instruction of a layout's program.

    times: of the chunks; links: by (operation, chunk, bucket) of what takes time on links, a message by its SEND.
    """

    times: Times
    links: Mapping[tuple[Op, int, int | None], float]

    def cost(self) -> Cost:
        """Return the device's seconds of each instruction."""
        compute, links = by_op(self.times.compute), self.links
        return lambda i: compute[i.op][i.chunk] if i.op in compute else links.get((i.op, i.chunk, i.bucket), 0.0)

    def host(self) -> Cost | None:
        """Return the host's seconds to call each instruction's operators; None if they never exceed the device's seconds."""
        if np.all(self.times.host <= self.times.compute):
            return None
        calls = by_op(self.times.host)
        return lambda i: calls[i.op][i.chunk] if i.op in calls else 0.0

    def without_links(self) -> StepCost:
        """Return the same with links that take no time, also inside of layers."""
        times = self.times
        return StepCost(Times(times.compute - times.exchanges, np.zeros_like(times.exchanges), times.host), {})

    def makespan(self, simulation: Simulation, micro_batches: int) -> float:
        """Return the makespan of a program with this many micro-batches. simulation: of the program, with these or fewer.

        Each further micro-batch makes the step longer by the seconds of the busiest stage, or of the busiest host.
        """
        program, length = simulation.program, simulation.length(self.cost(), self.host())
        of_chunks = self.times.total, self.times.host.sum(axis=0)
        pace, host = (float(of_stages(each, program.placement).max()) for each in of_chunks)
        return length.makespan + (micro_batches - program.num_micro_batches) * max(pace, length.pace, host)


@dataclass(frozen=True, eq=False)
class SplitLayout(Chunks):
    """A layout whose layers are split into chunks, with all that the seconds of its step depend on.

    - layers: profiles of the layers on a rank, for micro-batches of 1/`samples` of the layout's.
    - stages: parameters of each stage, and policies: of each; buckets: of their gradients; moments: elements of optimizer state
      for each of a parameter.
    - compute_times: times of the chunks without overlapping reductions of gradients.
    - sharded: weights that live as shards; None if all are whole, and in rough predictions.
    """

    links: LayoutLinks
    layers: Sequence[LayerProfile]
    samples: int
    compute_times: Times
    policies: Sequence[ZeroPolicy]
    stages: Sequence[Sequence[ParameterInfo]]
    buckets: Buckets
    moments: int
    sharded: ShardedWeights | None = None

    @property
    def policy(self) -> ZeroPolicy:
        """The ZeRO policy of all stages, except which shards of weights are in host memory."""
        return self.policies[0]

    @property
    def _weight_bytes(self) -> int:
        return (self.policy.weight_dtype or torch.float32).itemsize

    @property
    def _reduce_kind(self) -> CollectiveKind:
        return "reduce_scatter" if self.policy.stage > 0 else "all_reduce"

    @cached_property
    def reductions(self) -> tuple[Reductions, ...]:
        """The collectives over replicas of each chunk."""
        if self.layout.replicas == 1:
            return ((),) * len(self.buckets.of_chunk)
        times = float(self.layout.micro_batches) if self.policy.reduce_per_micro_batch else 1.0

        def of_chunk(numel: int) -> Reductions:
            reduced = Collective(self._reduce_kind, wire_bytes(self.policy) * numel), times
            gathered = Collective("all_gather", self._weight_bytes * numel), 1.0
            return (reduced,) if self.policy.stage == 0 else (reduced, gathered)

        return tuple(of_chunk(sum(numels)) for numels in self.buckets.of_chunk)

    @cached_property
    def reducing(self) -> Floats:
        """Seconds by which a backward of each chunk is longer if gradients are reduced in every micro-batch, [2, chunks].

        The first row is compute slowed by overlapping collectives, the second adding up the part that the rank keeps.
        """
        added = partial(reducing_seconds, self.policy, self.links)
        return np.array(list(map(added, self.buckets.of_chunk, self.placement))).T

    @cached_property
    def times(self) -> Times:
        """Times of the chunks, with what reductions add to their weights' gradients."""
        compute, exchanges = self.compute_times.compute.copy(), self.compute_times.exchanges.copy()
        slower, added = self.reducing
        compute[2] += slower + added
        exchanges[2] += slower
        return replace(self.compute_times, compute=compute, exchanges=exchanges)

    def reduction_seconds(self) -> Floats:
        """Return the seconds of all collectives over replicas, [stages]."""
        seconds = [
            sum(n * self.links.over_replicas(c.kind, c.nbytes, stage) for c, n in own)
            for own, stage in zip(self.reductions, self.placement, strict=True)
        ]
        return of_stages(np.array(seconds), self.placement)

    def update_seconds(self, stage: int) -> float:
        """Return the seconds of the optimizer's step on a stage.

        Offloaded state is copied in both directions at once, while other state is updated.
        """
        moved = update_traffic(self.stages[stage], self.policies[stage], self.layout.replicas, self.moments)
        rates = "memory_bandwidth", "host_bandwidth", "host_memory_bandwidth", "disk_bandwidth"
        return max(nbytes / self.links.slowest(rate, stage) for nbytes, rate in zip(moved, rates, strict=True))

    @cached_property
    def cost(self) -> StepCost:
        """The seconds of each instruction."""
        links, kind, wire, weight = self.links, self._reduce_kind, wire_bytes(self.policy), self._weight_bytes
        forward = self.times.compute[0].tolist()
        seconds: dict[tuple[Op, int, int | None], float] = {}
        for c, (stage, numels) in enumerate(zip(self.placement, self.buckets.of_chunk, strict=True)):
            after = self.placement[c + 1] if c + 1 < len(self.placement) else stage
            if after != stage:
                layer = self.layers[self.bounds[c + 1] - 1]
                sent, back = self.samples * layer.output_bytes, self.samples * layer.gradient_bytes
                seconds[Op.SEND_ACTIVATION, c, None] = links.send(sent, stage, after)
                seconds[Op.SEND_GRADIENT, c + 1, None] = links.send(back, after, stage)
            for bucket, numel in enumerate(numels):
                seconds[Op.REDUCE_GRADS, c, bucket] = links.over_replicas(kind, wire * numel, stage)
            # The chunk's first forward starts late: its layers wait for their own weights, while the next ones arrive.
            gathers = [links.over_replicas("all_gather", weight * numel, stage) for numel in numels]
            if sum(gathers) > 0 and self.sharded is None:
                seconds[Op.GATHER_PARAMS, c, None] = max(sum(gathers) - forward[c], *gathers)
        if self.sharded is not None:
            seconds |= self.sharded.gathers(links, self.placement)
        for bucket, (owners, numel) in enumerate(self.buckets.replicas):
            # Over the replicas of each stage first, then the shards over the stages that hold a copy.
            stages = sorted({self.placement[c] for c in owners})
            shard = wire * numel / (links.shape[1] if kind == "reduce_scatter" else 1)
            over_replicas = max(links.over_replicas(kind, wire * numel, stage) for stage in stages)
            seconds[Op.REDUCE_REPLICAS, owners[0], bucket] = over_replicas + links.over_stages(shard, tuple(stages))
        return StepCost(self.times, seconds)


def wire_bytes(policy: ZeroPolicy) -> int:
    """Return the bytes of an element of gradients on links: they travel as they are accumulated."""
    return (policy.communication_dtype or policy.accumulator_dtype(torch.float32)).itemsize


def reducing_seconds(policy: ZeroPolicy, links: LayoutLinks, numels: Sequence[int], stage: int) -> tuple[float, float]:
    """Return the seconds by which a backward that reduces buckets of these elements is longer; none if it reduces nothing.

    The first number is compute slowed by overlapping collectives, the second adding up the part that the rank keeps.
    """
    replicas = links.shape[1]
    if not policy.reduce_per_micro_batch or replicas == 1:
        return 0.0, 0.0
    reduced = sum(links.over_replicas("reduce_scatter", wire_bytes(policy) * n, stage) for n in numels)
    # Read twice and written once, in the accumulators' dtype.
    work = Work(moved=3 * policy.accumulator_dtype(torch.float32).itemsize * sum(numels) / replicas)
    return (links.overlap - 1.0) * reduced, max(compute_seconds(work, d) for d in links.devices[stage])


def of_stages(of_chunks: Floats, placement: Sequence[int]) -> Floats:
    """Return the sums of chunks' values by stage, [stages]."""
    sums: Floats = np.bincount(np.asarray(placement), weights=of_chunks).astype(np.float64)
    return sums


# A layout of half blocks, or with policies by layer, is preferred only if its step is shorter than another one's by this
# factor: it has to be worth building other layers, or reading the policies.
WORTH_HALVES = WORTH_POLICIES = 0.998


@dataclass(frozen=True)
class StepPrediction:
    """Predicted step and memory of a layout.

    - split: the layout with its layers as they are split.
    - simulation: of the pipeline's program, with fewer micro-batches than the layout's if these are too many.
    - makespan: seconds of the program; optimizer: seconds of the optimizer's step; seconds: of the whole step.
    - memory: of each stage; limits: of sharded weights that are gathered, if there are some.
    """

    split: SplitLayout
    simulation: Simulation
    cost: StepCost
    makespan: float
    optimizer: float
    seconds: float
    memory: tuple[StageMemory, ...]
    limits: LiveLimits | None = None

    @property
    def layout(self) -> Layout:
        """Layout that was predicted."""
        return self.split.layout

    @property
    def fits(self) -> bool:
        """Whether it fits into every device."""
        return fullness_of(self.memory) <= 1.0

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key: what fits comes first, then the shorter step."""
        worth = (WORTH_HALVES if self.layout.units else 1.0) * (WORTH_POLICIES if self.layout.is_by_layer else 1.0)
        return not self.fits, self.seconds / worth

    @property
    def program(self) -> Program:
        """The program with all that the executor runs."""
        return self.simulation.program

    @cached_property
    def timeline(self) -> Timeline:
        """Timeline of the micro-batches that were timed."""
        return self.simulation.run(self.cost.cost(), self.cost.host())

    @cached_property
    def critical_path(self) -> CriticalPath:
        """Critical path of the timeline."""
        return self.simulation.critical_path(self.cost.cost(), self.cost.host())

    @cached_property
    def exposed(self) -> float:
        """Seconds by which the makespan is shorter if links take no time."""
        alone = self.cost.without_links()
        return max(0.0, self.makespan - alone.makespan(self.simulation, self.layout.micro_batches))

    @cached_property
    def hosts(self) -> float:
        """Seconds by which the makespan is shorter if hosts take no time."""
        if self.cost.host() is None:
            return 0.0
        times = self.cost.times
        without = replace(self.cost, times=replace(times, host=0.0 * times.host))
        return self.makespan - without.makespan(self.simulation, self.layout.micro_batches)

    @property
    def bubble(self) -> float:
        """Share of stages x makespan in which no forward or backward runs."""
        return max(0.0, 1.0 - self._computing(self.cost.times.total) / self.makespan)

    def _computing(self, of_chunks: Floats) -> float:
        """Return the seconds of a step from those of chunks and one micro-batch, the mean of stages."""
        return float(of_chunks.sum()) * self.layout.micro_batches / self.layout.stages

    def breakdown(self) -> dict[str, float]:
        """Return the seconds of a step by what takes them, the mean of stages."""
        forward, inputs, weights = self.cost.without_links().times.compute
        parts = {
            "forward": self._computing(forward),
            "backward": self._computing(inputs + weights),
            "exposed communication": self.exposed,
            "host": self.hosts,
            "optimizer": self.optimizer,
        }
        return {**parts, "bubble": max(0.0, self.makespan + self.optimizer - sum(parts.values()))}
