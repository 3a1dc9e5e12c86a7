"""Choice of each rank's GPU: a step's communication, and its compute on unequal GPUs, should take the fewest seconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parallel3d.costs.work import Collective
from parallel3d.errors import ConfigError
from parallel3d.planner.network.fabric import Floats, Integers
from parallel3d.planner.network.links import Kind, Network
from parallel3d.planner.search.arrangements import Grid, every_arrangement, exchanges, structured

_ALL = 12_000  # arrangements that are all tried, if no more are different
_AT_ONCE = 1 << 15  # ranks of trials timed together
_TRIED = 1 << 16  # ranks of all trials of a descent: bounds the time
_SMALL, _STARTS = 64, 4  # GPUs up to which this many structured arrangements are improved, within the same bound
_SAME = 1.01  # a ratio of seconds that is no difference between structured arrangements


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a training step sends, and its computation on unequal GPUs.

    - model, data: (collective, how often a step waits for it) of each tensor-parallel group and of each group of replicas.
    - pipe: (bytes, how often) of messages between neighbouring stages. What compute hides counts less.
    - loops: whether the last stage sends to the first one as well (chunks in a loop).
    - flops: of the matrix products of all stages, for one rank of each. A stage has as many layers as its slowest GPU allows.
    """

    model: tuple[tuple[Collective, float], ...] = ()
    data: tuple[tuple[Collective, float], ...] = ()
    pipe: tuple[tuple[float, float], ...] = ()
    loops: bool = False
    flops: float = 0.0


def place(network: Network, shape: Grid, traffic: Traffic) -> tuple[int, ...]:
    """Return each rank's GPU, by its index in `network.cluster.gpus`; rank = (stage * replicas + replica) * slices + slice.

    shape: (stages, replicas, slices). If few arrangements differ, all are tried; else the best structured one (slices within
    islands, replicas along rails, stages across) is improved by exchanges while they help. The result doesn't depend on the
    order of the cluster's hosts. Raises ConfigError if the cluster has too few GPUs.
    """
    world, gpus = int(np.prod(shape)), len(network.cluster.gpus)
    if world > gpus:
        raise ConfigError(
            f"{shape[0]} stages of {shape[1]} replicas of {shape[2]} slices need {world} GPUs, "
            f"cluster {network.cluster.name!r} has {gpus}"
        )
    trials = every_arrangement(network, shape, _ALL)
    if trials is not None:
        placed, _ = _best(network, shape, traffic, trials)
        return tuple(placed.tolist())
    starts = structured(network, shape)
    seconds = _seconds(network, shape, traffic, starts)
    # The likeliest come first, and less than a percent is no reason to leave, say, slices in islands.
    order = np.argsort(np.where(seconds <= _SAME * seconds.min(), seconds.min(), seconds), kind="stable")
    # More than one start if that costs little: the descent in small clusters ends where no exchange of two improves.
    chosen = order[: _STARTS if gpus <= _SMALL else 1]
    descents = [_descend(network, shape, traffic, starts[start], _TRIED // len(chosen)) for start in chosen]
    return tuple(min(descents, key=lambda descent: descent[1])[0].tolist())


def _descend(network: Network, shape: Grid, traffic: Traffic, placed: Integers, ranks: int) -> tuple[Integers, float]:
    """Make the best exchange as long as one helps and all trials together have at most `ranks` ranks."""
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


def _best(network: Network, shape: Grid, traffic: Traffic, trials: Integers) -> tuple[Integers, float]:
    """Return the trial of the fewest seconds, the first of equal ones, and its seconds."""
    seconds = _seconds(network, shape, traffic, trials)
    # Sums of other orders differ in their last bits: that is no reason to prefer a later trial.
    first = int(np.argmax(seconds <= seconds.min() * (1 + 1e-12)))
    return trials[first], float(seconds[first])


def _seconds(network: Network, shape: Grid, traffic: Traffic, trials: Integers) -> Floats:
    size = max(1, _AT_ONCE // trials.shape[1])
    parts = [trials[start : start + size] for start in range(0, len(trials), size)]
    return np.concatenate([step_seconds(network, shape, traffic, part) for part in parts])


def step_seconds(network: Network, shape: Grid, traffic: Traffic, placed: Integers) -> Floats:
    """Predict the seconds of each trial, [trials]: communication of all axes, one after the other, and compute.

    placed: [trials, ranks], GPU of each rank. All groups of an axis communicate at the same time.
    """
    trials, (stages, replicas, slices) = len(placed), shape
    grid = placed.reshape(trials, *shape)
    # For each stage its slowest GPU counts: its ranks wait for each other.
    speeds = np.array([gpu.device.gemm_flops for gpu in network.cluster.gpus])
    seconds: Floats = traffic.flops / speeds[grid].min(axis=(2, 3)).sum(axis=1)
    sent: list[tuple[Integers, list[tuple[Kind, float, float]]]] = []  # groups, and what they send how often
    for collectives, groups in (
        (traffic.model, grid.reshape(trials, -1, slices)),
        (traffic.data, grid.transpose(0, 1, 3, 2).reshape(trials, -1, replicas)),
    ):
        if groups.shape[2] > 1:
            sent.append((np.sort(groups, axis=2), [(c.kind, c.nbytes, times) for c, times in collectives]))
    if stages > 1:
        following = np.roll(grid, -1, axis=1) if traffic.loops else grid[:, 1:]
        pairs = np.stack([grid[:, : following.shape[1]], following], axis=-1).reshape(trials, -1, 2)
        sent.append((pairs, [("send", nbytes, times) for nbytes, times in traffic.pipe]))
    for groups, messages in sent:
        different, which = _different(np.take_along_axis(groups, np.argsort(groups[:, :, :1], axis=1), axis=1))
        for kind, nbytes, times in messages:
            seconds += times * network.each(kind, different, nbytes).max(axis=1)[which]
    return seconds


def _different(groups: Integers) -> tuple[Integers, Integers]:
    """Return the trials that differ, and for each trial which of these it is."""
    rows = np.ascontiguousarray(groups.reshape(len(groups), -1))
    _, first, which = np.unique(
        rows.view(f"V{rows.itemsize * rows.shape[1]}").ravel(), return_index=True, return_inverse=True
    )
    return groups[first], which
