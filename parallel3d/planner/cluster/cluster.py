"""A cluster: its devices, and the graph of links between them."""

from __future__ import annotations

from dataclasses import dataclass

import networkx as nx


@dataclass(frozen=True)
class Device:
    """A kind of GPU (or CPU).

    memory: bytes; peak_flops: dense bf16 of the data sheet, which MFU is measured by; gemm_flops: a second, as sustained in
    training by products of matrices, beyond the time that their operands and results take at memory_bandwidth, so that small
    or narrow ones are slower; attention_flops: of fused attention, of which only the products that a causal kernel really does
    are counted, those of its recomputation too; memory_bandwidth: bytes a second, read and written, in an addition of long
    tensors; kernel_seconds: what any kernel takes beyond that; host_seconds: what the host takes to call an operator in a
    training's forward or backward, with all of Python around it: 0 where the host is the device.
    """

    name: str
    memory: int
    peak_flops: float
    gemm_flops: float
    attention_flops: float
    memory_bandwidth: float
    kernel_seconds: float
    host_seconds: float = 0.0


@dataclass(frozen=True)
class Gpu:
    """One device. node: its name in the graph; host: its name; index: on the host.

    island: the same number for GPUs that NVLink joins, and for no others of the cluster.
    """

    node: str
    device: Device
    host: str
    index: int
    island: int


@dataclass(frozen=True)
class Cluster:
    """gpus: in the order of their ranks where nothing is placed. Same content, same cluster, in whatever order it was given.

    graph: an undirected graph of GPUs, switches and network cards. Each node has a `role` ("gpu", "nvlink" and "pcie", which
    are switches inside a host, "nic", "switch") and a `host`, None for a switch between hosts; each edge has `bandwidth`
    (bytes a second in each direction, as sustained), `latency` (seconds) and `kind` ("nvlink", "pcie", "nic", "network");
    where one message alone reaches less than all channels of a collective, also `message_bandwidth`.
    overlap: by what factor compute is slower while a collective runs beside it; collective_seconds: what any collective takes
    beyond its messages, to start on all ranks and to end.
    """

    name: str
    gpus: tuple[Gpu, ...]
    graph: nx.Graph
    overlap: float = 1.0
    collective_seconds: float = 0.0
