"""Devices: the presets of devices.yaml, those that a user describes with units, and the seconds that they take for work."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from parallel3d.config.files import explain
from parallel3d.costs.work import Work
from parallel3d.errors import ConfigError, nearest

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30}
# Last part of a unit -> factor of the number. Bits are written with a small b, as in data sheets.
_UNITS: Mapping[str, Mapping[str, float]] = {
    "bytes a second": {"": 1.0, "B/s": 1.0, "Bps": 1.0, "b/s": 0.125, "bps": 0.125, "bit/s": 0.125},
    "bytes": {"": 1.0, "B": 1.0},
    "FLOP/s": {"": 1.0, "FLOP/s": 1.0, "FLOPS": 1.0, "flops": 1.0, "flop/s": 1.0},
    "seconds": {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9},
}


def _quantity(text: str, unit: str) -> float | None:
    """Read '400 Gb/s' as 50e9 bytes a second; return None for text that is not such a quantity."""
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
                    f"unknown key {unknown[0]!r}.{nearest(unknown[0], cls.model_fields)} Known here: {keys}"
                )
        return given

    @cached_property
    def given(self) -> dict[str, Any]:
        """The fields that are not None."""
        return {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}


class Device(Described):
    """A kind of GPU (or CPU).

    - memory: bytes.
    - peak_flops: dense bf16 FLOP/s of the data sheet, which MFU is relative to.
    - gemm_flops: FLOP/s of matrix products, as sustained in training, without the time that their operands and results take at
      memory_bandwidth; small or narrow products are slower by that.
    - fp8_flops: the same of products in fp8; 0 for as many as gemm_flops.
    - fp32_flops: the same of products and attention in float32, without TF32 as is PyTorch's default; 0 for as many as in bf16.
    - attention_flops: FLOP/s of fused attention, counting only the products that a causal kernel computes, with recomputation.
    - memory_bandwidth: bytes a second, read and written, in an addition of long tensors.
    - kernel_seconds: further seconds of any kernel.
    - host_seconds: seconds that the host needs to call an operator in the forward or backward of a training, Python included;
      0 where the host is the device.
    - host_bandwidth: bytes a second of copies from and to pinned host memory, in each direction while both are in use.
    - host_memory: bytes of the host's memory for each device; host_memory_bandwidth: bytes a second that an optimizer's step on
      the CPU reads and writes there; disk_bandwidth: bytes a second that are read from a local disk, and as many written, for
      each device.
    - preset: name of the preset that it is or is based on; "" for none.
    """

    name: str
    preset: str = ""
    memory: Bytes
    peak_flops: Flops
    gemm_flops: Flops
    fp8_flops: Flops = 0.0
    fp32_flops: Flops = 0.0
    attention_flops: Flops
    memory_bandwidth: Bandwidth
    kernel_seconds: Seconds
    host_seconds: Seconds = 0.0
    host_bandwidth: Bandwidth = 24e9
    host_memory: Bytes = 120 * 2**30
    host_memory_bandwidth: Bandwidth = 60e9
    disk_bandwidth: Bandwidth = 3e9


class WireSpec(Described):
    """A link, in each direction. message_bandwidth: bandwidth of a single message, where that is less."""

    bandwidth: Bandwidth
    latency: Seconds | None = None
    message_bandwidth: Bandwidth | None = None


class Wiring(Described):
    """Links of a machine. island: GPUs that NVLink joins, None for all; gpus_per_nic: GPUs that share a network card."""

    pcie: WireSpec
    nic: WireSpec
    nvlink: WireSpec | None = None
    island: int | None = None
    gpus_per_nic: int = 1


class Presets(Described):
    """The file devices.yaml, whose first lines describe its keys."""

    devices: Mapping[str, Mapping[str, Any]]
    machines: Mapping[str, str]
    cuda_names: Mapping[str, str]
    latency: Mapping[str, Seconds]


@cache
def presets() -> Presets:
    """Return what devices.yaml holds."""
    text = Path(__file__).with_name("devices.yaml").read_text(encoding="utf-8")
    return Presets.model_validate(yaml.safe_load(text))


class Catalogue:
    """Devices by name, in any case: the presets, and further devices of a cluster's YAML.

    described: values of each device, and its `base`: a preset, or an earlier device, whose values are used where none is given.
    Raises ConfigError for a name that a device has already, an unknown base, and missing or wrong values.
    """

    def __init__(self, described: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self._values: dict[str, dict[str, Any]] = {}  # by name in lower case, with `wiring`
        self.devices: dict[str, Device] = {}  # by their names
        for name, given in [*presets().devices.items(), *(described or {}).items()]:
            if name.lower() in self._values:
                raise ConfigError(f"there is a device {self.device(name).name!r} already; call yours something else")
            base = self._find(given["base"]) if "base" in given else {}
            preset = name if name in presets().devices else base.get("preset", "")
            values = {**base, **given, "name": name, "preset": preset}
            known = {key: value for key, value in values.items() if key not in ("base", "wiring")}
            if missing := [key for key, f in Device.model_fields.items() if f.is_required() and key not in known]:
                raise ConfigError(
                    f"devices.{name} lacks {', '.join(missing)}; give them, or `base`, a device that is like it otherwise, "
                    "such as H100"
                )
            try:
                self.devices[name] = Device.model_validate(known)
            except ValidationError as error:
                raise ConfigError(f"devices.{name}: {explain(error)}") from None
            self._values[name.lower()] = values

    def device(self, name: str) -> Device:
        """Return the device of this name. Raises ConfigError, with the nearest name."""
        return self.devices[self._find(name)["name"]]

    def wiring(self, name: str) -> Wiring | None:
        """Return how a machine of such devices is wired; None if that isn't known. Raises ConfigError as `device`."""
        values = self._find(name)
        return Wiring.model_validate(values["wiring"]) if "wiring" in values else None

    def _find(self, name: object) -> dict[str, Any]:
        found = self._values.get(str(name).lower())
        if found is None:
            raise ConfigError(
                f"unknown device {name!r}.{nearest(str(name), self.devices)} The known ones are {', '.join(self.devices)}; "
                "describe another under `devices` of a cluster's YAML, or measure it with p3d plan --measure"
            )
        return found


