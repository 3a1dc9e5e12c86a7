"""The program of a layout, as the executor of a run would have it, from its parameters' buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parallel3d.config.layout import Layout
from parallel3d.parameters import ParameterInfo
from parallel3d.planner.predict.flight import Replays
from parallel3d.schedule.builders import build
from parallel3d.schedule.instructions import Program
from parallel3d.schedule.lowering import add_collectives, lower, lower_rank
from parallel3d.schedule.timing import Simulation
from parallel3d.schedule.zero_bubble import looped_zero_bubble
from parallel3d.zero.buckets import Owners, by_owners, lay_out
from parallel3d.zero.policy import ZeroPolicy

_ROUGH_BUCKETS = 4  # of a chunk, in a rough prediction
# Programs of more chunks x micro-batches are timed by their beginning and end: in between they repeat.
_MOST_STEPS, _MOST_STEPS_WHOLE = 256, 2048
# In a rough prediction the pipeline is filled so many times.
_ROUGH_ROUNDS = 2
_LONG = 16  # stages


@dataclass(frozen=True)
class Buckets:
    """The gradient buckets of a split model. of_chunk: elements of each bucket of each chunk; replicas: those that several
    chunks hold, (owners, elements) in the order in which REDUCE_REPLICAS counts them.
    """

    of_chunk: tuple[tuple[int, ...], ...]
    replicas: tuple[tuple[Owners, int], ...]


def make_buckets(
    stages: Sequence[Sequence[ParameterInfo]], num_chunks: int, policy: ZeroPolicy, num_replicas: int
) -> Buckets:
    """As the stages' reducers make them. stages: parameters, see stage_parameters."""
    found: dict[Owners, list[int]] = {}
    for parameters in stages:
        for owners, infos in by_owners(parameters).items():
            found[owners] = [layout.numel for layout in lay_out(infos, policy, policy.num_shards(num_replicas))]
    replicas = [(owners, numel) for owners in sorted(found) if len(owners) > 1 for numel in found[owners]]
    return Buckets(tuple(tuple(found.get((c,), ())) for c in range(num_chunks)), tuple(replicas))


def rough_buckets(stages: Sequence[Sequence[ParameterInfo]], num_chunks: int) -> Buckets:
    """As many elements in few buckets."""
    found: dict[Owners, int] = {}
    for parameters in stages:
        own: dict[Owners, int] = {}
        for info in parameters:
            own[info.owners] = own.get(info.owners, 0) + info.parameter.numel()
        found.update(own)
    parts = [found.get((c,), 0) // _ROUGH_BUCKETS for c in range(num_chunks)]
    replicas = [(owners, numel) for owners, numel in sorted(found.items()) if len(owners) > 1]
    return Buckets(tuple((part,) * _ROUGH_BUCKETS for part in parts), tuple(replicas))


class Programs:
    """Programs of layouts of which nothing is left open, each part made once for all layouts that have the same one."""

    def __init__(self) -> None:
        self._computes: dict[_Shape, Program] = {}
        self._lowered: dict[_Shape, Program] = {}
        self._replays: dict[_Shape, Replays] = {}
        self._simulations: dict[tuple[object, ...], Simulation] = {}

    def simulation(
        self,
        layout: Layout,
        buckets: Buckets,
        policy: ZeroPolicy,
        num_micro_batches: int,
        roughly: bool = False,
    ) -> Simulation:
        """Of what the executor runs, made ready. roughly: of an order that is searched for, one about as short."""
        key, shards = _Shape.of(layout, num_micro_batches, roughly), policy.stage > 0 and layout.replicas > 1
        numbers = tuple(map(len, buckets.of_chunk)), tuple(owners for owners, _ in buckets.replicas)
        whole = (key, numbers, shards, policy.reduce_per_micro_batch)
        if whole not in self._simulations:
            if key not in self._lowered:
                self._lowered[key] = lower(self._compute(key))
            self._simulations[whole] = Simulation(with_collectives(self._lowered[key], layout, buckets, policy))
        return self._simulations[whole]

    def replays(self, layout: Layout, num_micro_batches: int, roughly: bool = False) -> Replays:
        """Of the same stages' lists, which are lowered when they are asked for: most layouts are refused by a few of them.

        Collectives, which hold nothing, are left out.
        """
        key = _Shape.of(layout, num_micro_batches, roughly)
        if key not in self._replays:
            compute = self._compute(key)
            self._replays[key] = Replays(compute.placement, lambda stage: lower_rank(compute, stage))
        return self._replays[key]

    def _compute(self, shape: _Shape) -> Program:
        if shape not in self._computes:
            self._computes[shape] = shape.program()
        return self._computes[shape]


class _Shape(NamedTuple):
    """What of a layout its schedule depends on."""

    schedule: str
    stages: int
    chunks: int
    placement: str
    num_micro_batches: int
    roughly: bool

    @staticmethod
    def of(layout: Layout, num_micro_batches: int, roughly: bool) -> _Shape:
        """Of one of which nothing is left open."""
        is_rough = roughly and layout.schedule == "zb-looped"
        return _Shape(layout.schedule, layout.stages, layout.chunks, layout.placement, num_micro_batches, is_rough)

    def program(self) -> Program:
        """The schedule's."""
        if self.roughly:
            return looped_zero_bubble(self.stages, self.num_micro_batches, self.chunks, roughly=True)
        return build(self.schedule, self.stages, self.num_micro_batches, self.chunks, self.placement)


def with_collectives(program: Program, layout: Layout, buckets: Buckets, policy: ZeroPolicy) -> Program:
    """A schedule's lowered program with the collectives that the executor runs beside it."""
    return add_collectives(
        program,
        [len(numels) for numels in buckets.of_chunk],
        [owners for owners, _ in buckets.replicas],
        policy.stage > 0 and layout.replicas > 1,
        policy.reduce_per_micro_batch,
    )


def one_sample(layout: Layout) -> Layout:
    """The same with micro-batches of a single sample: what a rough prediction looks at."""
    return layout.model_copy(update={"micro_batch": 1})


def timed_micro_batches(layout: Layout, exactly: bool, whole: bool = False) -> int:
    """All, as of gpipe, which holds them all; or as many as fill the pipeline a few times, and as many over whole rounds
    of the stages.

    whole: all in most cases.
    """
    stages, wanted = layout.stages, layout.micro_batches
    most_steps = _MOST_STEPS_WHOLE if whole else _MOST_STEPS
    if layout.schedule == "gpipe" or (exactly and wanted * stages * layout.chunks <= most_steps):
        return wanted
    rounds = _ROUGH_ROUNDS + exactly - (stages >= _LONG)
    return min(wanted, rounds * stages + wanted % stages)


def untimed_flight(layout: Layout, timed: int) -> float:
    """By how many times more an interleaved pipeline has in flight on its first stage than so few micro-batches fill."""
    if layout.schedule != "interleaved":
        return 1.0
    p, v = layout.stages, layout.chunks
    most = min(layout.micro_batches * v, (v + 1) * p - 1)  # see schedule.builders.interleaved
    return most / min(timed * v, most)
