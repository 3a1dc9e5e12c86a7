"""Clusters from short forms, mappings and YAML."""

import time

import networkx as nx
import pytest

from parallel3d.planner.cluster_file import load_cluster


@pytest.mark.parametrize(
    ("text", "hosts", "per_host", "device", "islands"),
    [
        ("8xH100", 1, 8, "H100", 1),
        ("4xH200", 1, 4, "H200", 1),
        ("dgx-a100", 1, 8, "A100", 1),
        ("2xDGX-H200", 2, 8, "H200", 2),
        ("16 x 8 x a100", 16, 8, "A100", 16),
        ("8xH100-NVL", 1, 8, "H100-NVL", 4),  # bridges join pairs
        ("2x8xL40S", 2, 8, "L40S", 16),  # PCIe alone
        ("1xA100-PCIe", 1, 1, "A100-PCIe", 1),
        ("2xcpu", 1, 2, "cpu", 2),
    ],
)
def test_short_forms_name_hosts_gpus_and_islands(text, hosts, per_host, device, islands):
    cluster = load_cluster(text)
    assert len({gpu.host for gpu in cluster.gpus}) == hosts
    assert [gpu.index for gpu in cluster.gpus] == list(range(per_host)) * hosts
    assert {gpu.device.name for gpu in cluster.gpus} == {device}
    assert [gpu.island for gpu in cluster.gpus] == sorted(gpu.island for gpu in cluster.gpus)
    assert len({gpu.island for gpu in cluster.gpus}) == islands
    assert all(gpu.node in cluster.graph for gpu in cluster.gpus)
    assert nx.is_connected(cluster.graph)


def test_rails_join_the_cards_of_one_index():
    """Two hosts of two GPUs: every edge, by its two ends."""
    cluster = load_cluster("2x2xH100")
    edges = {frozenset(ends): kind for *ends, kind in cluster.graph.edges(data="kind")}
    expected = {}
    for host in ("host0", "host1"):
        for k in (0, 1):
            expected[frozenset((f"{host}/gpu{k}", f"{host}/nvlink0"))] = "nvlink"
            expected[frozenset((f"{host}/gpu{k}", f"{host}/nic{k}"))] = "pcie"
            expected[frozenset((f"{host}/nic{k}", f"rail{k}"))] = "nic"
    expected |= {frozenset((f"rail{k}", "spine")): "network" for k in (0, 1)}
    assert edges == expected


def test_hosts_are_ordered_by_number():
    hosts = list(dict.fromkeys(gpu.host for gpu in load_cluster("12x1xH100").gpus))
    assert hosts == [f"host{k}" for k in range(12)]


def test_ten_thousand_gpus_load_in_a_second():
    begin = time.process_time()
    assert len(load_cluster("1280x8xH100").gpus) == 10_240
    assert time.process_time() - begin < 1
