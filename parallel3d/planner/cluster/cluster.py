"""A cluster: its devices, and the graph of links between them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import networkx as nx

from parallel3d.costs.devices import Device


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
    overlap: factor by which compute and a collective are slower while both run on a rank; collective_seconds: seconds of any
    collective beyond its messages, to start on all ranks and to end. reserve: share of each device's memory that `gpus` leave
    out.
    """

    name: str
    gpus: tuple[Gpu, ...]
    graph: nx.Graph
    overlap: float = 1.0
    collective_seconds: float = 0.0
    reserve: float = 0.0

    def with_devices(self, change: Callable[[Device], Device]) -> Cluster:
        """Return the cluster with each kind of device changed."""
        changed = {device: change(device) for device in {gpu.device for gpu in self.gpus}}
        return replace(self, gpus=tuple(replace(gpu, device=changed[gpu.device]) for gpu in self.gpus))

    def with_reserve(self, share: float) -> Cluster:
        """Return the cluster with this share of each device's memory kept free."""
        kept = self.with_devices(lambda d: d.model_copy(update={"memory": int(d.memory * (1.0 - share))}))
        return replace(kept, reserve=share)


@lru_cache(1 << 16)
def natural(name: str) -> tuple[tuple[str, int], ...]:
    """Return a key to sort names by that puts "host2" before "host10"."""
    return tuple((text, int(digits or -1)) for text, digits in re.findall(r"(\D*)(\d*)", name))
