"""Choice of each rank's GPU: a step's communication, and its compute on unequal GPUs, should take the fewest seconds.

Arrangements of ranks on GPUs are arrays [arrangements, ranks]: structured ones, and exchanges in a given one. On clusters of
up to 8 unequal GPUs the result is within a percent of the best of all arrangements (tests/unit/planner/test_placement.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, islice, product
from math import gcd
from operator import itemgetter

import numpy as np

from parallel3d.costs.work import Collective
from parallel3d.errors import ConfigError
from parallel3d.planner.network.fabric import Floats, Integers
from parallel3d.planner.network.links import Kind, Network

Grid = tuple[int, int, int]  # of each axis: stages, replicas, tensor-parallel ranks

_SMALL = 64  # GPUs; in larger clusters of equal hosts, exchanges don't improve on a structured arrangement
_STARTS = 4  # structured arrangements that are improved in such small clusters, within the same bound
_STRUCTURED = 1 << 14  # ranks of all structured arrangements: bounds the time to compare them
_LISTED = 1 << 14  # exchanges to choose from
_FEW = 4  # structured arrangements of the largest clusters


def structured(network: Network, shape: Grid) -> Integers:
    """Return arrangements of blocks of GPUs of one island: a part of each axis tiles a block, the rest runs over blocks.

    If there are too many, only the most likely ones are returned: tensor-parallel ranks within islands, replicas along rails,
    stages across.
    """
    world = int(np.prod(shape))
    ways: dict[bytes, Integers] = {}
    trials = [(rank, o, n) for o in _orders(network, shape) for rank, n in enumerate(_nestings(network, o, shape))]
    # The likeliest of each order come first.
    for _, order, (tile, axes) in sorted(trials, key=itemgetter(0)):
        split = [part for size, inner in zip(shape, tile, strict=True) for part in (size // inner, inner)]
        ranks = np.arange(len(order)).reshape(split)
        placed = np.empty_like(order)
        placed[ranks.transpose(*(2 * axis for axis in axes), 1, 3, 5).ravel()] = order
        ways.setdefault(placed.tobytes(), placed)
        if len(ways) >= max(_FEW, _STRUCTURED // world):
            break
    return np.array(list(ways.values()))


def _orders(network: Network, shape: Grid) -> list[Integers]:
    """Return orders of the GPUs to use: by locality, and the fast and well connected first. Whole tensor groups lead."""
    fabric, gpus = network.fabric, network.cluster.gpus
    speed = np.array([gpu.device.gemm_flops for gpu in gpus])
    unit_exit = np.array([_exit(network, unit) for unit in range(len(fabric.first_link))])
    ways = np.lexsort([fabric.position]), np.lexsort([fabric.position, -unit_exit[fabric.unit], -speed])
    world, tensor_ranks = int(np.prod(shape)), shape[2]
    orders: dict[bytes, Integers] = {}
    for way in ways:
        runs = np.split(way, np.flatnonzero(np.diff(fabric.island[way])) + 1)
        if any(len(run) % tensor_ranks and len(run) > tensor_ranks for run in runs):
            whole = [run[: len(run) // tensor_ranks * tensor_ranks] for run in runs]
            runs = whole + [run[len(run) // tensor_ranks * tensor_ranks :] for run in runs]
        order = np.concatenate(runs)[:world]
        orders.setdefault(order.tobytes(), order)
    return list(orders.values())


def _exit(network: Network, unit: int) -> float:
    """Return the bandwidth out of a unit."""
    fabric = network.fabric
    ports = fabric.classes[fabric.attachments[fabric.attachment[unit]][0]]
    return sum(ports.edges[port].bandwidth for port in ports.ports)


def _nestings(network: Network, order: Integers, shape: Grid) -> list[tuple[Grid, Grid]]:
    """Return ways in which the axes can run over GPUs in this order, the most likely first.

    Each is the part of every axis that tiles a block, and the axes that run over blocks, the slowest first. Blocks are the
    largest ones of one island that the order can be cut into.
    """
    starts = np.flatnonzero(np.diff(network.fabric.island[order], prepend=-1))
    block = gcd(*np.diff(starts, append=len(order)).tolist())
    divisors = [[part for part in range(1, size + 1) if size % part == 0 and block % part == 0] for size in shape]
    tiles: list[Grid] = [(p, d, m) for p, d, m in product(*divisors) if p * d * m == block]
    # Tensor-parallel ranks within islands; then neither stages nor replicas mixed with others in one.
    tiles.sort(key=lambda tile: (-tile[2], min(tile[:2]), -tile[0]))
    likely: list[Grid] = [(0, 1, 2), (1, 0, 2)]
    unlikely: list[Grid] = [(0, 2, 1), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
    return [(tile, axes) for some in (likely, unlikely) for tile in tiles for axes in some]


def exchanges(network: Network, shape: Grid, placed: Integers, most: int) -> Integers:
    """Return `placed` with two islands, tensor-parallel groups or GPUs exchanged, or a GPU with an unused one, at most `most`.

    There are none if all GPUs are alike in islands of one size, which structured arrangements suit. In large clusters only
    unlike GPUs are exchanged.
    """
    fabric, gpus = network.fabric, network.cluster.gpus
    unused = np.setdiff1d(np.arange(len(gpus)), placed)
    places = np.concatenate([placed, unused[np.argsort(fabric.position[unused])]])
    classes = np.array([kind for kind, _ in fabric.attachments])
    kind = classes[fabric.attachment[fabric.unit]] * len(network.devices) + network.device_of
    sizes = np.unique(fabric.island[placed], return_counts=True)[1]
    if (kind == kind[0]).all() and (len(gpus) > _SMALL or (sizes == sizes[0]).all()):
        return np.zeros((0, len(placed)), dtype=np.int64)
    every_pair = _pairs(fabric.island[places], kind[places], len(placed), shape[2], len(gpus) > _SMALL)
    pairs = list(islice(every_pair, _LISTED))
    ways = np.repeat(places[None], min(most, len(pairs)), axis=0)
    for way, pair in zip(ways, pairs[:: max(1, -(-len(pairs) // max(1, most)))], strict=False):
        a, b = pair
        way[a], way[b] = places[b], places[a]
    return ways[:, : len(placed)]


def _pairs(
    island: Integers, kind: Integers, world: int, tensor_ranks: int, unlike: bool
) -> Iterator[tuple[Integers, Integers]]:
    """Yield places to exchange: islands, tensor-parallel groups, GPUs. unlike: only those of different kinds."""
    in_use = island[:world]
    islands = [np.flatnonzero(in_use == each) for each in dict.fromkeys(in_use.tolist())]
    groups = list(np.arange(world).reshape(-1, tensor_ranks))
    single = list(np.arange(len(island)).reshape(-1, 1))
    for blocks in (islands, groups, single) if tensor_ranks > 1 else (islands, single):
        for a, b in combinations(blocks, 2):
            if len(a) == len(b) and a[0] < world and (not unlike or (kind[a] != kind[b]).any()):
                yield a, b


_AT_ONCE = 1 << 15  # ranks of trials timed together
_TRIED = 1 << 16  # ranks of all trials of a descent: bounds the time
_SAME = 1.01  # structured arrangements whose seconds differ by at most this ratio count as equal


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a training step sends, and its computation on unequal GPUs.

    - model, data: (collective, how often a step waits for it) of each tensor-parallel group and of each group of replicas.
    - pipe: (bytes, how often) of messages between neighbouring stages. What compute hides counts less.
    - loops: whether the last stage sends to the first one as well (chunks in a loop).
    - flops: FLOPs of the GEMMs of all stages, for one rank of each. A stage has as many layers as its slowest GPU allows.
    """

    model: tuple[tuple[Collective, float], ...] = ()
    data: tuple[tuple[Collective, float], ...] = ()
    pipe: tuple[tuple[float, float], ...] = ()
    loops: bool = False
    flops: float = 0.0


