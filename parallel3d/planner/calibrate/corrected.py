"""A cluster as runs have shown it to be."""

from __future__ import annotations

from dataclasses import replace

from parallel3d.planner.calibrate.calibration import Calibration
from parallel3d.planner.cluster.cluster import Cluster, Device


def corrected(cluster: Cluster, calibration: Calibration) -> Cluster:
    """The cluster with each rate and latency by the factor of its component."""
    factors = {name: factor.value for name, factor in calibration.factors.items()}
    if all(factor == 1.0 for factor in factors.values()):
        return cluster

    def device(given: Device) -> Device:
        return replace(
            given,
            gemm_flops=given.gemm_flops / factors["gemm"],
            attention_flops=given.attention_flops / factors["attention"],
            memory_bandwidth=given.memory_bandwidth / factors["element_wise"],
            kernel_seconds=given.kernel_seconds * factors["kernels"],
            host_seconds=given.host_seconds * factors["host"],
        )

    known = {gpu.device: device(gpu.device) for gpu in cluster.gpus}
    graph = cluster.graph.copy()
    for _, _, edge in graph.edges(data=True):
        factor = factors[edge["kind"]]
        edge["latency"] *= factor
        for name in ("bandwidth", "message_bandwidth"):
            if name in edge:
                edge[name] /= factor
    return replace(cluster, gpus=tuple(replace(gpu, device=known[gpu.device]) for gpu in cluster.gpus), graph=graph)
