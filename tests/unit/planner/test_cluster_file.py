"""Clusters from short forms, mappings and YAML."""

import random
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.costs.devices import preset_devices
from parallel3d.errors import ConfigError
from parallel3d.planner.cluster.file import load_cluster

EXAMPLE = Path(__file__).parents[3] / "examples" / "clusters" / "two_unequal_hosts.yaml"


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


def test_ten_thousand_gpus_have_links_in_proportion():
    two, three, many = (load_cluster(f"{hosts}x8xH100") for hosts in (2, 3, 1280))
    assert len(many.gpus) == 10_240
    of_a_host = three.graph.number_of_edges() - two.graph.number_of_edges()
    assert many.graph.number_of_edges() == two.graph.number_of_edges() + 1278 * of_a_host


def test_every_preset_is_a_device_slower_in_training_than_on_its_data_sheet():
    for name, device in preset_devices().devices.items():
        assert name == device.name
        assert 0 < device.attention_flops < device.gemm_flops < device.peak_flops
        assert load_cluster(f"2x8x{name}").gpus[0].device == device


def test_the_example_has_unequal_gpus_cards_and_links():
    cluster = load_cluster(EXAMPLE)
    assert [(gpu.host, gpu.device.name) for gpu in cluster.gpus] == [("big", "H100")] * 8 + [("old", "A100")] * 4
    assert [gpu.device.memory for gpu in cluster.gpus[-2:]] == [preset_devices().device("A100").memory, 40e9]
    assert [gpu.island for gpu in cluster.gpus] == [0] * 8 + [1, 1, 2, 2]
    bandwidth = {frozenset(ends): value for *ends, value in cluster.graph.edges(data="bandwidth")}
    latency = {frozenset(ends): value for *ends, value in cluster.graph.edges(data="latency")}
    cards = {k: bandwidth[frozenset((f"big/nic{k}", f"rail{k}"))] for k in range(8)}
    assert cards == {k: 12e9 if k == 3 else 48e9 for k in range(8)}
    assert latency[frozenset(("big/nic3", "rail3"))] == latency[frozenset(("big/nic4", "rail4"))]
    assert {k: bandwidth[frozenset((f"old/nic{k}", f"rail{k}"))] for k in (0, 1)} == {0: 25e9, 1: 25e9}
    assert all(bandwidth[frozenset((f"rail{k}", "spine"))] == 36e9 for k in range(8))
    # The old host's cards hang at its PCIe, which all of its GPUs reach; the big one's each at one GPU.
    assert set(cluster.graph["old/pcie"]) == {*(f"old/gpu{k}" for k in range(4)), "old/nic0", "old/nic1"}
    assert set(cluster.graph["big/nic5"]) == {"big/gpu5", "rail5"}


@pytest.mark.parametrize(
    ("gpus", "cards", "near"),
    [
        (4, 4, [{0}, {1}, {2}, {3}]),
        (4, 2, [{0, 1}, {2, 3}]),
        (2, 4, [{0}, {0}, {1}, {1}]),
        (3, 1, [{0, 1, 2}]),
        (8, 3, [{0, 1, 2}, {3, 4, 5}, {6, 7}]),
    ],
)
def test_cards_are_dealt_out_to_gpus_in_order(gpus, cards, near):
    """Contiguous shares, the larger ones first."""
    host = {"gpus": [{"device": "H100", "count": gpus}], "nvlink": {"bandwidth": 1e9}, "pcie": {"bandwidth": 1e9}}
    cluster = load_cluster({"hosts": [{**host, "nics": [{"bandwidth": 1e9, "count": cards}]}]})
    found = [{int(other[-1]) for other in cluster.graph[f"host/nic{k}"]} for k in range(cards)]
    assert found == near


def test_devices_are_described_anew_or_from_others():
    spec = {
        "devices": {
            "cut": {"base": "H100", "memory": "64 GiB", "gemm_flops": "400 TFLOP/s"},
            "cut more": {"base": "cut", "memory_bandwidth": "1 TB/s"},
        },
        "hosts": [{"machine": "2xcut more"}],
    }
    cluster = load_cluster(spec)
    (device,) = {gpu.device for gpu in cluster.gpus}
    assert (device.memory, device.gemm_flops, device.memory_bandwidth) == (64 * 2**30, 400e12, 1e12)
    assert device.peak_flops == preset_devices().device("H100").peak_flops
    assert {gpu.island for gpu in cluster.gpus} == {0}  # wired as its base is


