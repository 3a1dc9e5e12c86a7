"""The real numbers of this host: measured in about a minute, fitted, and kept as a YAML that load_cluster reads."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import yaml

from parallel3d.atomic_write import write_whole
from parallel3d.errors import ConfigError, ExecutionError
from parallel3d.launcher.ranks import run_ranks
from parallel3d.planner.calibrate.measure_worker import ON_CPU, ON_GPUS, Effort, Measured, Transfer, measure_rank
from parallel3d.planner.search.presets import preset_of

_HEADER = """\
# Measured by p3d plan --measure. Bandwidths in bytes a second and direction, latencies in seconds, as fitted to what is under
# `measured`, which nothing reads. For several such hosts give the host a `count`, and `nics` if there are others than:
#   nics: [{bandwidth: 400 Gb/s, count: 8}]
"""
_CPU_PROCESSES = 4


def default_path() -> Path:
    """Where the measured cluster of this host is kept: cluster.yaml in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "parallel3d" / "cluster.yaml"


def measure_cluster(path: str | Path | None = None, processes: int | None = None, effort: Effort | None = None) -> Path:
    """Measure this host and write it to `path`, or default_path(), as a YAML that load_cluster reads; returns its path.

    With NCCL on its GPUs, each a process; without GPUs with gloo, on the CPU. processes: how many, None for all GPUs or 4 on
    the CPU, fewer with fewer cores. Takes about a minute. Raises ConfigError for a path that can't be written or more
    processes than GPUs, ExecutionError if a process fails.
    """
    gpus = torch.cuda.device_count()
    count = processes or gpus or min(_CPU_PROCESSES, os.cpu_count() or 1)
    if count < 1 or (gpus and count > gpus):
        raise ConfigError(f"can't measure with {count} processes on {gpus} GPUs; give 1 to {gpus or _CPU_PROCESSES}")
    target = default_path() if path is None else Path(path)
    _check_writable(target)
    try:
        measured = run_ranks(measure_rank, count, gpus > 0, effort or (ON_GPUS if gpus else ON_CPU))
    except ExecutionError as error:
        raise ExecutionError(f"measuring with {count} processes failed: {error}") from error
    write_whole(target, _HEADER + yaml.safe_dump(describe(measured), sort_keys=False, allow_unicode=True, width=120))
    return target


def _check_writable(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"can't make the folder of {path} ({error.strerror}); give another path to --measure"
        ) from None
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(
            f"can't write {path}; give --measure the path of a YAML file in a folder that you may write to"
        )


def describe(ranks: Sequence[Measured]) -> dict[str, Any]:
    """A host in the words of a cluster's YAML, of what its ranks measured; the numbers that were fitted to are with it."""
    by_name: dict[str, list[Measured]] = defaultdict(list)
    for rank in ranks:
        by_name[rank.device].append(rank)
    devices = {f"measured {name}": _device(same) for name, same in by_name.items()}
    names = [f"measured {rank.device}" for rank in ranks]
    host: dict[str, Any] = {
        "name": "host",
        "gpus": [{"device": name, "count": len(list(same))} for name, same in groupby(names)],
    }
    islands = ranks[0].islands
    transfers = _medians(ranks)
    if any(len(island) > 1 for island in islands):
        scope = "island" if len(islands) > 1 else "host"
        host["nvlink"] = _link(transfers, scope)
        if len(islands) > 1:
            host["nvlink"]["islands"] = [list(island) for island in islands]
    if len(islands) > 1:
        host["pcie"] = _link(transfers, "host")
    described: dict[str, Any] = {"name": f"this host, {len(ranks)} x {ranks[0].device}"}
    if slowdowns := [rank.slowdown for rank in ranks if rank.slowdown is not None]:
        described["overlap"] = round(median(slowdowns), 3)
        described["collective_seconds"] = (
            0.0  # it is part of the latencies, that are fitted to these ranks' collectives
        )
    return {**described, "devices": devices, "hosts": [host], "measured": _raw(ranks, transfers)}


