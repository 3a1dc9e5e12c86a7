"""What memory this process uses: the allocator's counters on CUDA, the resident set on the CPU. Neither waits."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from pathlib import Path

import torch

_STATM = Path("/proc/self/statm")


def memory_in_use(device: torch.device) -> Mapping[str, int]:
    """Bytes by kind: allocated, peak since `start_peak` and reserved on CUDA; resident, and its peak ever, on the CPU."""
    if device.type == "cuda":
        return {
            "allocated": torch.cuda.memory_allocated(device),
            "peak": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
        }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    resident = int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if _STATM.exists() else peak
    return {"resident": resident, "peak": max(peak, resident)}


def start_peak(device: torch.device) -> None:
    """Measure the peak from here on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
