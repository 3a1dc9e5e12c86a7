"""One step of a rank, profiled kernel by kernel, and what is kept of it: sums, never the trace."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from kernels import PARTS, Kernel, attribute
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule


def profile_step(step: Callable[[], object]) -> tuple[list[Kernel], int]:
    """The kernels of one step, after one that warms the profiler up, and the nanoseconds it took this rank. Collective.

    On the CPU its operators are taken for kernels. Those that hold others are there too: `attribute` counts no moment twice.
    """
    cuda = torch.cuda.is_available()
    # Of the host nothing is recorded where there is a device: that would slow the host down.
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    with profile(activities=[activity], schedule=schedule(wait=0, warmup=1, active=1)) as profiler:
        step()
        _wait_for_device()
        profiler.step()
        dist.barrier()
        start = time.perf_counter_ns()
        step()
        _wait_for_device()
        elapsed = time.perf_counter_ns() - start
    return [_kernel(event) for event in profiler.events() or [] if _runs_on_device(event, cuda)], elapsed


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _runs_on_device(event: Any, cuda: bool) -> bool:
    if not cuda:
        return str(event.name).startswith(("aten::", "gloo:"))
    # Ranges that the host marks are shown on the device too, as "nccl:..." those of collectives.
    marked = getattr(event, "is_user_annotation", False) or event.name.startswith(("nccl:", "ProfilerStep"))
    return event.device_type == DeviceType.CUDA and not marked


def _kernel(event: Any) -> Kernel:
    # Microseconds there, since the profile began.
    return Kernel(event.name, round(event.time_range.start * 1e3), round(event.time_range.end * 1e3))


def roofline_figures(step: Callable[[], object], gemm_flops: int, attention_flops: int) -> dict[str, Any]:
    """Return the JSON of a profiled step, lists over the ranks, for roofline.py. Collective.

    FLOPs: of this rank's step. The step ends with the last kernel, for which the host waits.
    """
    kernels, elapsed = profile_step(step)
    end = max((kernel.end for kernel in kernels), default=0)
    found = attribute(kernels, end - elapsed, end)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (elapsed, found.parts, found.hidden, gemm_flops, attention_flops))
    steps, parts, hidden, gemms, attentions = map(list, zip(*ranks, strict=True))
    return {
        "step_ns": steps,
        "parts_ns": {part: [of_rank[part] for of_rank in parts] for part in PARTS},
        "hidden_ns": hidden,
        "gemm_flops": gemms,
        "attention_flops": attentions,
    }
