"""Measuring this host's GPUs with NCCL."""

from __future__ import annotations

from dataclasses import replace

import torch

from parallel3d.planner.calibrate.measure import measure_cluster
from parallel3d.planner.calibrate.measure_worker import ON_GPUS
from parallel3d.planner.cluster.file import load_cluster

SHORT = replace(ON_GPUS, seconds=0.05, sustained=1.0, messages=(2**16, 2**22, 2**27))


def test_gpus_are_measured_below_their_peaks_and_above_a_tenth(num_gpus, tmp_path):
    cluster = load_cluster(measure_cluster(tmp_path / "cluster.yaml", effort=SHORT))
    assert len(cluster.gpus) == num_gpus
    for gpu in cluster.gpus:
        assert gpu.device.memory == torch.cuda.get_device_properties(gpu.index).total_memory
        assert 0.1 < gpu.device.gemm_flops / gpu.device.peak_flops < 1.05
        assert 0.03 < gpu.device.attention_flops / gpu.device.peak_flops < 1
        assert 1e-7 < gpu.device.kernel_seconds < 1e-4
        assert 1e-6 < gpu.device.host_seconds < 3e-4
    assert all(link["bandwidth"] > 1e9 and link["latency"] < 1e-3 for *_, link in cluster.graph.edges(data=True))
    assert 1 <= cluster.overlap < 3
