"""Devices and machines by data sheets and measurements: devices.yaml, of which the planner makes its presets."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml


@cache
def described() -> Any:
    """Return what devices.yaml holds."""
    return yaml.safe_load(Path(__file__).with_name("devices.yaml").read_text(encoding="utf-8"))


def peak_flops(cuda_name: str) -> float | None:
    """Return the dense 16-bit FLOP/s of a device's data sheet by CUDA's name for it; None if it isn't known."""
    devices = described()["devices"]
    device = next((devices[name] for word, name in described()["cuda_names"].items() if word in cuda_name), None)
    while device is not None and "peak_flops" not in device:
        device = devices[device["base"]]
    return None if device is None else float(device["peak_flops"])
