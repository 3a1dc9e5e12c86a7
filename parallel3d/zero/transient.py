"""Flat buffers that gradients pass through when they are reduced in every micro-batch."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from parallel3d.comm.collectives import Work


class TransientBuffers:
    """Buffers of the largest bucket's size, reused as soon as the reduction that reads them is done.

    Two suffice where gradients arrive bucket by bucket: one fills while the other is reduced.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device):
        self._numel, self._dtype, self._device = numel, dtype, device
        self._free: list[Tensor] = []
        self._leaving: deque[tuple[Tensor, Work]] = deque()
        self._filling = 0

    def acquire(self) -> Tensor:
        """A buffer to overwrite, [numel]; waits for the oldest reduction rather than allocate a third."""
        if not self._free and self._leaving and len(self._leaving) + self._filling >= 2:
            buffer, work = self._leaving.popleft()
            work.wait()
            self._free.append(buffer)
        self._filling += 1
        if self._free:
            return self._free.pop()
        return torch.empty(self._numel, dtype=self._dtype, device=self._device)

    def release(self, buffer: Tensor, work: Work) -> None:
        """Give a buffer back that `work` still reads."""
        self._filling -= 1
        self._leaving.append((buffer, work))

    def nbytes(self) -> int:
        """Bytes held now, filling ones included."""
        count = len(self._free) + len(self._leaving) + self._filling
        return count * self._numel * self._dtype.itemsize
