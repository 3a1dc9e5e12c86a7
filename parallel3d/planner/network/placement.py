"""Which GPU each rank runs on: where a step's communication, and its compute on unequal GPUs, takes the fewest seconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parallel3d.costs.work import Collective
from parallel3d.errors import ConfigError
from parallel3d.planner.network.fabric import Floats, Integers
from parallel3d.planner.network.links import Network
from parallel3d.planner.search.arrangements import Grid, every_arrangement, exchanges, structured

_ALL = 12_000  # arrangements to try one and all, where no more are different
_AT_ONCE = 1 << 15  # ranks of trials timed together
_TRIED = 1 << 16  # ranks of all trials of a descent: bounds the time
_SMALL, _STARTS = 64, 4  # GPUs up to which so many structured arrangements are improved, within the same bound
_SAME = 1.01  # times as long is no difference between structured arrangements
_TOO_SMALL = 1e6  # seconds for a GPU that can't hold its stage: those are avoided first


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a training step asks of the links and of unequal GPUs.

    model, data: (collective, how often a step waits for it) of each slice group and of each group of replicas; pipe: the same
    of (bytes of) messages between neighbouring stages. What compute hides counts less. loops: the last stage sends to the first
    as well (chunks in a loop); flops: of all stages for one rank of each, in matrix products; a stage gets as many layers as
    its slowest GPU can take; stage_bytes: what each stage's ranks hold, where GPUs' memories differ.
    """

    model: tuple[tuple[Collective, float], ...] = ()
    data: tuple[tuple[Collective, float], ...] = ()
    pipe: tuple[tuple[float, float], ...] = ()
    loops: bool = False
    flops: float = 0.0
    stage_bytes: tuple[int, ...] = ()


