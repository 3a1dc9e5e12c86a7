"""Schema of a cluster's YAML, as pydantic models: unknown keys are refused, units are read, each problem has its remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from parallel3d.costs.devices import Bandwidth, Bytes, Described, Seconds, WireSpec

MOST_GPUS = 2**17  # most GPUs of a cluster, and most hosts, cards or switches
_Name = Annotated[str, Field(max_length=253)]
LinkKind = Literal["nvlink", "pcie", "nic", "network"]


class _Counted(Described):
    name: _Name
    count: int | None = Field(default=None, ge=1, le=MOST_GPUS)

    @property
    def names(self) -> list[str]:
        """The name of one, or the numbered names of several equal ones."""
        return [self.name] if self.count is None else [f"{self.name}{k}" for k in range(self.count)]


class GpusSpec(Described):
    """Some equal GPUs of a host. memory: where it differs from the device's."""

    device: str
    count: int = Field(default=1, ge=0, le=MOST_GPUS)
    memory: Bytes | None = None


class NvlinkSpec(WireSpec):
    """The links of GPUs to the switch of their island. islands: GPUs by index; None: all of the host in one."""

    islands: tuple[tuple[int, ...], ...] | None = None


class NicSpec(WireSpec):
    """A network card, or `count` equal ones.

    - switch: the switch that it is plugged into, or a group of switches, over which the cards are dealt out in turn.
    - gpus: the GPUs on one PCIe switch with it. None: cards of a host whose NVLink joins all GPUs are dealt out to them, others
      are connected to the host's PCIe.
    """

    count: int = Field(default=1, ge=1, le=MOST_GPUS)
    switch: str | None = None
    gpus: tuple[int, ...] | None = None


class HostSpec(_Counted):
    """A host, or `count` equal ones, called name0, name1, ....

    machine: a machine that the host is like, except for the other keys; switch: of its network cards that name none.
    """

    name: _Name = "host"
    machine: str | None = None
    gpus: tuple[GpusSpec, ...] | None = None
    nvlink: NvlinkSpec | None = None
    pcie: WireSpec | None = None
    nics: tuple[NicSpec, ...] | None = None
    switch: str | None = None

    @field_validator("name")
    @classmethod
    def _name_that_nodes_can_have(cls, name: str) -> str:
        if re.search(r"[/*?\[\]\s]", name):
            raise ValueError(f"a host can't be called {name!r}; leave out '/', spaces and wildcards")
        return name


class SwitchSpec(_Counted):
    """A switch, or `count` equal ones called name0, name1, ..., each faster than all that is plugged into it."""


class LinkSpec(Described):
    """A link between two nodes, new or changed. between: names, or patterns such as "node*/nic3", of which all pairs.

    A value that is None stays as it is; a new link needs a bandwidth.
    """

    between: tuple[str, str]
    bandwidth: Bandwidth | None = None
    latency: Seconds | None = None
    message_bandwidth: Bandwidth | None = None
    kind: LinkKind | None = None


class ClusterSpec(Described):
    """The file. overlap, collective_seconds: see Cluster; measured: data that the numbers were fitted to, for the reader."""

    name: str | None = None
    # NCCL's rings over NVLink take 16 of 132 multiprocessors, bandwidth, and power. By steps that reduce gradients in every
    # micro-batch beside ones that don't (tools/bench/results): in fp32, eager, on 2 H200s it would be 1.8; in bf16, compiled,
    # on 4 of them 1.3.
    overlap: float = Field(default=1.5, ge=1)
    collective_seconds: Seconds = 20e-6  # fitted together with the latencies of costs/devices.yaml
    devices: Mapping[str, Mapping[str, Any]] = {}
    hosts: tuple[HostSpec, ...]
    switches: tuple[SwitchSpec, ...] = ()
    links: tuple[LinkSpec, ...] = ()
    measured: Mapping[str, Any] = {}
