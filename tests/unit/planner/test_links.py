"""Seconds and bytes on links, against formulas of the papers and plain shortest paths."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict

import networkx as nx
import numpy as np
import pytest
from planner_clusters import (
    NIC,
    NIC_LATENCY,
    NVLINK,
    NVLINK_LATENCY,
    PCIE,
    PCIE_LATENCY,
    Builder,
    rails,
)

from parallel3d.errors import ConfigError
from parallel3d.planner.network.fabric import ROUTED_BYTES
from parallel3d.planner.network.links import Network

PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
NETWORK_LATENCY = 2 * (2 * PCIE_LATENCY + NIC_LATENCY)  # GPU, switch, card, rail, card, switch, GPU


@pytest.mark.parametrize("kind", PASSES)
@pytest.mark.parametrize("members", [1, 2, 3, 8])
def test_ring_in_an_island(kind, members):
    built = Builder()
    built.host("a", 8)
    network = Network(built.cluster())
    steps = PASSES[kind] * (members - 1)
    for nbytes in (0, 1e3, 1e9):
        expected = steps * 2 * NVLINK_LATENCY + steps / members * nbytes / NVLINK
        assert network.each(kind, [range(members)], nbytes).max() == pytest.approx(expected)


@pytest.mark.parametrize("kind", PASSES)
def test_groups_along_rails_do_not_contend_and_groups_that_share_a_card_do(kind):
    hosts, nbytes = 4, 1e9
    network = Network(rails(hosts).cluster())
    steps = PASSES[kind] * (hosts - 1)
    alone = steps * NETWORK_LATENCY + steps / hosts * nbytes / NIC
    along = [[8 * host + rail for host in range(hosts)] for rail in range(8)]
    assert network.each(kind, along[:1], nbytes).max() == pytest.approx(alone)
    assert network.each(kind, along, nbytes).max() == pytest.approx(alone)
    assert network.each(kind, np.array(along), nbytes).max() == pytest.approx(alone)

    shared = Builder()
    for host in range(hosts):
        shared.host(f"h{host}", 8)
        for gpu in range(8):
            shared.edge(f"h{host}.pcie{gpu}", f"h{host}.root", "pcie", PCIE, 1e-7)
        shared.edge(f"h{host}.root", f"h{host}.nic", "pcie", 8 * PCIE, 1e-7)
        shared.edge(f"h{host}.nic", "leaf", "nic", NIC, NIC_LATENCY)
    times = [Network(shared.cluster()).each(kind, along[:count], nbytes).max() for count in (1, 8)]
    assert times[1] - times[0] == pytest.approx(7 * steps / hosts * nbytes / NIC)


def test_a_group_of_whole_hosts_uses_all_rails():
    nbytes, members = 8e9, 32
    network = Network(rails(4).cluster())
    exact = 2 * (members - 1) / members * nbytes / 8 / NIC
    assert network.each("all_reduce", [range(members)], nbytes).max() == pytest.approx(exact, rel=0.01)
    carried = network.link_bytes("all_reduce", [range(members)], nbytes)
    edges = network.fabric.edges
    on_cards = [carried[2 * i : 2 * i + 2] for i, edge in enumerate(edges) if edge.kind == "nic"]
    assert len(on_cards) == 32
    np.testing.assert_allclose(on_cards, 2 * (members - 1) / members * nbytes / 8)


@pytest.mark.parametrize(("nbytes", "rel"), [(64, 1e-3), (1 << 18, 0.05)])
def test_small_all_reduce_takes_the_steps_of_a_tree(nbytes, rel):
    """64 hosts: up and down a tree of depth 6 or 7 in place of 126 steps around."""
    network = Network(rails(64).cluster())
    time = network.each("all_reduce", [range(0, 512, 8)], nbytes).max()
    crossing = NETWORK_LATENCY + 2e-6  # two pods: the root's way may lead over a spine
    assert 12 * NETWORK_LATENCY < time < 14 * crossing * (1 + rel) + 2 * nbytes / NIC
    # A gather has no tree: 63 steps.
    assert network.each("all_gather", [range(0, 512, 8)], nbytes).max() > 63 * NETWORK_LATENCY


def test_hierarchical_gather_of_little_takes_fewer_steps_than_the_ring():
    hosts, nbytes = 16, 1024
    network = Network(rails(hosts).cluster())
    steps = (hosts - 1) * NETWORK_LATENCY + 7 * 2 * NVLINK_LATENCY
    data = 7 / 8 * nbytes / NVLINK + (hosts - 1) / hosts * nbytes / 8 / NIC
    assert network.each("all_gather", [range(8 * hosts)], nbytes).max() == pytest.approx(steps + data)


def test_groups_of_an_island_do_not_contend():
    built = Builder()
    built.host("a", 8)
    groups, nbytes = [[0, 1, 4], [2, 3, 5]], 1e9
    expected = 2 * (2 * NVLINK_LATENCY + nbytes / 3 / NVLINK)
    np.testing.assert_allclose(Network(built.cluster()).each("all_gather", groups, nbytes), expected)


def test_trials_do_not_disturb_each_other():
    network = Network(rails(2, gpus=4).cluster())
    rng = np.random.default_rng(0)
    trials = np.array([rng.permutation(8).reshape(2, 4) for _ in range(20)])
    together = network.each("all_reduce", trials, 1e7)
    np.testing.assert_allclose(together, [network.each("all_reduce", trial, 1e7) for trial in trials])
    pairs = trials.reshape(20, 4, 2)
    together = network.each("send", pairs, 1e7)
    np.testing.assert_allclose(together, [network.each("send", trial, 1e7) for trial in pairs])


@pytest.mark.parametrize("seed", range(20))
def test_transfers_equal_shortest_paths_with_contention(seed):
    """Unequal links, so that each shortest path is the only one; networkx finds them in the whole graph."""
    rng = random.Random(seed)
    built = Builder()
    for host in range(rng.randint(2, 4)):
        leaves = rng.sample(["leaf0", "leaf1", "leaf2"], 2)
        built.host(f"h{host}", rng.choice([1, 2, 4]), islands=1, switches=leaves, card_kind=rng.choice(["pcie", "nic"]))
    for leaf in ("leaf0", "leaf1", "leaf2"):
        built.edge(leaf, "spine", "network", 2 * NIC, 1e-6)
    for _, _, data in built.edges:
        data["bandwidth"] *= rng.uniform(0.5, 1.0)
    cluster = built.cluster()
    pairs = [rng.sample(range(len(cluster.gpus)), 2) for _ in range(12)]
    nbytes = rng.uniform(1e6, 1e9)

    def weight(a, b, data):
        return data["latency"] + ROUTED_BYTES / data["bandwidth"]

    paths = [nx.dijkstra_path(cluster.graph, cluster.gpus[a].node, cluster.gpus[b].node, weight) for a, b in pairs]
    carried = defaultdict(float)
    for path in paths:
        for step in itertools.pairwise(path):
            carried[step] += nbytes
    expected = [
        sum(cluster.graph.edges[step]["latency"] for step in itertools.pairwise(path))
        + max(carried[step] / cluster.graph.edges[step]["bandwidth"] for step in itertools.pairwise(path))
        for path in paths
    ]
    network = Network(cluster)
    np.testing.assert_allclose(network.each("send", pairs, nbytes), expected)
    assert network.each("send", pairs, nbytes).max() == pytest.approx(max(expected))
    edges, got = network.fabric.edges, network.link_bytes("send", pairs, nbytes)
    by_step = {(e.a, e.b): got[2 * i] for i, e in enumerate(edges)} | {
        (e.b, e.a): got[2 * i + 1] for i, e in enumerate(edges)
    }
    for step, found in by_step.items():
        assert found == pytest.approx(carried.get(step, 0.0))


def test_equal_routes_share_the_bytes():
    """Rail 0 of one pod to rail 0 of another: four spines, a quarter each."""
    cluster = rails(4, gpus=2, pod=2).cluster()
    network = Network(cluster)
    ends = [i for i, gpu in enumerate(cluster.gpus) if gpu.node in ("host0.gpu0", "host2.gpu0")]
    carried = network.link_bytes("send", [ends], 1e9)
    edges = network.fabric.edges
    spines = [
        carried[2 * i : 2 * i + 2].max() for i, edge in enumerate(edges) if edge.kind == "network" and "0.0" in edge.a
    ]
    np.testing.assert_allclose(spines, 0.25e9)


def test_a_neighbours_card_is_taken_where_that_is_shorter():
    """Cards of unequal speed: NCCL's PXN goes by NVLink to the faster one."""
    built = Builder()
    for host in ("a", "b"):
        built.host(host, 2, nic=[NIC / 8, NIC], switches=["leaf"])
    network = Network(built.cluster())
    by_neighbour = network.each("send", [(0, 3)], 1e9).max()
    assert by_neighbour == pytest.approx(NETWORK_LATENCY + 2 * NVLINK_LATENCY + 1e9 / NIC)


