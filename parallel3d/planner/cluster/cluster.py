"""A cluster: its devices, and the graph of links between them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

import networkx as nx


@dataclass(frozen=True)
class Device:
    """A kind of GPU (or CPU).

    - memory: bytes.
    - peak_flops: dense bf16 FLOP/s of the data sheet, which MFU is relative to.
    - gemm_flops: FLOP/s of matrix products, as sustained in training, without the time that their operands and results take at
      memory_bandwidth; small or narrow products are slower by that.
    - attention_flops: FLOP/s of fused attention. Only the products that a causal kernel computes count, recomputation included.
    - memory_bandwidth: bytes a second, read and written, in an addition of long tensors.
    - kernel_seconds: further seconds of any kernel.
    - host_seconds: seconds that the host needs to call an operator in the forward or backward of a training, Python included;
      0 where the host is the device.
    - host_bandwidth: bytes a second that it copies from and to pinned host memory, in each direction while both are in use.
    - host_memory: bytes of the host's memory for each device; host_memory_bandwidth: bytes a second that an optimizer's step on
      the CPU reads and writes there; disk_bandwidth: bytes a second that are read from a local disk, and as many written, for
      each device.
    """

    name: str
    memory: int
    peak_flops: float
    gemm_flops: float
    attention_flops: float
    memory_bandwidth: float
    kernel_seconds: float
    host_seconds: float = 0.0
    host_bandwidth: float = 24e9
    host_memory: int = 120 * 2**30
    host_memory_bandwidth: float = 60e9
    disk_bandwidth: float = 3e9


@dataclass(frozen=True)
class Gpu:
    """One device. node: its name in the graph; host: the host's name; index: on the host.

    island: the same number for GPUs that NVLink joins, and for no others of the cluster.
    """

    node: str
    device: Device
    host: str
    index: int
    island: int


@dataclass(frozen=True)
class Cluster:
    """Devices and links, the same for the same content in any order.

    gpus: in the order of their ranks, unless ranks are placed otherwise.
    graph: an undirected graph of GPUs, switches and network cards. Each node has a `role` ("gpu", "nvlink" and "pcie", which
    are switches inside a host, "nic", "switch") and a `host`, None for a switch between hosts; each edge has `bandwidth`
    (bytes a second in each direction, as sustained), `latency` (seconds) and `kind` ("nvlink", "pcie", "nic", "network");
    where one message alone reaches less than all channels of a collective, also `message_bandwidth`.
    overlap: factor by which compute is slower while a collective runs beside it; collective_seconds: seconds of any collective
    beyond its messages, to start on all ranks and to end. reserve: share of each device's memory that `gpus` leave out.
    """

    name: str
    gpus: tuple[Gpu, ...]
    graph: nx.Graph
    overlap: float = 1.0
    collective_seconds: float = 0.0
    reserve: float = 0.0

    def with_reserve(self, share: float) -> Cluster:
        """Return the cluster with this share of each device's memory kept free."""
        devices = {d: replace(d, memory=int(d.memory * (1.0 - share))) for d in {gpu.device for gpu in self.gpus}}
        return replace(self, gpus=tuple(replace(gpu, device=devices[gpu.device]) for gpu in self.gpus), reserve=share)


@lru_cache(1 << 16)
def natural(name: str) -> tuple[tuple[str, int], ...]:
    """Return a key to sort names by that puts "host2" before "host10"."""
    return tuple((text, int(digits or -1)) for text, digits in re.findall(r"(\D*)(\d*)", name))
