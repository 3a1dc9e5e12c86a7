"""Measure this host in about a minute, and write the fitted numbers as a YAML that load_cluster reads."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import yaml

from parallel3d.atomic_write import atomic_write
from parallel3d.costs.devices import preset_of
from parallel3d.errors import ConfigError, ExecutionError
from parallel3d.launcher.ranks import run_ranks
from parallel3d.planner.calibrate.measure_worker import ON_CPU, ON_GPUS, Effort, Measured, Transfer, measure_rank
from parallel3d.planner.cluster.file import default_path, measured_name

_HEADER = """\
# Measured by p3d plan --measure. Bandwidths in bytes a second and direction, latencies in seconds, as fitted to what is under
# `measured`, which nothing reads. For several such hosts give the host a `count`, and `nics` if there are others than:
#   nics: [{bandwidth: 400 Gb/s, count: 8}]
"""
_CPU_PROCESSES = 4


def measure_cluster(path: str | Path | None = None, processes: int | None = None, effort: Effort | None = None) -> Path:
    """Measure this host and write it as a YAML that load_cluster reads. Takes about a minute; returns the YAML's path.

    It runs with NCCL on the host's GPUs, each a process; without GPUs with gloo, on the CPU.

    - path: of the YAML; None for default_path().
    - processes: None for all GPUs, or for 4 on the CPU, fewer with fewer cores.

    Raises ConfigError for a path that can't be written or more processes than GPUs, ExecutionError if a process fails.
    """
    gpus = torch.cuda.device_count()
    count = processes or gpus or min(_CPU_PROCESSES, os.cpu_count() or 1)
    if count < 1 or (gpus and count > gpus):
        raise ConfigError(f"can't measure with {count} processes on {gpus} GPUs; give 1 to {gpus or _CPU_PROCESSES}")
    target = default_path() if path is None else Path(path)
    with suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir() or not (target.parent.is_dir() and os.access(target.parent, os.W_OK)):
        raise ConfigError(
            f"can't write {target}; give --measure the path of a YAML file in a folder that you may write to"
        )
    try:
        measured = run_ranks(measure_rank, count, gpus > 0, effort or (ON_GPUS if gpus else ON_CPU))
    except ExecutionError as error:
        raise ExecutionError(f"measuring with {count} processes failed: {error}") from error
    content = yaml.safe_dump(describe(measured), sort_keys=False, default_flow_style=None, width=120)
    atomic_write(target, _HEADER + content)
    return target


def describe(ranks: Sequence[Measured]) -> dict[str, Any]:
    """Return the content of a cluster's YAML for a host that these ranks measured, with the numbers that were fitted to."""
    names = [measured_name(rank.device) for rank in ranks]
    gpus = [{"device": name, "count": len(list(same))} for name, same in groupby(names)]
    host: dict[str, Any] = {"name": "host", "gpus": gpus}
    islands, transfers = ranks[0].islands, _medians(ranks)
    if any(len(island) > 1 for island in islands):
        host["nvlink"] = _link(transfers, "island" if len(islands) > 1 else "host")
        if len(islands) > 1:
            host["nvlink"]["islands"] = [list(island) for island in islands]
    if len(islands) > 1:
        host["pcie"] = _link(transfers, "host")
    described: dict[str, Any] = {"name": f"this host, {len(ranks)} x {ranks[0].device}"}
    if slowdowns := [rank.slowdown for rank in ranks if rank.slowdown is not None]:
        described["overlap"] = round(median(slowdowns), 3)
        # Included in the latencies, which are fitted to these ranks' collectives.
        described["collective_seconds"] = 0.0
    devices = {name: _device([r for r, own in zip(ranks, names, strict=True) if own == name]) for name in names}
    raw = {
        "when": time.strftime("%Y-%m-%d %H:%M:%S"),
        "torch": str(torch.__version__),
        "ranks": list(map(asdict, ranks)),
    }
    return {**described, "devices": devices, "hosts": [host], "measured": json.loads(json.dumps(raw))}