def test_one_message_may_reach_less_than_all_channels():
    built = Builder()
    built.host("a", 4)
    for _, _, data in built.edges:
        if data["kind"] == "nvlink":
            data["message_bandwidth"] = NVLINK / 4
    network = Network(built.cluster())
    assert network.each("send", [(0, 1)], 1e9).max() == pytest.approx(2 * NVLINK_LATENCY + 4e9 / NVLINK)
    assert network.each("send", [(0, 1), (0, 2), (0, 3)], 1e9).max() == pytest.approx(2 * NVLINK_LATENCY + 4e9 / NVLINK)
    assert network.each("all_gather", [range(4)], 4e9).max() == pytest.approx(6 * NVLINK_LATENCY + 3e9 / NVLINK)


def test_islands_of_a_host_meet_over_pcie_and_an_island_may_span_hosts():
    bridged = Builder()
    bridged.host("a", 8, islands=2)
    exact = 7 / 8 * 8e9 / 4 / PCIE  # four lanes each way between the islands
    assert Network(bridged.cluster()).each("all_gather", [range(8)], 8e9).max() == pytest.approx(exact, rel=0.01)

    rack = Builder()
    for host in range(4):
        rack.host(f"h{host}", 2)
        for gpu in range(2):
            rack.edge(f"h{host}.gpu{gpu}", "rack", "nvlink", 2 * NVLINK, NVLINK_LATENCY / 2)
    exact = 7 * (NVLINK_LATENCY + 1e9 / (2 * NVLINK))
    assert Network(rack.cluster()).each("all_gather", [range(8)], 8e9).max() == pytest.approx(exact)


