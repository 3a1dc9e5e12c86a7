"""A cluster's numbers from the measurements of ranks."""

from __future__ import annotations

import networkx as nx
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from records import make_record

from parallel3d.costs.devices import preset_of
from parallel3d.errors import ConfigError
from parallel3d.planner.calibrate.measure import describe, fit_link, measure_cluster
from parallel3d.planner.calibrate.measure_worker import Measured, Transfer, islands_of
from parallel3d.planner.calibrate.runs import cluster_of
from parallel3d.planner.cluster.file import default_path, load_cluster
from parallel3d.planner.search.plan import on_cpus

SIZES = [2**k for k in range(14, 30, 2)]


@given(
    latency=st.floats(1e-7, 1e-3),
    bandwidth=st.floats(1e6, 1e12),
    ranks=st.integers(2, 8),
)
def test_a_line_is_found_again(latency, bandwidth, ranks):
    times = [((ranks - 1) * latency + size / bandwidth, size) for size in SIZES]
    # A line whose one part is lost in the other's rounding can't be told from one without it.
    found = fit_link([(ranks - 1, size, seconds) for seconds, size in times])
    fitted = [((ranks - 1) * found[0] + size / found[1]) for size in SIZES]
    assert fitted == pytest.approx([seconds for seconds, _ in times], rel=1e-6)


@pytest.mark.parametrize(
    ("seconds", "latency", "bandwidth"),
    [
        ([1e-6, 3e-5, 1e-3], 1e-6, 1e6 / 0.999e-3),  # a hundred times the bytes take a thousand times as long
        ([1e-3, 1e-3, 1e-3], 1e-3, None),
        ([3e-3, 2e-3, 1e-3], 1e-3, 1e6 / 1e-3),
    ],
)
def test_times_that_are_no_line_still_have_a_latency_and_a_bandwidth(seconds, latency, bandwidth):
    found = fit_link([(1, size, time) for size, time in zip((1e4, 1e5, 1e6), seconds, strict=True)])
    assert found[0] == pytest.approx(latency, rel=1e-6)
    assert 0 < found[1] < float("inf")
    if bandwidth is not None:
        assert found[1] == pytest.approx(bandwidth, rel=1e-6)


@given(st.lists(st.tuples(st.integers(1, 14), st.floats(1, 1e10), st.floats(1e-9, 100)), min_size=2, max_size=20))
def test_no_times_give_a_link_that_cannot_be(samples):
    latency, bandwidth = fit_link(samples)
    assert 0 < latency < float("inf")
    assert 0 < bandwidth < float("inf")


def all_reduce_by_ring(ranks: int, nbytes: float, latency: float, bandwidth: float) -> float:
    """Step by step: each rank sends one part a step, once round to sum the parts, once to hand out the sums."""
    seconds = 0.0
    for _round in ("sum", "hand out"):
        for _step in range(ranks - 1):
            seconds += latency + nbytes / ranks / bandwidth
    return seconds


def gather_by_ring(ranks: int, nbytes: float, latency: float, bandwidth: float) -> float:
    return sum(latency + nbytes / ranks / bandwidth for _step in range(ranks - 1))


def transfers(scope: str, ranks: int, latency: float, bandwidth: float, message: float | None = None) -> list[Transfer]:
    """latency: of a step, over two links. message: bandwidth of one alone."""
    found = []
    for size in SIZES:
        times = {
            "all_reduce": all_reduce_by_ring(ranks, size, latency, bandwidth),
            "all_gather": gather_by_ring(ranks, size, latency, bandwidth),
            "reduce_scatter": gather_by_ring(ranks, size, latency, bandwidth),
        }
        if message is not None:
            times["message"] = latency + size / message
        for kind, seconds in times.items():
            found.append(Transfer(kind=kind, scope=scope, ranks=ranks, nbytes=size, seconds=seconds))
    return found