def _device(ranks: Sequence[Measured]) -> dict[str, Any]:
    """Of ranks with equal GPUs, each number the median."""
    bursts = [max(2.0 * m * k * n / seconds for m, k, n, seconds in rank.products) for rank in ranks]
    fits = [fit_link([(1, nbytes, seconds) for nbytes, seconds in rank.moved]) for rank in ranks]
    preset = preset_of(ranks[0].device)
    numbers = {
        "memory": min(rank.memory for rank in ranks),
        # The data sheet's; of a device without one here, the fastest product.
        "peak_flops": median(bursts) if preset is None else preset.peak_flops,
        "gemm_flops": median(_without_operands(rank, fit[1]) for rank, fit in zip(ranks, fits, strict=True)),
        "attention_flops": median(max(rank.attention.values()) for rank in ranks),
        "memory_bandwidth": median(bandwidth for _, bandwidth in fits),
        "kernel_seconds": median(seconds for seconds, _ in fits),
        "host_seconds": median(rank.host for rank in ranks),
    }
    return {name: value if name == "memory" else _rounded(value) for name, value in numbers.items()}


def _without_operands(rank: Measured, bandwidth: float) -> float:
    """FLOP/s of the product that was timed for longest, beyond what its operands and its result take, see Device."""
    m, k, n, _ = rank.products[-1]
    flops = 2.0 * m * k * n
    seconds, itemsize = flops / rank.sustained, 4 if rank.device == "cpu" else 2
    # Caches of a CPU may be faster than its memory: no more than half of the time.
    return flops / max(seconds / 2, seconds - itemsize * (m * k + k * n + m * n) / bandwidth)


def _medians(ranks: Sequence[Measured]) -> list[Transfer]:
    """Each transfer with the median of the ranks' times that took part in one of its kind and size."""
    times: dict[Transfer, list[float]] = defaultdict(list)
    for transfer in (transfer for rank in ranks for transfer in rank.transfers if transfer.ranks > 1):
        times[transfer.model_copy(update={"seconds": 0.0})].append(transfer.seconds)
    return [transfer.model_copy(update={"seconds": median(found)}) for transfer, found in times.items()]


def _link(transfers: Iterable[Transfer], scope: str) -> dict[str, float]:
    """The two equal links, GPU to switch and switch to GPU, that these transfers went over."""
    collectives = [transfer for transfer in transfers if transfer.scope == scope and transfer.kind != "message"]
    messages = [transfer for transfer in transfers if transfer.scope == scope and transfer.kind == "message"]
    latency, bandwidth = fit_link([_ring(transfer) for transfer in collectives])
    link = {"bandwidth": _rounded(bandwidth), "latency": _rounded(latency / 2)}
    if messages:
        _, alone = fit_link([(1, message.nbytes, message.seconds) for message in messages])
        if alone < bandwidth:
            link["message_bandwidth"] = _rounded(alone)
    return link


def _ring(transfer: Transfer) -> tuple[float, float, float]:
    """Steps one after the other, bytes over each link, seconds."""
    steps = (2 if transfer.kind == "all_reduce" else 1) * (transfer.ranks - 1)
    return steps, steps / transfer.ranks * transfer.nbytes, transfer.seconds


def fit_link(samples: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """(latency, bandwidth), both above 0, for which latency * steps + nbytes / bandwidth is nearest to each sample's seconds.

    samples: (steps, nbytes, seconds), all above 0; nearest in relative terms, by least squares. Where that has no latency, as
    large messages took more than in proportion or times are noise, the fastest step is the latency, and the largest messages
    tell the bandwidth.
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


def _raw(ranks: Sequence[Measured], transfers: Iterable[Transfer]) -> dict[str, Any]:
    """What the numbers were fitted to, for the reader: of rank 0, transfers the median of ranks."""
    first = ranks[0]
    return {
        "when": time.strftime("%Y-%m-%d %H:%M:%S"),
        "torch": str(torch.__version__),
        "sustained FLOP/s of each rank": [_rounded(rank.sustained) for rank in ranks],
        "FLOP/s of products, in bursts": {
            f"{m}x{k}x{n}": _rounded(2.0 * m * k * n / s) for m, k, n, s in first.products
        },
        "FLOP/s of attention": {name: _rounded(rate) for name, rate in first.attention.items()},
        "bytes/s of additions": {nbytes: _rounded(nbytes / seconds) for nbytes, seconds in first.moved},
        "seconds of transfers": [
            f"{t.kind} of {t.nbytes} bytes, {t.ranks} ranks of one {t.scope}: {t.seconds:.3g}" for t in transfers
        ],
    }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
