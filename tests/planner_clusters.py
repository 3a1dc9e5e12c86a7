"""Clusters for tests, built edge by edge."""

from __future__ import annotations

import random
from dataclasses import replace

import networkx as nx

from parallel3d.costs.devices import Device
from parallel3d.planner.cluster.cluster import Cluster, Gpu

_RATES = ("memory", "peak_flops", "gemm_flops", "attention_flops", "memory_bandwidth", "kernel_seconds")
FAST, SLOW = (
    Device(name=name, **dict(zip(_RATES, numbers, strict=True)))
    for name, *numbers in (
        ("fast", 80 << 30, 989e12, 650e12, 500e12, 3e12, 5e-6),
        ("slow", 40 << 30, 312e12, 250e12, 200e12, 1.5e12, 5e-6),
    )
)

NVLINK, PCIE, NIC = 400e9, 50e9, 40e9
NVLINK_LATENCY, PCIE_LATENCY, NIC_LATENCY = 1e-6, 2e-6, 3e-6


def with_quick_hosts(cluster: Cluster) -> Cluster:
    """The same, whose hosts take no time to call operators."""
    return cluster.with_devices(lambda device: device.model_copy(update={"host_seconds": 0.0}))


class Builder:
    """Adds hosts and switches; `cluster(shuffle)` gives GPUs, nodes and edges in another order."""

    def __init__(self) -> None:
        self.gpus: list[Gpu] = []
        self.edges: list[tuple[str, str, dict[str, object]]] = []

    def edge(self, a: str, b: str, kind: str, bandwidth: float, latency: float, **more: float) -> None:
        self.edges.append((a, b, {"kind": kind, "bandwidth": bandwidth, "latency": latency, **more}))

    def host(
        self,
        name: str,
        gpus: int,
        *,
        device: Device = FAST,
        islands: int = 1,
        nic: float | list[float] = NIC,
        switches: list[str] | None = None,
        card_kind: str = "pcie",
    ) -> None:
        """GPUs of an island on one NVSwitch, each with a card of its own to switches[i mod len]; islands joined by a bridge."""
        for i in range(gpus):
            node, island = f"{name}.gpu{i}", i * islands // gpus
            self.gpus.append(Gpu(node, device, name, i, island=0))
            self.edge(node, f"{name}.nvswitch{island}", "nvlink", NVLINK, NVLINK_LATENCY)
            self.edge(node, f"{name}.pcie{i}", "pcie", PCIE, PCIE_LATENCY)
            if islands > 1:
                self.edge(f"{name}.pcie{i}", f"{name}.bridge", "pcie", PCIE, PCIE_LATENCY)
            if switches:
                speed = nic[i] if isinstance(nic, list) else nic
                self.edge(f"{name}.pcie{i}", f"{name}.nic{i}", card_kind, PCIE, PCIE_LATENCY)
                self.edge(f"{name}.nic{i}", switches[i % len(switches)], "nic", speed, NIC_LATENCY)

    def cluster(self, shuffle: int | None = None) -> Cluster:
        gpus, edges = list(self.gpus), list(self.edges)
        if shuffle is not None:
            rng = random.Random(shuffle)
            rng.shuffle(gpus)
            rng.shuffle(edges)
            edges = [(b, a, data) if rng.random() < 0.5 else (a, b, data) for a, b, data in edges]
        graph: nx.Graph = nx.Graph()
        graph.add_edges_from(edges)
        graph.add_nodes_from(gpu.node for gpu in gpus)
        joined: nx.Graph = nx.Graph([(a, b) for a, b, data in edges if data["kind"] == "nvlink"])
        islands = {node: k for k, nodes in enumerate(nx.connected_components(joined)) for node in nodes}
        return Cluster("test", tuple(replace(gpu, island=islands[gpu.node]) for gpu in gpus), graph)


def rails(hosts: int, gpus: int = 8, pod: int = 32, spines: int = 4) -> Builder:
    """Hosts of `gpus` cards, each on its rail's switch; a switch a rail and pod, and spines above them."""
    built = Builder()
    for host in range(hosts):
        built.host(f"host{host}", gpus, switches=[f"leaf{host // pod}.{rail}" for rail in range(gpus)])
    for leaf in sorted({f"leaf{host // pod}.{rail}" for host in range(hosts) for rail in range(gpus)}):
        for spine in range(spines):
            built.edge(leaf, f"spine{spine}", "network", NIC * pod / spines, 1e-6)
    return built