def measured(device="NVIDIA H200", **changes) -> Measured:
    numbers = {
        "device": device,
        "memory": 150 * 10**9,
        "gemms": ((4096, 4096, 4096, 2e-4), (8192, 8192, 8192, 1.5e-3)),
        "sustained": 650e12,
        "attention": {"cudnn": 350e12, "flash": 200e12},
        "moved": tuple((size, 2e-6 + size / 4e12) for size in (3 * 2**10, 3 * 2**28)),
        "host": 25e-6,
        "islands": ((0, 1, 2, 3),),
        "transfers": tuple(transfers("host", 4, 5e-6, 300e9, message=130e9)),
        "slowdown": 1.1,
    }
    return Measured(**{**numbers, **changes})


def loaded(ranks: list[Measured]):
    """By way of the file's text."""
    return load_cluster(yaml.safe_load(yaml.safe_dump(describe(ranks))))


def test_a_machine_of_one_island_comes_out_as_it_is():
    ranks = [
        measured(sustained=rate, slowdown=slower) for rate, slower in ((640e12, 1.0), (650e12, 1.1), (655e12, 1.2))
    ]
    cluster = loaded([*ranks, measured(sustained=650e12, slowdown=1.1)])
    assert len(cluster.gpus) == 4
    assert cluster.overlap == 1.1
    (device,) = {gpu.device for gpu in cluster.gpus}
    assert (device.memory, device.peak_flops) == (150 * 10**9, 989.4e12)
    # Of 1.69 ms that a product of 8192 takes at 650 TFLOP/s, its three bf16 matrices take 0.1 ms at 4 TB/s.
    beyond = 2 * 8192**3 / 650e12 - 3 * 2 * 8192**2 / 4e12
    assert device.gemm_flops == pytest.approx(2 * 8192**3 / beyond, rel=1e-3)
    assert device.attention_flops == 350e12
    assert (device.kernel_seconds, device.memory_bandwidth) == (pytest.approx(2e-6), pytest.approx(4e12))
    assert device.host_seconds == 25e-6
    assert sorted(cluster.graph["host/nvlink0"]) == [f"host/gpu{k}" for k in range(4)]
    for *_, link in cluster.graph.edges(data=True):
        expected = {"bandwidth": 300e9, "message_bandwidth": 130e9, "latency": 2.5e-6}
        assert link == {"kind": "nvlink", **{name: pytest.approx(value, rel=1e-3) for name, value in expected.items()}}


def test_what_is_not_measured_of_a_device_is_its_presets():
    """Products in fp8, which aren't measured either, are as many times those in bf16 as the preset's."""
    (device,), preset = {gpu.device for gpu in loaded([measured()] * 4).gpus}, preset_of("NVIDIA H200")
    rates = ("host_bandwidth", "host_memory", "host_memory_bandwidth", "disk_bandwidth")
    assert [getattr(device, rate) for rate in rates] == [getattr(preset, rate) for rate in rates]
    assert device.preset == "H200"
    assert device.fp8_flops / device.gemm_flops == pytest.approx(preset.fp8_flops / preset.gemm_flops, rel=1e-3)


def test_a_measured_cpu_is_no_gpu():
    """Nor is its peak below what its matrix products sustain, or a step's MFU could be more than 1."""
    slow = ((512, 512, 1024, 2 * 512 * 512 * 1024 / 30e9),)
    cluster = loaded([measured(device="cpu", sustained=60e9, gemms=slow, islands=((0,), (1,)), host=0.0)] * 2)
    assert on_cpus(cluster)
    assert all(gpu.device.peak_flops >= gpu.device.gemm_flops for gpu in cluster.gpus)