@pytest.mark.parametrize("shuffle", range(4))
def test_order_of_hosts_changes_no_bit(shuffle):
    built = rails(6, gpus=4, pod=2)
    built.host("lone", 4, nic=[NIC / 4, NIC, NIC, NIC], switches=["leaf0.0", "leaf0.1"])

    def times(cluster):
        place = {gpu.node: index for index, gpu in enumerate(cluster.gpus)}
        names = [gpu.node for gpu in built.gpus]
        random.Random(7).shuffle(names)
        ranks = np.array([place[name] for name in names])
        network = Network(cluster)
        groups = [network.each(kind, ranks.reshape(7, 4), 1e8).max() for kind in PASSES]
        carried = {
            "pipe": network.link_bytes("send", ranks.reshape(-1, 2), 1e7),
            "data": network.link_bytes("send", ranks.reshape(-1, 2), 1.0),
        }
        return *groups, network.each("send", ranks.reshape(-1, 2), 1e7).max(), network.loads(carried)

    assert times(built.cluster(shuffle)) == times(built.cluster())


def test_loads_name_single_links_and_ranges_of_alike_ones():
    network = Network(rails(2).cluster())
    sends = {(0, 8): 4e9, (1, 9): 2e9, (1, 2): 1e9}
    carried = sum(network.link_bytes("send", [pair], nbytes) for pair, nbytes in sends.items())
    loads = network.loads({"pipe": carried, "data": 0 * carried})
    assert loads[0].nbytes == 4e9
    assert loads[0].seconds == pytest.approx(4e9 / NIC)
    assert loads[0].by_axis == {"pipe": 4e9, "data": 0.0}
    assert {load.kind for load in loads} == {"nic", "pcie", "nvlink"}
    assert [(load.a, load.b) for load in loads if load.kind == "nvlink"] == [
        ("host0.gpu1", "host0.nvswitch0"),
        ("host0.gpu2", "host0.nvswitch0"),
    ]

    large = Network(rails(32).cluster())
    loads = large.loads({"pipe": large.link_bytes("send", [(i, i + 8) for i in range(248)], 1e9)})
    assert {(load.a, load.b, load.kind) for load in loads} >= {("host0-31.nic0-7", "leaf0.0-7", "nic")}
    assert len(loads) == 3


@pytest.mark.parametrize("pair", [(0, 1), (4, 0), (0, 4)])
def test_hosts_that_nothing_connects_are_an_error(pair):
    built = Builder()
    for host, switch in enumerate(["left", "right", "left", "right"]):
        built.host(f"h{host}", 1, switches=[switch])
    built.host("lone", 1)
    gpus = built.cluster().gpus
    network = Network(built.cluster())
    assert network.each("send", [(0, 2)], 1e6).max() > 0
    with pytest.raises(ConfigError, match=rf"no links lead from {gpus[pair[0]].node} .* to {gpus[pair[1]].node}"):
        network.each("send", [(0, 2), pair], 1).max()
