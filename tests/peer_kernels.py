"""Helpers for tests of the kernels of tensor-parallel ranks on real devices."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.topology import ProcessTopology
from parallel3d.kernels.all_reduce import AllReduce

# Sums of at most 8 numbers in fp32 are rounded once.
ROUNDOFF = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}
GUARD, POISON = 64, 77.0
ITERATIONS = 10_000
WORLDS = [2, 4, 8]


def slices() -> ProcessGroups:
    """All ranks slice each layer."""
    return ProcessGroups(ProcessTopology(["data", "model"], [1, dist.get_world_size()]))


def opened(limit_s: float = 60.0) -> tuple[AllReduce, ProcessGroups, torch.device]:
    groups, device = slices(), torch.device("cuda", torch.cuda.current_device())
    kernel = AllReduce.open(groups, device, limit_s)
    assert kernel is not None, "p3d doctor says why"
    return kernel, groups, device


def gathered(x: Tensor) -> list[Tensor]:
    """Every rank's, by NCCL."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return parts


class Guarded:
    """A tensor that begins somewhere in memory whose rest nobody may write."""

    def __init__(self, shape: tuple[int, ...], offset: int, dtype: torch.dtype, device: torch.device):
        size = torch.Size(shape).numel()
        self._memory = torch.full((size + 2 * GUARD,), POISON, device=device, dtype=dtype)
        self._first, self._end = GUARD + offset, GUARD + offset + size
        self.tensor = self._memory[self._first : self._end].view(shape)

    def is_intact_around(self) -> bool:
        return bool((torch.cat([self._memory[: self._first], self._memory[self._end :]]) == POISON).all())