def place(network: Network, shape: Grid, traffic: Traffic) -> tuple[int, ...]:
    """For each rank the index of its GPU in `network.cluster.gpus`; a rank is (stage * replicas + replica) * slices + slice.

    shape: (stages, replicas, slices). Where few arrangements differ the best of all; else the best structured one (slices
    within islands, replicas along rails, stages across), improved by exchanges while they help. The same for any order of the
    cluster's hosts. Raises ConfigError where the cluster has too few GPUs.
    """
    world, gpus = int(np.prod(shape)), len(network.cluster.gpus)
    if world > gpus:
        raise ConfigError(
            f"{shape[0]} stages of {shape[1]} replicas of {shape[2]} slices need {world} GPUs, "
            f"cluster {network.cluster.name!r} has {gpus}"
        )
    trials = every_arrangement(network, shape, _ALL)
    if trials is not None:
        return _result(_best(network, shape, traffic, trials)[0])
    starts = structured(network, shape)
    seconds = _seconds(network, shape, traffic, starts)
    # They come the likeliest first, and less than a percent is no reason to leave, say, slices in islands.
    order = np.argsort(np.where(seconds <= _SAME * seconds.min(), seconds.min(), seconds), kind="stable")
    # More than one start where that costs little: the descent of small clusters ends in what exchanges of two can't improve.
    chosen = order[: _STARTS if gpus <= _SMALL else 1]
    descents = [_descend(network, shape, traffic, starts[start], _TRIED // len(chosen)) for start in chosen]
    return _result(min(descents, key=lambda descent: descent[1])[0])


def _descend(network: Network, shape: Grid, traffic: Traffic, placed: Integers, ranks: int) -> tuple[Integers, float]:
    """The best exchange, as long as one helps and trials have no more than so many ranks together."""
    seconds = float(step_seconds(network, shape, traffic, placed[None])[0])
    budget = ranks // placed.size
    while budget > 0:
        trials = exchanges(network, shape, placed, budget)
        budget -= len(trials)
        if not len(trials):
            break
        better, fewer = _best(network, shape, traffic, trials)
        if fewer >= seconds * (1 - 1e-9):
            break
        placed, seconds = better, fewer
    return placed, seconds


def step_seconds(network: Network, shape: Grid, traffic: Traffic, placed: Integers) -> Floats:
    """Predicted seconds of each trial, [trials]: communication of all axes, one after the other, and compute where asked.

    placed: [trials, ranks], GPU of each rank. All groups of an axis communicate at once.
    """
    trials, (stages, replicas, slices) = len(placed), shape
    grid = placed.reshape(trials, *shape)
    seconds = np.zeros(trials)
    if slices > 1 and traffic.model:
        seconds += _group_seconds(network, traffic.model, grid.reshape(trials, -1, slices))
    if replicas > 1 and traffic.data:
        seconds += _group_seconds(network, traffic.data, grid.transpose(0, 1, 3, 2).reshape(trials, -1, replicas))
    if stages > 1 and traffic.pipe:
        following = np.roll(grid, -1, axis=1) if traffic.loops else grid[:, 1:]
        pairs = np.stack([grid[:, : following.shape[1]], following], axis=-1).reshape(trials, -1, 2)
        chosen, which = _different(np.take_along_axis(pairs, np.argsort(pairs[:, :, :1], axis=1), axis=1))
        for nbytes, times in traffic.pipe:
            seconds += times * network.each_transfer(chosen, nbytes).max(axis=1)[which]
    return seconds + _device_seconds(network, traffic, grid)


def _group_seconds(network: Network, collectives: tuple[tuple[Collective, float], ...], groups: Integers) -> Floats:
    groups = np.sort(groups, axis=2)
    chosen, which = _different(np.take_along_axis(groups, np.argsort(groups[:, :, :1], axis=1), axis=1))
    total = np.zeros(len(chosen))
    for collective, times in collectives:
        total += times * network.each_collective(collective.kind, chosen, collective.nbytes).max(axis=1)
    return total[which]


def _different(groups: Integers) -> tuple[Integers, Integers]:
    """The trials that differ, and for each which of these it is."""
    if len(groups) == 1:
        return groups, np.zeros(1, dtype=np.int64)
    rows = np.ascontiguousarray(groups.reshape(len(groups), -1))
    _, first, which = np.unique(
        rows.view(f"V{rows.itemsize * rows.shape[1]}").ravel(), return_index=True, return_inverse=True
    )
    return groups[first], which


def _device_seconds(network: Network, traffic: Traffic, grid: Integers) -> Floats:
    devices = [gpu.device for gpu in network.cluster.gpus]
    speeds = np.array([device.gemm_flops for device in devices])
    # Of the slowest GPU of each stage: its ranks wait for each other.
    seconds: Floats = traffic.flops / speeds[grid].min(axis=(2, 3)).sum(axis=1)
    if traffic.stage_bytes:
        capacity = np.array([device.memory for device in devices])[grid]
        seconds = seconds + _TOO_SMALL * (capacity < np.array(traffic.stage_bytes)[:, None, None]).sum(axis=(1, 2, 3))
    return seconds


def _best(network: Network, shape: Grid, traffic: Traffic, trials: Integers) -> tuple[Integers, float]:
    """The trial of the fewest seconds, the first of equal ones."""
    seconds = _seconds(network, shape, traffic, trials)
    # Sums of other orders differ in their last bits: that is no reason to prefer a later trial.
    first = int(np.argmax(seconds <= seconds.min() * (1 + 1e-12)))
    return trials[first], float(seconds[first])


def _seconds(network: Network, shape: Grid, traffic: Traffic, trials: Integers) -> Floats:
    size = max(1, _AT_ONCE // trials.shape[1])
    parts = [trials[start : start + size] for start in range(0, len(trials), size)]
    return np.concatenate([step_seconds(network, shape, traffic, part) for part in parts])


def _result(placed: Integers) -> tuple[int, ...]:
    return tuple(int(gpu) for gpu in placed)
