"""Devices and machines by data sheets and measurements. `p3d plan --measure` gives the numbers of your own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from parallel3d.errors import ConfigError, nearest
from parallel3d.planner.cluster.cluster import Device

_GIB = 1 << 30
# Measured: the forward of a decoder's block takes the host 0.8 ms and its backward 1.2 ms, eager or compiled (virtual machines
# with H200s, PyTorch 2.11).
HOST_SECONDS = 30e-6


# memory: what CUDA reports as total, a little less than the data sheet's. Data sheets are NVIDIA's. A card "sustains" what it
# does for minutes at its power cap, not in the first milliseconds; gemm_flops is without the time in which a product reads
# and writes its operands, see Device. "Best burst": the fastest bf16 product of any shape in S. Bekman's table of maximum
# achievable matmul FLOPS (github.com/stas00/ml-engineering, compute/accelerator). Only the H200's rates were measured; others
# are estimated, and every memory_bandwidth is 86-87% of its data sheet's.
_H200 = Device(
    name="H200",
    memory=int(139.81 * _GIB),
    peak_flops=989.4e12,  # data sheet: 1,979 with sparsity
    # Measured on 4 cards over minutes: bursts of 695-819 TFLOP/s at a decoder's shapes fall to 657 at 700 W and 1.5 GHz where
    # a card does nothing else, which is 718 without the operands' time; in a training's step, whose other kernels take less
    # power, GEMMs run at 694, or 788 (tools/bench/results, "roofline"). By the instructions of ten eager layouts' steps on 2
    # and 4 cards (tools/bench/results, "plan-accuracy"), which are 5% off at most.
    gemm_flops=770e12,
    # Measured with cuDNN, causal, 4096 tokens x 32 heads of 128: forward and backward in bursts of 385 TFLOP/s, 390 in a
    # training's step with a bubble of 8%.
    attention_flops=365e12,
    memory_bandwidth=4.1e12,  # data sheet: 4.8 TB/s
    kernel_seconds=3e-6,  # ramp, tail and the gap to the next kernel of a queue that is never empty
    host_seconds=HOST_SECONDS,
)
# The H200's die and power cap, with five stacks of HBM3 instead of six of HBM3e. Best burst 794.5 TFLOP/s, with the operands'
# time; fitted to NVIDIA's published steps (tests/data/published_steps.json).
_H100 = replace(_H200, name="H100", memory=int(79.1 * _GIB), gemm_flops=790e12, memory_bandwidth=2.9e12)  # 3.35 TB/s
_A100 = Device(
    name="A100",
    memory=int(79.15 * _GIB),
    peak_flops=312e12,
    # Best burst 271 TFLOP/s; 96% of it, fitted to the published steps of arXiv:2205.05198 and arXiv:2104.04473.
    gemm_flops=260e12,
    # FlashAttention-2 (arXiv:2307.08691) reports 50-73% of the peak; causal training at 4k tokens is near the lower end.
    attention_flops=170e12,
    memory_bandwidth=1.75e12,  # 2.039 TB/s
    kernel_seconds=4e-6,
    host_seconds=HOST_SECONDS,
)

DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        _H200,
        _H100,
        _A100,
        replace(_A100, name="A100-40GB", memory=int(39.39 * _GIB), memory_bandwidth=1.35e12),  # 1.555 TB/s
        # Best burst 253 TFLOP/s; 300 W instead of 400 W, so less of it lasts. 1.935 TB/s.
        replace(_A100, name="A100-PCIe", gemm_flops=215e12, attention_flops=140e12, memory_bandwidth=1.67e12),
        # 350 W, 756 TFLOP/s and 2.0 TB/s. Estimated: at half the H200's power about 60% of its rate, since power falls faster
        # than the clock.
        replace(
            _H100,
            name="H100-PCIe",
            memory=int(79.18 * _GIB),
            peak_flops=756e12,
            gemm_flops=440e12,
            attention_flops=220e12,
            memory_bandwidth=1.75e12,
        ),
        # 400 W, 835 TFLOP/s and 3.9 TB/s. Estimated like H100-PCIe.
        replace(
            _H100,
            name="H100-NVL",
            memory=int(93.1 * _GIB),
            peak_flops=835e12,
            gemm_flops=495e12,
            attention_flops=245e12,
            memory_bandwidth=3.4e12,
        ),
        # 350 W, 362 TFLOP/s and 864 GB/s. Estimated at two thirds of the peak.
        Device(
            name="L40S",
            memory=int(44.4 * _GIB),
            peak_flops=362e12,
            gemm_flops=240e12,
            attention_flops=140e12,
            memory_bandwidth=0.75e12,
            kernel_seconds=4e-6,
            host_seconds=HOST_SECONDS,
        ),
        # One process that computes in float32 on about one core; `p3d plan --measure` replaces it.
        Device(
            name="cpu",
            memory=8 * _GIB,
            peak_flops=0.1e12,
            gemm_flops=0.06e12,
            attention_flops=0.03e12,
            memory_bandwidth=10e9,
            kernel_seconds=10e-6,
        ),
    )
}

# Factor by which compute is slower while a collective runs beside it: NCCL's rings over NVLink take 16 of 132
# multiprocessors, bandwidth, and power. By steps that reduce gradients in every micro-batch beside ones that don't
# (tools/bench/results): in fp32, eager, on 2 H200s it would be 1.8; in bf16, compiled, on 4 of them 1.3.
OVERLAP = 1.5


@dataclass(frozen=True)
class _Wiring:
    """Links of the machines of a device, in B/s each way.

    - nvlink: None for PCIe only; island: number of GPUs that NVLink joins, None for all of the machine.
    - gpus_per_nic: number of GPUs that share a network card.
    """

    pcie: float
    nic: float
    nvlink: float | None = None
    island: int | None = None
    gpus_per_nic: int = 1


# NVLink, as NCCL's collectives and copies between peers sustain it. Hopper: 450 GB/s by the data sheet; 311-325 for
# reduce-scatter and all-gather over 4 H200, and for 32 MiB to a peer with its signal (measured). Ampere: 300 GB/s;
# 230-235 bus bandwidth in nccl-tests on 8 GPUs.
_NVLINK4, _NVLINK3 = 320e9, 233e9
# Network cards: "24 GB/s is the peak performance per 200G NIC" and "46-48 GB/s per NIC" of 400 Gb/s, say NCCL's
# developers (NVIDIA/nccl-tests issues 119 and 290).
_HDR, _NDR = 24e9, 48e9
# 16 lanes of 32 and 64 GB/s by the standard: to a network card, no less than that takes; between peers over the host, the
# bus bandwidth of nccl-tests (20 GB/s in its issue 178; 35-45 are reported for Gen5).
_PCIE4, _PCIE5 = 25e9, 50e9
_PEERS4, _PEERS5 = 20e9, 40e9

_WIRING: Mapping[str, _Wiring] = {
    "H200": _Wiring(_PCIE5, _NDR, _NVLINK4),
    "H100": _Wiring(_PCIE5, _NDR, _NVLINK4),
    "A100": _Wiring(_PCIE4, _HDR, _NVLINK3),
    "A100-40GB": _Wiring(_PCIE4, _HDR, _NVLINK3),
    "A100-PCIe": _Wiring(_PEERS4, _HDR, gpus_per_nic=2),
    "H100-PCIe": _Wiring(_PEERS5, _NDR, gpus_per_nic=2),
    # Bridges join pairs with 300 GB/s each way; for nccl-tests on them, reports go from 116 (NVIDIA/nccl issue 1161) to 230.
    "H100-NVL": _Wiring(_PEERS5, _NDR, 200e9, island=2, gpus_per_nic=2),
    "L40S": _Wiring(_PEERS4, _HDR, gpus_per_nic=2),
    # gloo over the loopback, and over 10 Gb/s Ethernet.
    "cpu": _Wiring(2e9, 1.1e9, gpus_per_nic=64),
}

# What any collective takes beyond its messages, and seconds that one edge adds to a message. Over an NVLink switch there are
# two edges: NCCL's ring all-reduce of 64 KiB over 4 H200 takes 31 us in 6 steps (measured); how much of that is a step's is
# estimated, so that 14 steps over 8 GPUs take 45 us and not twice as long. From host to host there are two of PCIe and two of
# network cards: 14 us, as NCCL's own tuning has.
COLLECTIVE_SECONDS = 20e-6
LATENCY: Mapping[str, float] = {"nvlink": 0.9e-6, "pcie": 1e-6, "nic": 6e-6, "network": 0.5e-6}
_CPU_LATENCY = 30e-6  # of sockets

# Product names of machines.
MACHINES: Mapping[str, str] = {
    "dgx-a100": "8xA100",
    "dgx-h100": "8xH100",
    "dgx-h200": "8xH200",
    "hgx-h200-4": "4xH200",
}


# A part of CUDA's name for a device -> its preset; the first match counts.
_CUDA_NAMES: Mapping[str, str] = {
    "H200": "H200",
    "H100 PCIe": "H100-PCIe",
    "H100 NVL": "H100-NVL",
    "H100 80GB HBM3": "H100",
    "A100-SXM4-40GB": "A100-40GB",
    "A100-SXM": "A100",
    "A100-PCIE": "A100-PCIe",
    "A100 80GB PCIe": "A100-PCIe",
    "L40S": "L40S",
}


def preset_of(cuda_name: str) -> Device | None:
    """Return the preset of a device by CUDA's name for it, such as "NVIDIA H100 80GB HBM3"; None if there is none."""
    return next((DEVICES[name] for word, name in _CUDA_NAMES.items() if word in cuda_name), None)