def _device(ranks: Sequence[Measured]) -> dict[str, Any]:
    """Return a device of the YAML from the ranks with equal GPUs, each number their median.

    Values that aren't measured are those of the device's preset.
    """
    preset = preset_of(ranks[0].device)
    base = "cpu" if ranks[0].device == "cpu" else None if preset is None else preset.name
    fits = [fit_link([(1, nbytes, seconds) for nbytes, seconds in rank.moved]) for rank in ranks]
    bursts = [max(2.0 * m * k * n / seconds for m, k, n, seconds in rank.gemms) for rank in ranks]
    gemms = [_without_operands(rank, bandwidth) for rank, (_, bandwidth) in zip(ranks, fits, strict=True)]
    numbers = {
        # The data sheet's value, or, for a device without a preset, the rate of the fastest GEMM.
        "peak_flops": list(map(max, bursts, gemms)) if preset is None else [preset.peak_flops],
        "gemm_flops": gemms,
        "attention_flops": [max(rank.attention.values()) for rank in ranks],
        "memory_bandwidth": [bandwidth for _, bandwidth in fits],
        "kernel_seconds": [latency for latency, _ in fits],
        "host_seconds": [rank.host for rank in ranks],
    }
    if preset is not None and preset.fp8_flops:
        numbers["fp8_flops"] = [preset.fp8_flops / preset.gemm_flops * gemm for gemm in gemms]
    given: dict[str, Any] = {} if base is None else {"base": base}
    memory = min(rank.memory for rank in ranks)
    return {**given, "memory": memory, **{name: _rounded(median(values)) for name, values in numbers.items()}}


def _without_operands(rank: Measured, bandwidth: float) -> float:
    """Return FLOP/s of the sustained GEMM without the time that its operands and its result take, as Device has it."""
    m, k, n, _ = rank.gemms[-1]
    flops = 2.0 * m * k * n
    seconds, itemsize = flops / rank.sustained, 4 if rank.device == "cpu" else 2
    # Caches of a CPU may be faster than its memory: no more than half of the time.
    return flops / max(seconds / 2, seconds - itemsize * (m * k + k * n + m * n) / bandwidth)


def _medians(ranks: Sequence[Measured]) -> list[Transfer]:
    """Return each transfer with the median of the seconds of the ranks that took part in one of its kind and size."""
    times: dict[Transfer, list[float]] = defaultdict(list)
    for transfer in (transfer for rank in ranks for transfer in rank.transfers if transfer.ranks > 1):
        times[replace(transfer, seconds=0.0)].append(transfer.seconds)
    return [replace(transfer, seconds=median(seconds)) for transfer, seconds in times.items()]


def _link(transfers: Iterable[Transfer], scope: str) -> dict[str, float]:
    """Return the two equal links, GPU to switch and switch to GPU, that these transfers went over."""
    alike = [transfer for transfer in transfers if transfer.scope == scope]
    latency, bandwidth = fit_link([_ring(transfer) for transfer in alike if transfer.kind != "message"])
    link = {"bandwidth": _rounded(bandwidth), "latency": _rounded(latency / 2)}
    if messages := [(1, transfer.nbytes, transfer.seconds) for transfer in alike if transfer.kind == "message"]:
        _, alone = fit_link(messages)
        if alone < bandwidth:
            link["message_bandwidth"] = _rounded(alone)
    return link


def _ring(transfer: Transfer) -> tuple[float, float, float]:
    """Return the steps of a ring one after the other, the bytes over each link, and the seconds."""
    steps = (2 if transfer.kind == "all_reduce" else 1) * (transfer.ranks - 1)
    return steps, steps / transfer.ranks * transfer.nbytes, transfer.seconds


def fit_link(samples: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return (latency, bandwidth), both above 0, for which latency * steps + nbytes / bandwidth is nearest to the seconds.

    samples: (steps, nbytes, seconds), all above 0. The fit is a least-squares fit of relative errors. If it gives no positive
    latency (large messages took more than in proportion, or times are noisy), the latency is that of the fastest step, and the
    bandwidth that of the largest messages.
    """
    steps, nbytes, seconds = np.array(samples, dtype=float).T
    scaled = np.stack([steps, nbytes], axis=1) / seconds[:, None]
    (latency, inverse), *_ = np.linalg.lstsq(scaled, np.ones(len(seconds)), rcond=None)
    if latency <= 0 or inverse <= 0:
        latency = (seconds / steps).min()
        large = nbytes == nbytes.max()
        beyond = np.median((seconds - latency * steps)[large])
        inverse = (beyond if beyond > 0 else np.median(seconds[large])) / nbytes.max()
    return float(latency), float(1 / inverse)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
