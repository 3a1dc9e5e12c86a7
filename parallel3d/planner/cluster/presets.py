"""Devices and machines by name: the presets of costs/devices.yaml, and devices that a cluster describes itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from typing import Any

from parallel3d.costs.devices import described
from parallel3d.errors import ConfigError, nearest
from parallel3d.planner.cluster.cluster import Device
from parallel3d.planner.cluster.schema import MOST_GPUS, Described, DeviceSpec, Seconds, WireSpec


class _Wiring(Described):
    pcie: WireSpec
    nic: WireSpec
    nvlink: WireSpec | None = None
    island: int | None = None
    gpus_per_nic: int = 1


class _WiredDevice(DeviceSpec):
    wiring: _Wiring | None = None


class _Presets(Described):
    devices: Mapping[str, _WiredDevice]
    machines: Mapping[str, str]
    cuda_names: Mapping[str, str]
    latency: Mapping[str, Seconds]


_PRESETS = _Presets.model_validate(described())
MACHINES, LATENCY = _PRESETS.machines, _PRESETS.latency


class Catalogue:
    """Devices and machines by name, in any case: the presets, and further devices of a cluster's YAML.

    A device's base may be a preset, or a device above it in the file. Raises ConfigError for a name that a device has already,
    an unknown base, and missing values.
    """

    def __init__(self, described: Mapping[str, DeviceSpec] | None = None) -> None:
        self._known: dict[str, tuple[Device, _Wiring | None]] = {}  # by name in lower case
        for name, spec in [*_PRESETS.devices.items(), *(described or {}).items()]:
            self._add(name, spec)

    @property
    def devices(self) -> dict[str, Device]:
        """All devices by their names."""
        return {device.name: device for device, _ in self._known.values()}

    def _add(self, name: str, spec: DeviceSpec) -> None:
        given = {**spec.given, "name": name}
        wiring = given.pop("wiring", None)
        if spec.base is not None:
            base, its_wiring = self._find(given.pop("base"))
            device, wiring = replace(base, **given), wiring or its_wiring
        elif missing := [f.name for f in fields(Device) if f.default is MISSING and f.name not in given]:
            raise ConfigError(
                f"devices.{name} lacks {', '.join(missing)}; give them, or `base`, a device that is like it otherwise, such "
                "as H100"
            )
        else:
            device = Device(**given)
        if name.lower() in self._known:
            raise ConfigError(f"there is a device {self.device(name).name!r} already; call yours something else")
        self._known[name.lower()] = device, wiring

    def device(self, name: str) -> Device:
        """Return the device of this name. Raises ConfigError, with the nearest name."""
        return self._find(name)[0]

    def _find(self, name: str) -> tuple[Device, _Wiring | None]:
        if name.lower() not in self._known:
            names = list(self.devices)
            raise ConfigError(
                f"unknown device {name!r};{nearest(name, names)} Known are {', '.join(names)}; describe another one under "
                "`devices` of a cluster's YAML, or measure it with p3d plan --measure"
            )
        return self._known[name.lower()]

    def machine(self, text: str) -> dict[str, Any]:
        """Return the host that '8xH100' or a name of MACHINES stands for, as in a cluster's YAML. Raises ConfigError."""
        match = re.fullmatch(r"(\d{1,9}) *x *(.+)", MACHINES.get(text.lower(), text).strip())
        if match is None:
            raise ConfigError(
                f"{text!r} is no machine; give GPUs and their device, such as 8xH100, or a name of "
                f"{', '.join(MACHINES)}.{nearest(text, MACHINES)}"
            )
        count, (device, wiring) = int(match[1]), self._find(match[2])
        if count > MOST_GPUS:
            raise ConfigError(f"{text!r} has more than {MOST_GPUS} GPUs; give fewer")
        if wiring is None:
            raise ConfigError(
                f"it isn't known how a machine of {device.name!r} is wired; give the host gpus, nvlink, pcie and nics instead "
                "of `machine`, or the device a `base`"
            )
        nics = [{**wiring.nic.given, "count": max(1, count // wiring.gpus_per_nic)}]
        host: dict[str, Any] = {"gpus": [{"device": device.name, "count": count}], "pcie": wiring.pcie, "nics": nics}
        if wiring.nvlink is not None and count > 1:
            host["nvlink"] = wiring.nvlink.given
            if size := wiring.island:
                host["nvlink"]["islands"] = [list(range(k, min(k + size, count))) for k in range(0, count, size)]
        return host


DEVICES: Mapping[str, Device] = Catalogue().devices


def preset_of(cuda_name: str) -> Device | None:
    """Return the preset of a device by CUDA's name for it, such as "NVIDIA H100 80GB HBM3"; None if there is none."""
    return next((DEVICES[name] for word, name in _PRESETS.cuda_names.items() if word in cuda_name), None)
