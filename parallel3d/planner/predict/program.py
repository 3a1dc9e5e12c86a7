"""Program of a layout, as the executor of a run would have it, from its parameters' buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from parallel3d.config.layout import Layout
from parallel3d.parameters import ParameterInfo
from parallel3d.planner.predict.chunk_memory import MemoryReplay
from parallel3d.schedule.builders import build, looped_zero_bubble
from parallel3d.schedule.instructions import Program
from parallel3d.schedule.lowering import add_collectives, lower
from parallel3d.schedule.timing import Simulation
from parallel3d.zero.layout import Owners, bucket_limit, by_owners, lay_out
from parallel3d.zero.policy import ZeroPolicy

_ROUGH_BUCKETS = 4  # buckets of a chunk in a rough prediction
# Programs of more chunks x micro-batches are timed by their beginning and end: in between they repeat.
_MOST_STEPS = 2048
_GATHERED = 8  # a chunk whose weights are gathered counts as this many
_ROUNDS = 2  # how often the pipeline is filled by the micro-batches of a long program that are simulated
_LONG = 16  # number of stages from which a pipeline is long


@dataclass(frozen=True)
class Buckets:
    """Gradient buckets of a split model.

    of_chunk: elements of each bucket of each chunk; replicas: (owners, elements) of the buckets that several chunks hold, in
    the order in which REDUCE_REPLICAS counts them.
    """

    of_chunk: tuple[tuple[int, ...], ...]
    replicas: tuple[tuple[Owners, int], ...]


def make_buckets(
    stages: Sequence[Sequence[ParameterInfo]], num_chunks: int, policy: ZeroPolicy, num_replicas: int
) -> Buckets:
    """Return the buckets that the stages' reducers make. stages: parameters, see stage_parameters."""
    found: dict[Owners, list[int]] = {}
    for parameters in stages:
        for owners, infos in by_owners(parameters).items():
            found[owners] = [layout.numel for layout in lay_out(infos, policy, policy.num_shards(num_replicas))]
    replicas = [(owners, numel) for owners in sorted(found) if len(owners) > 1 for numel in found[owners]]
    return Buckets(tuple(tuple(found.get((c,), ())) for c in range(num_chunks)), tuple(replicas))


def rough_buckets(
    stages: Sequence[Sequence[ParameterInfo]], num_chunks: int, policy: ZeroPolicy, num_replicas: int
) -> Buckets:
    """Return equal buckets of each chunk: a few, but no fewer than the limit of a bucket's size allows.

    stages: one parameter for each set of owners, see ModelProfile.merged.
    """
    found = {info.owners: info.parameter.numel() for parameters in stages for info in parameters}
    sizes = [found.get((c,), 0) for c in range(num_chunks)]
    limit = bucket_limit(max(sizes), policy, policy.num_shards(num_replicas))
    counts = [max(_ROUGH_BUCKETS, size // limit) for size in sizes]
    replicas = [(owners, numel) for owners, numel in sorted(found.items()) if len(owners) > 1]
    return Buckets(tuple((size // n,) * n for size, n in zip(sizes, counts, strict=True)), tuple(replicas))


# Arguments of schedule.builders.build, and whether the search may be rough: its order is about as short.
_Schedule = tuple[str, int, int, int, str, bool]


def _schedule(layout: Layout, num_micro_batches: int, roughly: bool) -> _Schedule:
    is_rough = roughly and layout.schedule == "zb-looped"
    return layout.schedule, layout.stages, num_micro_batches, layout.chunks, layout.placement, is_rough


class Programs:
    """Programs of fully specified layouts, each part made once for all layouts that share it."""

    def __init__(self) -> None:
        lowered = cache(lambda schedule: lower(_compute(*schedule)))
        self._whole = cache(lambda schedule, added: add_collectives(lowered(schedule), *added))
        self._simulation = cache(lambda schedule, added: Simulation(self._whole(schedule, added)))
        self._alone = cache(lambda schedule: Simulation(lowered(schedule)))
        self._replay = cache(lambda schedule: MemoryReplay(lowered(schedule)))

    def make(
        self,
        layout: Layout,
        buckets: Buckets,
        policy: ZeroPolicy,
        num_micro_batches: int,
        compute: Program | None = None,
        simulate: Callable[[Program], Simulation] | None = None,
    ) -> Simulation:
        """Return the simulation of what the executor runs.

        compute: the schedule, if it isn't a named one; simulate: adds the gathers of sharded weights, if there are some.
        """
        owners, partitioned = tuple(owners for owners, _ in buckets.replicas), policy.stage > 0 and layout.replicas > 1
        added = tuple(map(len, buckets.of_chunk)), owners, partitioned, policy.reduce_per_micro_batch
        schedule = _schedule(layout, num_micro_batches, False)
        if compute is None and simulate is None:
            return self._simulation(schedule, added)
        program = self._whole(schedule, added) if compute is None else add_collectives(lower(compute), *added)
        return (simulate or Simulation)(program)

    def alone(self, layout: Layout, num_micro_batches: int) -> Simulation:
        """Return the simulation of a program without collectives, roughly, see _Schedule."""
        return self._alone(_schedule(layout, num_micro_batches, True))

    def replay(self, layout: Layout, num_micro_batches: int, roughly: bool = False) -> MemoryReplay:
        """Return the replay of a program without collectives, which hold nothing. roughly: see _Schedule."""
        return self._replay(_schedule(layout, num_micro_batches, roughly))


def _compute(name: str, stages: int, num_micro_batches: int, chunks: int, placement: str, roughly: bool) -> Program:
    if roughly:
        return looped_zero_bubble(stages, num_micro_batches, chunks, roughly=True)
    return build(name, stages, num_micro_batches, chunks, placement)


def timed_micro_batches(layout: Layout, roughly: bool = False) -> int:
    """Return how many micro-batches are simulated: enough to fill the pipeline a few times, in whole rounds of the stages.

    All are for gpipe, which holds all of them, and for programs that aren't long, unless roughly.
    """
    stages, wanted = layout.stages, layout.micro_batches
    steps = wanted * stages * layout.chunks * (_GATHERED if layout.zero == 3 else 1)
    if layout.schedule == "gpipe" or (not roughly and steps <= _MOST_STEPS):
        return wanted
    rounds = _ROUNDS + (not roughly and stages < _LONG)
    return min(wanted, rounds * stages + wanted % stages)


def untimed_flight(layout: Layout, timed: int) -> float:
    """Return micro-batches in flight on the first stage over those of a program with `timed` micro-batches."""
    if layout.schedule != "interleaved":
        return 1.0
    p, v = layout.stages, layout.chunks
    most = min(layout.micro_batches * v, (v + 1) * p - 1)  # see schedule.builders.interleaved
    return most / min(timed * v, most)
