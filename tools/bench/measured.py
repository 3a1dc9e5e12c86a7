"""Steps in seconds, with their losses and memory, the same for this framework and for a plain loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Measured:
    """Timed steps: seconds of each, the losses of all steps, memory in GiB of this rank after the warm-up.

    in_a_row_s: seconds of a step among others that don't wait for each other; None on several ranks.
    """

    times: list[float]
    losses: list[float]
    peak_gib: float
    reserved_gib: float
    in_a_row_s: float | None


def synchronize() -> None:
    """Wait for this rank's device, then for every rank."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def measure(
    step: Callable[[], Tensor],
    warmup: int,
    steps: int,
    before: Sequence[Tensor] = (),
    mapped_bytes: Callable[[], int] = int,
) -> Measured:
    """Time `steps` steps, each between two synchronizations, after `warmup` others. Collective.

    One rank also times as many in a row.

    before: losses of steps that are done already.
    """
    losses = [*before, *(step() for _ in range(warmup))]
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        synchronize()
        start = time.perf_counter()
        losses.append(step())
        synchronize()
        times.append(time.perf_counter() - start)
    cuda = torch.cuda.is_available()
    peak, reserved = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if cuda else (0, 0)
    # Weights and rings that ranks map are the allocator's in other frameworks, and in other cases.
    mapped = mapped_bytes()
    peak, reserved = peak + mapped, reserved + mapped
    in_a_row = seconds_in_a_row(step, steps) if dist.get_world_size() == 1 else None
    return Measured(times, [float(loss) for loss in losses], peak / 2**30, reserved / 2**30, in_a_row)


def seconds_in_a_row(step: Callable[[], Tensor], steps: int) -> float:
    """Return the seconds of a step among `steps` between two synchronizations. Collective."""
    synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize()
    return (time.perf_counter() - start) / steps