def place(network: Network, shape: Grid, traffic: Traffic) -> tuple[int, ...]:
    """Return the GPU of each rank, by its index in `network.cluster.gpus`.

    shape: (stages, replicas, tensor_ranks); ranks are in its row-major order. The best structured arrangement is improved by
    exchanges while they help: tensor-parallel ranks within islands, replicas along rails, stages across. The result doesn't
    depend on the order of the cluster's hosts.

    Raises ConfigError if the cluster has too few GPUs.
    """
    world, gpus = int(np.prod(shape)), len(network.cluster.gpus)
    if world > gpus:
        raise ConfigError(
            f"{shape[0]} stages of {shape[1]} replicas of {shape[2]} tensor-parallel ranks need {world} GPUs, "
            f"cluster {network.cluster.name!r} has {gpus}"
        )
    starts = structured(network, shape)
    seconds = _seconds(network, shape, traffic, starts)
    # The most likely come first, and less than a percent is no reason to move, say, tensor-parallel ranks out of islands.
    order = np.argsort(np.where(seconds <= _SAME * seconds.min(), seconds.min(), seconds), kind="stable")
    # More than one start if that costs little: the descent in small clusters ends where no exchange of two improves.
    chosen = order[: _STARTS if gpus <= _SMALL else 1]
    tried = _TRIED // len(chosen)
    descents = [_descend(network, shape, traffic, starts[k], float(seconds[k]), tried) for k in chosen]
    return tuple(min(descents, key=lambda descent: descent[1])[0].tolist())