class Catalogue:
    """Devices and machines by name, in any case: the presets, and devices that a cluster describes itself."""

    def __init__(self) -> None:
        self._devices = {name.lower(): found for name, found in DEVICES.items()}
        self._wiring = {name.lower(): wiring for name, wiring in _WIRING.items()}

    def add(self, described: Device, base: str | None) -> None:
        """Add a device, which is wired as `base` is. Raises ConfigError if there is one of this name."""
        name = described.name.lower()
        if name in self._devices:
            raise ConfigError(f"there is a device {self._devices[name].name!r} already; call yours something else")
        self._devices[name] = described
        if base is not None and base.lower() in self._wiring:
            self._wiring[name] = self._wiring[base.lower()]

    def device(self, name: str) -> Device:
        """Return the device of this name. Raises ConfigError, with the nearest name."""
        if name.lower() not in self._devices:
            names = [found.name for found in self._devices.values()]
            raise ConfigError(
                f"unknown device {name!r};{nearest(name, names)} Known are {', '.join(names)}; describe another one under "
                "`devices` of a cluster's YAML, or measure it with p3d plan --measure"
            )
        return self._devices[name.lower()]

    def machine(self, text: str) -> dict[str, Any]:
        """Return the host that '8xH100' or a name of MACHINES stands for, as in a cluster's YAML. Raises ConfigError."""
        match = re.fullmatch(r"(\d+) *x *(.+)", MACHINES.get(text.lower(), text).strip())
        if match is None:
            raise ConfigError(
                f"{text!r} is no machine; give GPUs and their device, such as 8xH100, or a name of "
                f"{', '.join(MACHINES)}.{nearest(text, MACHINES)}"
            )
        count, found = int(match[1]), self.device(match[2])
        if found.name.lower() not in self._wiring:
            raise ConfigError(
                f"it isn't known how a machine of {found.name!r} is wired; give the host gpus, nvlink, pcie and nics instead "
                "of `machine`, or the device a `base`"
            )
        wiring = self._wiring[found.name.lower()]
        latency = _CPU_LATENCY if wiring is _WIRING["cpu"] else None
        host: dict[str, Any] = {"gpus": [{"device": found.name, "count": count}], "pcie": _link(wiring.pcie, latency)}
        if wiring.nvlink is not None and count > 1:
            host["nvlink"] = _link(wiring.nvlink)
            if wiring.island is not None:
                firsts = range(0, count, wiring.island)
                host["nvlink"]["islands"] = [list(range(k, min(k + wiring.island, count))) for k in firsts]
        host["nics"] = [{**_link(wiring.nic, latency), "count": max(1, count // wiring.gpus_per_nic)}]
        return host


def _link(bandwidth: float, latency: float | None = None) -> dict[str, Any]:
    return {"bandwidth": bandwidth, **({} if latency is None else {"latency": latency})}
