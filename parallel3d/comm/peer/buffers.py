"""Memory of messages: kinds of tensors, known before they come, and memory that is lent to a tensor for as long as it lives."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


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


@dataclass(eq=False)
class Loan:
    """Of memory to a tensor, until nothing refers to its storage any more.

    owner: what the memory is part of; it stays as long as the storage. marks: of streams that use the tensor beside the current
    one: PyTorch's allocator, which doesn't own the memory, forgets at once what `record_stream` says of it.
    """

    kind: TensorKind
    owner: object
    storage: StorageWeakRef
    marks: list[Any] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether nothing refers to the storage any more."""
        return bool(self.storage.expired())


def lend(address: int, kind: TensorKind, owner: object) -> tuple[Tensor, Loan]:
    """A tensor in memory that somebody else owns, with what is there."""
    make: Any = vars(torch._C)["_construct_storage_from_data_pointer"]
    storage = make(address, kind.device, kind.nbytes)
    loan = storage.loan = Loan(kind, owner, StorageWeakRef(storage))
    strides = [math.prod(kind.shape[k + 1 :]) for k in range(len(kind.shape))]
    return torch.empty(0, dtype=kind.dtype, device=kind.device).set_(storage, 0, kind.shape, strides), loan


def loan_of(tensor: Tensor) -> Loan | None:
    """Of the memory that the tensor lies in, if that is lent."""
    return getattr(tensor.untyped_storage(), "loan", None)
