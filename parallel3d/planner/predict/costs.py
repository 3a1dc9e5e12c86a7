"""Seconds of each instruction of a layout's program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from parallel3d.config.layout import Layout
from parallel3d.costs.work import Collective, CollectiveKind, Work
from parallel3d.parameters import ParameterInfo
from parallel3d.planner.predict.profile import LayerProfile
from parallel3d.planner.predict.program import Buckets
from parallel3d.planner.predict.timing import Floats, LayoutLinks, StepCost, Times, compute_seconds
from parallel3d.schedule.builders import WHOLE_BACKWARDS
from parallel3d.schedule.timing import Length
from parallel3d.zero.memory import update_traffic
from parallel3d.zero.policy import ZeroPolicy

_MANY = 1 << 30  # elements


# What travels between replicas: gradients as they are accumulated, weights as layers compute with them.
def _wire_bytes(policy: ZeroPolicy) -> int:
    return (policy.communication_dtype or policy.accumulator_dtype(torch.float32)).itemsize


def _weight_bytes(policy: ZeroPolicy) -> int:
    return (policy.weight_dtype or torch.float32).itemsize


def reductions(
    layout: Layout, buckets: Buckets, policy: ZeroPolicy
) -> tuple[tuple[tuple[Collective, float], ...], ...]:
    """Of each chunk the collectives over its replicas, with how often they run in a step."""
    if layout.replicas == 1:
        return ((),) * len(buckets.of_chunk)
    times = float(layout.micro_batches) if policy.reduce_per_micro_batch else 1.0
    found: dict[tuple[int, ...], tuple[tuple[Collective, float], ...]] = {}
    for numels in set(buckets.of_chunk):
        gradients, weights = _wire_bytes(policy) * sum(numels), _weight_bytes(policy) * sum(numels)
        if policy.stage == 0:
            found[numels] = ((Collective("all_reduce", gradients), times),)
        else:
            scattered = Collective("reduce_scatter", gradients)
            found[numels] = (scattered, times), (Collective("all_gather", weights), 1.0)
    return tuple(found[numels] for numels in buckets.of_chunk)


def reduction_seconds(
    links: LayoutLinks,
    placement: Sequence[int],
    of_chunks: Sequence[tuple[tuple[Collective, float], ...]],
) -> Floats:
    """Of each stage's chunks together. of_chunks: see reductions()."""
    # Equal chunks have the same tuple, and most stages the same links: those are looked up once.
    known: dict[tuple[int, int], float] = {}
    seconds = np.zeros(links.shape[0])
    for stage, collectives in zip(placement, of_chunks, strict=True):
        key = id(collectives), links.like(stage)
        if key not in known:
            known[key] = sum(n * links.over_replicas(c.kind, c.nbytes, stage) for c, n in collectives)
        seconds[stage] += known[key]
    return seconds


def step_cost(
    layout: Layout,
    links: LayoutLinks,
    layers: Sequence[LayerProfile],
    bounds: Sequence[int],
    placement: Sequence[int],
    times: Times,
    buckets: Buckets,
    policy: ZeroPolicy,
    samples: int = 1,
) -> StepCost:
    """Seconds of each instruction. bounds: of chunks in layers; placement: the stage of each; samples: of a micro-batch,
    whose messages are as many times those of the layers.
    """
    inner = [(layers[end - 1], placement[c], placement[c + 1]) for c, end in enumerate(bounds[1:-1])]
    wire, weight = _wire_bytes(policy), _weight_bytes(policy)
    kind: CollectiveKind = "reduce_scatter" if policy.stage > 0 else "all_reduce"
    return StepCost(
        times,
        (*(links.send(samples * layer.output_bytes, a, b) if a != b else 0.0 for layer, a, b in inner), 0.0),
        (0.0, *(links.send(samples * layer.gradient_bytes, b, a) if a != b else 0.0 for layer, a, b in inner)),
        tuple(
            tuple(links.over_replicas(kind, wire * numel, stage) for numel in numels)
            for numels, stage in zip(buckets.of_chunk, placement, strict=True)
        ),
        tuple(
            _gather_seconds([links.over_replicas("all_gather", weight * n, stage) for n in numels], forward)
            for numels, stage, forward in zip(buckets.of_chunk, placement, times.forward.tolist(), strict=True)
        ),
        tuple(
            _replica_seconds(links, [placement[c] for c in owners], wire * numel, kind)
            for owners, numel in buckets.replicas
        ),
    )


class Reducing(NamedTuple):
    """Seconds by which a backward of each chunk is longer where gradients are reduced in every micro-batch, [chunks].

    slower: beside the collectives; added: to add up the part that the rank keeps.
    """

    slower: Floats
    added: Floats