@pytest.mark.parametrize("device", ["NVIDIA H200", "Unheard Of"])
def test_runs_on_the_measured_host_are_predicted_by_its_numbers(device, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    default_path().parent.mkdir()
    default_path().write_text(yaml.safe_dump(describe([measured(device=device)] * 4)))
    assert cluster_of(make_record(device=device)).name == f"this host, 4 x {device}"
    assert cluster_of(make_record(device="NVIDIA A100-SXM4-80GB")).name == "2xA100"


def test_bridged_pairs_and_two_kinds_of_gpu():
    pair, host = transfers("island", 2, 4e-6, 200e9), transfers("host", 4, 2e-5, 20e9)
    alone = transfers("island", 2, 4e-6, 200e9)
    ranks = [
        measured(device=device, islands=((0, 1), (2,), (3,)), transfers=tuple(host + near))
        for device, near in (
            ("NVIDIA H100 NVL", pair),
            ("NVIDIA H100 NVL", alone),
            ("Unheard Of", []),
            ("Unheard Of", []),
        )
    ]
    cluster = loaded(ranks)
    assert [gpu.island for gpu in cluster.gpus] == [0, 0, 1, 2]
    assert [gpu.device.name for gpu in cluster.gpus] == ["measured NVIDIA H100 NVL"] * 2 + ["measured Unheard Of"] * 2
    # No data sheet: the fastest product, 2 * 8192**3 in 1.5 ms, is its peak.
    assert [gpu.device.peak_flops for gpu in cluster.gpus[1:3]] == [835e12, pytest.approx(733e12, rel=1e-3)]
    near, far = cluster.graph.edges["host/gpu0", "host/nvlink0"], cluster.graph.edges["host/gpu0", "host/pcie"]
    assert (near["kind"], near["bandwidth"]) == ("nvlink", pytest.approx(200e9, rel=1e-3))
    assert (far["kind"], far["bandwidth"], far["latency"]) == ("pcie", pytest.approx(20e9), pytest.approx(1e-5))
    assert sorted(cluster.graph["host/nvlink0"]) == ["host/gpu0", "host/gpu1"]


def test_a_measured_host_can_be_taken_many_times():
    """The head of the file says how."""
    spec = describe([measured()] * 4)
    spec["hosts"][0] |= {"count": 3, "nics": [{"bandwidth": "400 Gb/s", "count": 4}]}
    cluster = load_cluster(spec)
    assert [gpu.island for gpu in cluster.gpus] == [0] * 4 + [1] * 4 + [2] * 4
    path = nx.shortest_path(cluster.graph, "host0/gpu1", "host2/gpu1")
    assert path == ["host0/gpu1", "host0/nic1", "rail1", "host2/nic1", "host2/gpu1"]
    assert min(cluster.graph.edges[edge]["bandwidth"] for edge in nx.utils.pairwise(path)) == 50e9


def test_a_gpu_alone_has_no_links():
    cluster = loaded([measured(islands=((0,),), transfers=(), slowdown=None)])
    assert (len(cluster.gpus), cluster.graph.number_of_edges()) == (1, 0)


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.tuples(*[st.integers(0, n - 1)] * 2)))))
def test_islands_are_what_fast_pairs_join(case):
    size, fast = case
    fast = {(min(pair), max(pair)) for pair in fast if pair[0] != pair[1]}
    rates = {(a, b): 150e9 if (a, b) in fast else 50e9 for a in range(size) for b in range(a + 1, size)}
    island = {rank: {rank} for rank in range(size)}
    for a, b in fast:
        joined = island[a] | island[b]
        island.update(dict.fromkeys(joined, joined))
    assert islands_of(size, rates) == tuple(sorted({tuple(sorted(part)) for part in island.values()}))


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40GB"),
        ("NVIDIA L40S", "L40S"),
        ("Unheard Of", None),
    ],
)
def test_presets_are_known_by_cudas_names(name, preset):
    found = preset_of(name)
    assert (found and found.name) == preset


def test_the_file_is_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "parallel3d" / "cluster.yaml"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path() == tmp_path / ".cache" / "parallel3d" / "cluster.yaml"


def test_what_cannot_be_written_is_told_before_it_is_measured(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"can't write .*file/cluster\.yaml"):
        measure_cluster(tmp_path / "file" / "cluster.yaml")
    with pytest.raises(ConfigError, match="can't write"):
        measure_cluster(tmp_path)
    with pytest.raises(ConfigError, match="can't measure with -1 processes"):
        measure_cluster(tmp_path / "cluster.yaml", processes=-1)