def test_an_nvlink_switch_joins_hosts_to_one_island():
    spec = {
        "hosts": [
            {"name": "tray", "count": 3, "gpus": [{"device": "H200", "count": 2}], "nvlink": {"bandwidth": 3e11}}
        ],
        "switches": [{"name": "rack"}],
        "links": [{"between": ["tray*/gpu*", "rack"], "bandwidth": "300 GB/s"}],
    }
    cluster = load_cluster(spec)
    assert {gpu.island for gpu in cluster.gpus} == {0}
    assert cluster.graph.edges["tray2/gpu1", "rack"]["kind"] == "nvlink"


@given(seed=st.integers(0, 10_000))
def test_the_order_in_which_things_are_said_changes_nothing(seed):
    rng = random.Random(seed)
    hosts = [
        {"name": name, "machine": f"{rng.choice([1, 2])}x{rng.choice(['H100', 'A100', 'L40S'])}", "switch": "rail"}
        for name in ("a2", "a10", "b")
    ]
    switches = [{"name": "rail", "count": 2}, {"name": "spine"}]
    links = [{"between": [f"rail{k}", "spine"], "bandwidth": rng.choice([1e9, 2e9])} for k in (0, 1)]
    first = load_cluster({"hosts": hosts, "switches": switches, "links": links})
    for things in (hosts, switches, links):
        rng.shuffle(things)
    links = [{**link, "between": link["between"][::-1]} for link in links]
    second = load_cluster({"hosts": hosts, "switches": switches, "links": links})
    assert first.gpus == second.gpus
    # Lists, not sets: what walks the graph should meet its nodes and links in the same order.
    assert list(first.graph.nodes(data=True)) == list(second.graph.nodes(data=True))
    assert [(node, list(ends.items())) for node, ends in first.graph.adjacency()] == [
        (node, list(ends.items())) for node, ends in second.graph.adjacency()
    ]


HOST = {"machine": "2xH100"}
TWO = {"machine": "2xH100", "count": 2}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("400 Gb/s", 50e9),
        ("48 GB/s", 48e9),
        ("48GBps", 48e9),
        ("1.5 TB/s", 1.5e12),
        (7e9, 7e9),
        ("7e9", 7e9),
        ("1 KiB/s", 1024),
    ],
)
def test_bandwidths_have_units(text, value):
    cluster = load_cluster({"hosts": [{**HOST, "nvlink": {"bandwidth": text}}]})
    assert cluster.graph.edges["host/gpu0", "host/nvlink0"]["bandwidth"] == value