@cache
def preset_devices() -> Catalogue:
    """Return only the devices of devices.yaml."""
    return Catalogue()


def preset_of(cuda_name: str) -> Device | None:
    """Return the preset of a device by CUDA's name for it, such as "NVIDIA H100 80GB HBM3"; None if there is none."""
    names = presets().cuda_names
    return next((preset_devices().device(own) for word, own in names.items() if word in cuda_name), None)


# Share of the bandwidth at which a device adds long tensors that the kernels of layers reach: they reduce over rows, read with
# strides, or are short. From a decoder's steps on 4 H200, eager and compiled, whose difference is such kernels alone
# (2.4 of 4.1 TB/s), and compiled ones by themselves (1.6 TB/s, of fewer bytes than are really moved); 22B's layer of
# arXiv:2205.05198, table 4, on A100s has 0.8.
_OF_BANDWIDTH = 0.7
# Work of a decoder's mix, by which devices are compared.
_TYPICAL = Work(gemm_flops=1e15, attention_flops=1e14, moved=1e12)


def typical_seconds(device: Device) -> float:
    """Return the seconds of a typical mix of work: the slower a device, the more."""
    return compute_seconds(_TYPICAL, device)


def compute_seconds(work: Work, device: Device, samples: int = 1) -> float:
    """Return the device's seconds for the work, without its collectives.

    samples: predict this many samples from the work of one, approximately: what grows with them is multiplied.
    """
    growing = (
        (work.gemm_flops - work.fp32_gemm_flops) / device.gemm_flops
        + work.fp32_gemm_flops / (device.fp32_flops or device.gemm_flops)
        + work.fp8_flops / (device.fp8_flops or device.gemm_flops)
        + (work.attention_flops - work.fp32_attention_flops) / device.attention_flops
        + work.fp32_attention_flops / (device.fp32_flops or device.attention_flops)
        + work.operands / device.memory_bandwidth
        + work.moved / (_OF_BANDWIDTH * device.memory_bandwidth)
    )
    return samples * growing + work.weights / device.memory_bandwidth + work.kernels * device.kernel_seconds
