"""Placement against every assignment of ranks to GPUs, up to the order of replicas and of slices."""

from __future__ import annotations

import math
import random
from itertools import permutations

import numpy as np
import pytest
from planner_clusters import FAST, NIC, SLOW, Builder

from parallel3d.planner.links import Network
from parallel3d.planner.placement import Traffic, place, step_seconds
from parallel3d.planner.work import Collective

SEEDS = range(200)


def random_cluster(rng: random.Random) -> Builder:
    """Up to 8 GPUs in hosts of unequal sizes, one card at a quarter of the speed, two types of GPU."""
    built = Builder()
    left, host = rng.choices([2, 3, 4, 5, 6, 7, 8], [1, 1, 3, 2, 4, 4, 5])[0], 0
    switches = rng.choice([["leaf"], ["leaf0", "leaf1"]])
    slow_host, slow_kind = rng.randrange(3), rng.randrange(3)
    while left:
        gpus = min(left, rng.choice([1, 2, 2, 4, 4, 8]))
        nic = [NIC / 4 if host == slow_host and i == 0 else NIC for i in range(gpus)]
        device = SLOW if host == slow_kind else FAST
        islands = 2 if gpus > 2 and rng.random() < 0.3 else 1
        built.host(f"h{host}", gpus, device=device, islands=islands, nic=nic, switches=switches)
        left, host = left - gpus, host + 1
    for switch in switches[1:]:
        built.edge(switch, switches[0], "network", NIC, 1e-6)
    return built


def random_traffic(rng: random.Random, stages: int) -> Traffic:
    def volume(low: float, high: float) -> float:
        return 10 ** rng.uniform(math.log10(low), math.log10(high))

    return Traffic(
        model=((Collective("all_reduce", volume(1e5, 1e8)), 100.0),),
        data=(
            (Collective("reduce_scatter", volume(1e7, 1e10)), 1.0),
            (Collective("all_gather", volume(1e7, 1e10)), 1.0),
        ),
        pipe=((volume(1e5, 1e8), 64.0),),
        loops=rng.random() < 0.3,
        flops=rng.choice([0.0, volume(1e12, 1e15)]),
        stage_bytes=tuple(rng.choice([20 << 30, 60 << 30]) for _ in range(stages)) if rng.random() < 0.3 else (),
    )


def random_shape(rng: random.Random, gpus: int) -> tuple[int, int, int]:
    world = gpus if rng.random() < 0.8 else max(2, gpus - 1)
    shapes = [(p, d, world // p // d) for p in range(1, world + 1) for d in range(1, world + 1) if world % (p * d) == 0]
    return rng.choice(shapes)


def every_assignment(gpus: int, shape: tuple[int, int, int]) -> np.ndarray:
    """With replicas and slices named by the order of their first stage's first GPUs; 7! and fewer, 8! over a symmetry."""
    world, (_, replicas, slices) = math.prod(shape), shape
    ways = np.array(list(permutations(range(gpus), world)), dtype=np.int64)
    first = ways[:, : replicas * slices].reshape(-1, replicas, slices)
    return ways[(np.diff(first[:, :, 0], axis=1) > 0).all(axis=1) & (np.diff(first[:, 0], axis=1) > 0).all(axis=1)]


@pytest.mark.parametrize("block", range(10))
def test_placement_is_within_a_percent_of_the_best_assignment(block):
    for seed in SEEDS[20 * block : 20 * block + 20]:
        rng = random.Random(seed)
        network = Network(random_cluster(rng).cluster())
        shape = random_shape(rng, len(network.cluster.gpus))
        traffic = random_traffic(rng, shape[0])
        placed = place(network, shape, traffic)
        assert len(set(placed)) == math.prod(shape)
        all_ways = every_assignment(len(network.cluster.gpus), shape)
        best = min(
            step_seconds(network, shape, traffic, all_ways[i : i + 4096]).min() for i in range(0, len(all_ways), 4096)
        )
        assert step_seconds(network, shape, traffic, np.array([placed]))[0] <= 1.01 * best, (seed, shape, traffic)
