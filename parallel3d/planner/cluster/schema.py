"""Schema of a cluster's YAML, as pydantic models: unknown keys are refused, units are read, each problem has its remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from parallel3d.errors import nearest

MOST_GPUS = 2**17  # of a cluster, and the most parts of a kind
_Name = Annotated[str, Field(max_length=253)]
LinkKind = Literal["nvlink", "pcie", "nic", "network"]

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30}
# A unit's last part, by what it makes of the number. Bits are written with a small b, as data sheets do.
_UNITS: Mapping[str, Mapping[str, float]] = {
    "bytes a second": {"": 1.0, "B/s": 1.0, "Bps": 1.0, "b/s": 0.125, "bps": 0.125, "bit/s": 0.125},
    "bytes": {"": 1.0, "B": 1.0},
    "FLOP/s": {"": 1.0, "FLOP/s": 1.0, "FLOPS": 1.0, "flops": 1.0, "flop/s": 1.0},
    "seconds": {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9},
}


def _quantity(text: str, unit: str) -> float | None:
    """Read '400 Gb/s' as 50e9 bytes a second; return None for what is no such quantity."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)(e[-+]?\d+)?\s*([^\d\s].*)?", text.strip(), re.IGNORECASE)
    if match is None:
        return None
    number, rest = float(match[1] + (match[2] or "")), match[3] or ""
    prefixes = {"": 1.0} if unit == "seconds" else _PREFIXES
    for word, factor in _UNITS[unit].items():
        if rest.endswith(word) and (prefix := rest.removesuffix(word).lower()) in prefixes:
            return number * factor * prefixes[prefix]
    return None


def _reads(unit: str, example: str, *, zero: bool = False) -> BeforeValidator:
    def read(value: object) -> float:
        number = _quantity(value, unit) if isinstance(value, str) else value
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise ValueError(f"{value!r} are no {unit}; give a number, or one with its unit such as {example}")
        if not (0 <= number < float("inf")) or (number == 0 and not zero):
            raise ValueError(f"{value!r} is not {'at least' if zero else 'above'} 0; give {unit}, such as {example}")
        return int(number) if unit == "bytes" else float(number)

    return BeforeValidator(read)


Bandwidth = Annotated[float, _reads("bytes a second", "48e9, '48 GB/s' or '400 Gb/s'")]
Seconds = Annotated[float, _reads("seconds", "2e-6 or '2 us'", zero=True)]
Flops = Annotated[float, _reads("FLOP/s", "989e12 or '989 TFLOP/s'")]
Bytes = Annotated[int, _reads("bytes", "80e9 or '80 GB'")]


class Described(BaseModel):
    """Part of a cluster's description. Unknown keys are refused with the nearest known one."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known_keys_only(cls, given: object) -> object:
        if isinstance(given, Mapping):
            unknown = [str(key) for key in given if key not in cls.model_fields]
            if unknown:
                keys = ", ".join(cls.model_fields)
                raise ValueError(
                    f"unknown key {unknown[0]!r};{nearest(unknown[0], cls.model_fields)} Keys here: {keys}"
                )
        return given

    @cached_property
    def given(self) -> dict[str, Any]:
        """The fields that are not None."""
        return {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}


class _Counted(Described):
    name: _Name
    count: int | None = Field(default=None, ge=1, le=MOST_GPUS)

    @property
    def names(self) -> list[str]:
        """The name of one, or the numbered names of several equal ones."""
        return [self.name] if self.count is None else [f"{self.name}{k}" for k in range(self.count)]


class DeviceSpec(Described):
    """A user's device, see cluster.Device. base: a device that gives the values that are left out."""

    base: str | None = None
    memory: Bytes | None = None
    peak_flops: Flops | None = None
    gemm_flops: Flops | None = None
    attention_flops: Flops | None = None
    memory_bandwidth: Bandwidth | None = None
    kernel_seconds: Seconds | None = None
    host_seconds: Seconds | None = None
    host_bandwidth: Bandwidth | None = None
    host_memory: Bytes | None = None
    host_memory_bandwidth: Bandwidth | None = None
    disk_bandwidth: Bandwidth | None = None


class GpusSpec(Described):
    """Some equal GPUs of a host. memory: where it differs from the device's."""

    device: str
    count: int = Field(default=1, ge=0, le=MOST_GPUS)
    memory: Bytes | None = None


class WireSpec(Described):
    """A link, in each direction. message_bandwidth: bandwidth of a single message, where that is less."""

    bandwidth: Bandwidth
    latency: Seconds | None = None
    message_bandwidth: Bandwidth | None = None


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
    devices: Mapping[str, DeviceSpec] = {}
    hosts: tuple[HostSpec, ...]
    switches: tuple[SwitchSpec, ...] = ()
    links: tuple[LinkSpec, ...] = ()
    measured: Mapping[str, Any] = {}
