"""Measuring this host's CPU with two processes and gloo."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from parallel3d.errors import ExecutionError
from parallel3d.planner.calibrate.measure import measure_cluster
from parallel3d.planner.calibrate.measure_worker import Effort
from parallel3d.planner.cluster.file import load_cluster

TINY = Effort(
    gemms=((64, 64, 64), (128, 256, 256)),
    attention=(2, 128, 32),
    moved=(3 * 2**10, 3 * 2**20),
    messages=(2**12, 2**18),
    seconds=0.03,
    sustained=0.2,
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures GPUs where there are some")
def test_two_processes_measure_a_cluster_that_loads(tmp_path):
    path = measure_cluster(tmp_path / "new folder" / "cluster.yaml", processes=2, effort=TINY)
    assert [entry.name for entry in path.parent.iterdir()] == ["cluster.yaml"]
    cluster = load_cluster(path)
    assert [(gpu.host, gpu.index) for gpu in cluster.gpus] == [("host", 0), ("host", 1)]
    assert {kind for *_, kind in cluster.graph.edges(data="kind")} == {"pcie"}
    assert cluster.overlap >= 1
    device = cluster.gpus[0].device
    # Timed here in another way; the machine may be busy with something else, so only the order of magnitude is sure.
    a, b = torch.randn(128, 256), torch.randn(256, 256)
    times = []
    for _ in range(200):
        begin = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - begin)
    assert 0.02 < device.gemm_flops / (2 * 128 * 256 * 256 / sorted(times)[100]) < 50
    assert 1e-8 < device.kernel_seconds < 1e-3
    assert 1e8 < device.memory_bandwidth < 1e12
    link = cluster.graph.edges["host/gpu0", "host/pcie"]
    assert 1e-6 < link["latency"] < 0.1
    assert 1e6 < link["bandwidth"] < 1e11


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures GPUs where there are some")
def test_a_process_that_fails_is_told_and_leaves_no_file(tmp_path):
    broken = replace(TINY, gemms=((-1, 64, 64),))
    with pytest.raises(ExecutionError, match="measuring with 2 processes failed"):
        measure_cluster(tmp_path / "cluster.yaml", processes=2, effort=broken)
    assert list(tmp_path.iterdir()) == []