def reducing(links: LayoutLinks, placement: Sequence[int], buckets: Buckets, policy: ZeroPolicy) -> Reducing:
    """Of the chunks of a layout."""
    replicas = links.shape[1]
    slower, added = np.zeros(len(placement)), np.zeros(len(placement))
    if policy.reduce_per_micro_batch and replicas > 1:
        known: dict[tuple[object, ...], tuple[float, float]] = {}
        for c, (numels, stage) in enumerate(zip(buckets.of_chunk, placement, strict=True)):
            key = numels, links.like(stage), links.first_alike[stage]
            if key not in known:
                reduced = sum(links.over_replicas("reduce_scatter", _wire_bytes(policy) * n, stage) for n in numels)
                # Read twice and written once, in the accumulators' dtype.
                work = Work(moved=3 * policy.accumulator_dtype(torch.float32).itemsize * sum(numels) / replicas)
                adding = max(compute_seconds(work, device) for device in links.devices(stage))
                known[key] = (links.overlap - 1.0) * reduced, adding
            slower[c], added[c] = known[key]
    return Reducing(slower, added)


def with_reducing(times: Times, reducing: Reducing) -> Times:
    """Of chunks, with what reductions beside them cost."""
    slower = reducing.slower
    exchanges = times.exchanges + np.stack([np.zeros_like(slower), np.zeros_like(slower), slower])
    return replace(times, weight_gradient=times.weight_gradient + slower + reducing.added, exchanges=exchanges)


def _gather_seconds(buckets: Sequence[float], forward: float) -> float:
    """By which a chunk's first forward starts late: its layers wait for their own weights, while the next ones arrive."""
    return max(sum(buckets) - forward, max(buckets, default=0.0)) if sum(buckets) > 0 else 0.0


def _replica_seconds(links: LayoutLinks, stages: Sequence[int], nbytes: float, kind: CollectiveKind) -> float:
    """Over the replicas of each stage first, then the shards over the stages that hold a copy."""
    shard = nbytes / (links.shape[1] if kind == "reduce_scatter" else 1)
    over_replicas = max(links.over_replicas(kind, nbytes, stage) for stage in set(stages))
    return over_replicas + links.over_stages(shard, tuple(sorted(set(stages))))


def late_by(layout: Layout, times: Times) -> Floats:
    """By how much each chunk makes those behind it start late, and those before it end late, in its schedule."""
    if layout.schedule in WHOLE_BACKWARDS:
        return times.total
    if layout.schedule == "zb-h1":
        return np.maximum(times.forward, times.forward + times.input_gradient - times.weight_gradient)
    return times.forward


class Least(NamedTuple):
    """Seconds that hardly any prediction of a layout is below; evenly: any whose layers' stages took equally long."""

    seconds: float
    evenly: float


def least_computing(layout: Layout, times: Times, placement: Sequence[int]) -> tuple[float, float, float]:
    """Seconds until the last stage is through: with these chunks, and with stages that take equally long; and the mean of what
    they compute.
    """
    late = late_by(layout, times)
    ends = np.cumsum(late) - late
    waits = ends[[placement.index(stage) for stage in range(layout.stages)]]
    loads = np.bincount(np.asarray(placement), weights=times.total) * layout.micro_batches
    mean = float(loads.mean())
    return float((loads + waits).max()), mean + float(waits.max()), mean


def pace(times: Times, placement: Sequence[int]) -> float:
    """Seconds by which one micro-batch more makes a full pipeline's step longer: what its busiest stage computes."""
    loads = np.bincount(np.asarray(placement), weights=times.total)
    return float(loads.max())


def makespan(length: Length, times: Times, placement: Sequence[int], untimed: int) -> float:
    """Of a program whose length is known with so many micro-batches fewer."""
    host = float(host_of_stages(times, placement).max())
    return length.makespan + untimed * max(pace(times, placement), length.pace, host)


def host_of_stages(times: Times, placement: Sequence[int]) -> Floats:
    """Seconds in which the host of each stage's ranks calls what one micro-batch takes."""
    seconds: Floats = np.bincount(np.asarray(placement), weights=times.host.sum(axis=0)).astype(np.float64)
    return seconds


def traffic_of_each(dtype: torch.dtype, policy: ZeroPolicy, num_replicas: int, moments: int) -> float:
    """Bytes that the optimizer's step moves for each of many elements, as if they were one parameter; see update_traffic."""
    like = nn.Parameter(torch.empty(_MANY, dtype=dtype, device="meta"))
    return update_traffic([ParameterInfo("", like, (0,))], policy, num_replicas, moments) / _MANY