@pytest.mark.parametrize(
    ("text", "value"), [("2 us", 2e-6), ("2µs", 2e-6), (3e-6, 3e-6), ("500 ns", 5e-7), (0, 0), ("1 ms", 1e-3)]
)
def test_latencies_have_units(text, value):
    cluster = load_cluster({"hosts": [{**HOST, "nvlink": {"bandwidth": 1e9, "latency": text}}]})
    assert cluster.graph.edges["host/gpu0", "host/nvlink0"]["latency"] == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("described", "words"),
    [
        ("0xH100", ["no GPUs", "8xH100"]),
        ("0x8xH100", ["no hosts", "8xH100"]),
        ({"hosts": []}, ["no GPUs"]),
        ({}, ["hosts", "is missing"]),
        ({"hosts": 8}, ["hosts: give a list, not 8"]),
        ({"hosts": ["8xH100"]}, ["hosts[0]: give a mapping of keys to values, not '8xH100'"]),
        ("8xH10", ["unknown device 'H10'", "Did you mean 'H100'?"]),
        ("H100", ["'H100' is neither a machine", "Did you mean '8xH100'?"]),
        ("dgx-h10", ["Did you mean 'dgx-h100'?"]),
        ("absent.yaml", ["no file absent.yaml"]),
        ({"hosts": [{"machine": "H100"}]}, ["'H100' is neither a machine", "8xH100"]),
        ({"hosts": [{**HOST, "nick": 3}]}, ["hosts[0]", "unknown key 'nick'", "Did you mean 'nics'?"]),
        ({"hosts": [HOST], "swiches": []}, ["unknown key 'swiches'", "Did you mean 'switches'?"]),
        ({"hosts": [{"name": "a b", **HOST}]}, ["can't be called 'a b'"]),
        ({"hosts": [{"name": "a"}]}, ["'a' says nothing of its GPUs", "machine: 8xH100"]),
        ({"hosts": [HOST, HOST]}, ["two hosts are called 'host'", "count"]),
        ({"hosts": [{"gpus": [{"device": "H100", "count": 2}]}]}, ["'host/gpu0' can't reach 'host/gpu1'", "pcie"]),
        ({"hosts": [{**TWO, "nics": []}]}, ["'host0/gpu0' can't reach 'host1/gpu0'", "nics"]),
        (
            {"hosts": [{**TWO, "switch": "leef"}], "switches": [{"name": "leaf"}]},
            ["switch 'leef'", "Did you mean 'leaf'?"],
        ),
        (
            {
                "hosts": [{**TWO, "nics": [{"bandwidth": 1e9}], "switch": "a0"}, {"name": "b", **HOST, "switch": "a1"}],
                "switches": [{"name": "a", "count": 2}],
            },
            ["'b/gpu0' can't reach 'host0/gpu0'", "`links` join"],
        ),
        ({"hosts": [{**TWO, "switch": "leaf"}]}, ["unknown switch 'leaf'", "describe it under `switches`"]),
        ({"hosts": [TWO], "switches": [{"name": "a"}, {"name": "b"}]}, ["doesn't say its cards' switch", "a, b"]),
        ({"hosts": [TWO], "switches": [{"name": "a"}, {"name": "a"}]}, ["called 'a'"]),
        (
            {"hosts": [TWO], "links": [{"between": ["host0/nick1", "rail1"], "bandwidth": 1e9}]},
            ["links name 'host0/nick1'", "Did you mean 'host0/nic1'?"],
        ),
        ({"hosts": [TWO], "links": [{"between": ["host0/nic0", "rail1"]}]}, ["none between", "host0/gpu0, rail0"]),
        (
            {"hosts": [{**HOST, "nvlink": {"bandwidth": 0}}]},
            ["hosts[0].nvlink.bandwidth: 0 is not above 0", "48 GB/s"],
        ),
        ({"hosts": [{**HOST, "nvlink": {"bandwidth": -5e9}}]}, ["-5000000000.0 is not above 0"]),
        ({"hosts": [{**HOST, "nvlink": {"bandwidth": "fast"}}]}, ["'fast'", "48 GB/s"]),
        ({"hosts": [{**HOST, "nvlink": {"bandwidth": True}}]}, ["True"]),
        ({"hosts": [{**HOST, "nvlink": {"bandwidth": 1e9, "latency": "-1 us"}}]}, ["'-1 us'", "2 us"]),
        ({"hosts": [{**HOST, "nvlink": {"bandwidth": 1e9, "islands": [[0, 2]]}}]}, ["GPU 2 of 2", "0 to 1"]),
        ({"hosts": [{**HOST, "nvlink": {"bandwidth": 1e9, "islands": [[0, 1], [1]]}}]}, ["GPU 1 twice"]),
        ({"hosts": [{**HOST, "nics": [{"bandwidth": 1e9, "gpus": [5]}]}]}, ["nics.gpus", "GPU 5 of 2"]),
        (
            {"hosts": [{"gpus": [{"device": "H100", "count": 2}], "nics": [{"bandwidth": 1e9}]}]},
            ["near no GPU", "pcie: {bandwidth: 50e9}"],
        ),
        ({"hosts": [{"machine": "2xmine"}], "devices": {"mine": {"memory": "1 GB"}}}, ["lacks peak_flops", "base"]),
        ({"hosts": [HOST], "devices": {"h100": {"base": "H100"}}}, ["'H100' already"]),
        ({"hosts": [HOST], "devices": {"mine": {"base": "H1000"}}}, ["Did you mean 'H100'?"]),
        ({"hosts": [HOST], "overlap": 0.5}, ["overlap", "greater than or equal to 1"]),
        (
            {"hosts": [{**HOST, "nick": 3}, {**HOST, "count": 0}]},
            ["2 problems", "hosts[0]", "hosts[1].count"],
        ),
    ],
)
def test_what_cannot_be_is_an_error_with_the_remedy(described, words):
    with pytest.raises(ConfigError) as raised:
        load_cluster(described)
    assert [word for word in words if word not in str(raised.value)] == [], str(raised.value)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("99999999x8xH100", "hosts[0].count: Input should be less than or equal to 131072, not 99999999"),
        ("1x99999999xH100", "has more than 131072 GPUs"),
        pytest.param("9" * 5000 + "xH100", "is neither a machine nor a cluster's file", id="digits"),
        ("100000x8xH100", "there are 800000 GPUs; describe 131072 or fewer"),
        (
            {"hosts": [{"machine": "8xH100", "count": 100}], "links": [{"between": ["*", "*"]}]},
            "pairs of nodes; describe",
        ),
        pytest.param({"hosts": [{"machine": "8xH100", "name": "a" * 5000}]}, "at most 253 characters", id="name"),
    ],
)
def test_what_is_too_large_is_told_before_it_is_built(given, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_cluster(given)
    assert told in str(error.value)
    assert len(str(error.value)) < 21_000
