"""The shape, dtype and device of a tensor that is expected."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorKind:
    """A contiguous tensor's shape, dtype and device."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def nbytes(self) -> int:
        """Of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"

    def empty(self) -> Tensor:
        """In memory of PyTorch's allocator."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)
