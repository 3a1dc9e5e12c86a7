"""The program of a layout, as the executor of a run would have it, from its parameters' buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallel3d.config.run_layout import RunLayout
from parallel3d.parameters import ParameterInfo
from parallel3d.schedule.builders import build
from parallel3d.schedule.instructions import Program
from parallel3d.schedule.lowering import lower_training
from parallel3d.zero.buckets import Owners, by_owners, lay_out
from parallel3d.zero.policy import ZeroPolicy

_ROUGH_BUCKETS = 4  # of a chunk, in a rough prediction


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
    shards = num_replicas if policy.stage > 0 else 1
    found: dict[Owners, list[int]] = {}
    for parameters in stages:
        for owners, infos in by_owners(parameters).items():
            laid = lay_out(infos, policy, shards)
            found[owners] = [layout.numel for alike in laid for layout in alike.layouts]
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


def training_program(layout: RunLayout, buckets: Buckets, policy: ZeroPolicy, num_micro_batches: int) -> Program:
    """What the executor runs of a layout of which nothing is left open."""
    assert layout.schedule is not None
    assert layout.chunks is not None
    assert layout.placement is not None
    compute = build(layout.schedule, layout.stages, num_micro_batches, layout.chunks, layout.placement)
    return lowered(compute, layout, buckets, policy)


def lowered(compute: Program, layout: RunLayout, buckets: Buckets, policy: ZeroPolicy) -> Program:
    """A schedule's compute with what the executor runs beside it."""
    return lower_training(
        compute,
        [len(numels) for numels in buckets.of_chunk],
        [owners for owners, _ in buckets.replicas],
        policy.stage > 0 and layout.replicas > 1,
        policy.reduce_per_micro_batch,
    )
