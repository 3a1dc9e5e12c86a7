"""Placement against every assignment of ranks to GPUs, up to the order of replicas and of tensor-parallel ranks."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from planner_clusters import FAST, NIC, SLOW, Builder, rails

from parallel3d.costs.work import Collective
from parallel3d.errors import ConfigError
from parallel3d.planner.network.links import Network
from parallel3d.planner.network.placement import Traffic, place, step_seconds

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
    )


def random_shape(rng: random.Random, gpus: int) -> tuple[int, int, int]:
    world = gpus if rng.random() < 0.8 else max(2, gpus - 1)
    shapes = [(p, d, world // p // d) for p in range(1, world + 1) for d in range(1, world + 1) if world % (p * d) == 0]
    return rng.choice(shapes)


def every_assignment(gpus: int, shape: tuple[int, int, int]) -> np.ndarray:
    """With replicas and tensor ranks named by the order of their first stage's first GPUs; 7! and fewer, 8! over a symmetry."""
    world, (_, replicas, tensor_ranks) = math.prod(shape), shape
    ways = np.array(list(permutations(range(gpus), world)), dtype=np.int64)
    first = ways[:, : replicas * tensor_ranks].reshape(-1, replicas, tensor_ranks)
    return ways[(np.diff(first[:, :, 0], axis=1) > 0).all(axis=1) & (np.diff(first[:, 0], axis=1) > 0).all(axis=1)]


@pytest.mark.one_in(2)
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


TRAFFIC = Traffic(
    model=((Collective("all_reduce", 3e7), 2000.0),),
    data=((Collective("reduce_scatter", 4e9), 1.0), (Collective("all_gather", 2e9), 1.0)),
    pipe=((3e7, 8.0),),
)


def test_slices_lie_in_islands_replicas_along_rails_and_stages_across():
    network = Network(rails(16).cluster())
    grid = np.array(place(network, (4, 4, 8), TRAFFIC)).reshape(4, 4, 8)
    hosts, rail = grid // 8, grid % 8
    assert (hosts == hosts[:, :, :1]).all()
    assert (rail == rail[:1, :1]).all()


def test_replicas_stay_in_a_pod_where_the_links_above_are_thin():
    built = rails(16, pod=4)
    for _, _, data in built.edges:
        if data["kind"] == "network":
            data["bandwidth"] /= 16
    network = Network(built.cluster())
    pods = np.array(place(network, (4, 4, 8), TRAFFIC)).reshape(4, 32) // 32
    assert (pods == pods[:, :1]).all()


def test_hosts_with_a_slow_card_stay_unused_and_slow_gpus_share_a_stage():
    built = Builder()
    for host in range(12):
        nic = [NIC / 4, *[NIC] * 3] if host in (2, 7) else NIC
        device = SLOW if host in (4, 9) else FAST
        built.host(f"h{host}", 4, device=device, nic=nic, switches=[f"rail{i}" for i in range(4)])
    network = Network(built.cluster())
    assert not {gpu // 4 for gpu in place(network, (2, 4, 4), TRAFFIC)} & {2, 7}
    grid = np.array(place(network, (6, 2, 4), replace(TRAFFIC, flops=1e16))).reshape(6, -1)
    kinds = [{network.cluster.gpus[gpu].device.name for gpu in stage} for stage in grid]
    assert sorted(map(len, kinds)) == [1] * 6, "a stage of both kinds waits for its slow ones"


def test_islands_that_slices_do_not_divide_leave_the_rest_unused():
    built = Builder()
    for host in range(4):
        built.host(f"h{host}", 6, switches=["leaf"])
    grid = np.array(place(Network(built.cluster()), (1, 4, 4), TRAFFIC)).reshape(4, 4) // 6
    assert (grid == grid[:, :1]).all()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shuffle", range(3))
@pytest.mark.parametrize("seed", [0, 1, 2, 3, None])
def test_order_of_hosts_changes_no_rank(seed, shuffle):
    rng = random.Random(seed)
    if seed is None:
        built, shape, traffic = rails(20, pod=8), (5, 4, 8), TRAFFIC
        built.host("odd", 8, device=SLOW, nic=[NIC / 4] * 8, switches=[f"leaf0.{i}" for i in range(8)])
    else:
        built = random_cluster(rng)
        shape = random_shape(rng, len(built.gpus))
        traffic = random_traffic(rng, shape[0])
    clusters = [built.cluster(), built.cluster(shuffle)]
    names = [[cluster.gpus[gpu].node for gpu in place(Network(cluster), shape, traffic)] for cluster in clusters]
    assert names[0] == names[1]


@pytest.mark.parametrize("hosts", [128, 1280])
def test_every_gpu_of_a_large_cluster_is_some_ranks(hosts):
    placed = place(Network(rails(hosts).cluster()), (8, hosts // 8, 8), TRAFFIC)
    assert sorted(placed) == list(range(8 * hosts))


def test_too_few_gpus_are_an_error():
    with pytest.raises(ConfigError, match="need 16 GPUs, cluster 'test' has 8"):
        place(Network(rails(1).cluster()), (2, 1, 8), TRAFFIC)