def _descend(
    network: Network, shape: Grid, traffic: Traffic, placed: Integers, seconds: float, ranks: int
) -> tuple[Integers, float]:
    """Make the best exchange as long as one helps and all trials together have at most `ranks` ranks.

    seconds: of the arrangement that is given.
    """
    budget = ranks // placed.size
    while budget > 0:
        trials = exchanges(network, shape, placed, budget)
        budget -= len(trials)
        if not len(trials):
            break
        found = _seconds(network, shape, traffic, trials)
        # Sums in another order differ in their last bits, which must not make a later trial the best.
        first = int(np.argmax(found <= found.min() * (1 + 1e-12)))
        if found[first] >= seconds * (1 - 1e-9):
            break
        placed, seconds = trials[first], float(found[first])
    return placed, seconds


def _seconds(network: Network, shape: Grid, traffic: Traffic, trials: Integers) -> Floats:
    size = max(1, _AT_ONCE // trials.shape[1])
    parts = [trials[start : start + size] for start in range(0, len(trials), size)]
    return np.concatenate([step_seconds(network, shape, traffic, part) for part in parts])


def step_seconds(network: Network, shape: Grid, traffic: Traffic, placed: Integers) -> Floats:
    """Predict the seconds of each trial, [trials]: communication of all axes, one after the other, and compute.

    placed: [trials, ranks], GPU of each rank. All groups of an axis communicate at the same time.
    """
    trials, (stages, replicas, tensor_ranks) = len(placed), shape
    grid = placed.reshape(trials, *shape)
    # For each stage its slowest GPU counts: its ranks wait for each other.
    speeds = np.array([gpu.device.gemm_flops for gpu in network.cluster.gpus])
    seconds: Floats = traffic.flops / speeds[grid].min(axis=(2, 3)).sum(axis=1)
    sent: list[tuple[Integers, list[tuple[Kind, float, float]]]] = []  # groups, and what they send how often
    for collectives, groups in (
        (traffic.model, grid.reshape(trials, -1, tensor_ranks)),
        (traffic.data, grid.transpose(0, 1, 3, 2).reshape(trials, -1, replicas)),
    ):
        if groups.shape[2] > 1:
            sent.append((np.sort(groups, axis=2), [(c.kind, c.nbytes, times) for c, times in collectives]))
    if stages > 1:
        following = np.roll(grid, -1, axis=1) if traffic.loops else grid[:, 1:]
        pairs = np.stack([grid[:, : following.shape[1]], following], axis=-1).reshape(trials, -1, 2)
        sent.append((pairs, [("send", nbytes, times) for nbytes, times in traffic.pipe]))
    for groups, messages in sent:
        # Each of the trials that differ is timed once. As bytes, whole trials are compared in little time.
        ordered = np.take_along_axis(groups, np.argsort(groups[:, :, :1], axis=1), axis=1)
        rows = np.ascontiguousarray(ordered.reshape(trials, -1)).view(f"V{ordered[0].nbytes}").ravel()
        _, first, which = np.unique(rows, return_index=True, return_inverse=True)
        for kind, nbytes, times in messages:
            seconds += times * network.each(kind, ordered[first], nbytes).max(axis=1)[which]
    return seconds
