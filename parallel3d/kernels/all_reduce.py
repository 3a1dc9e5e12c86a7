"""All-reduce over NVLink (csrc/all_reduce.cu): how a message is cut into calls, the operators, and the reference in torch.

The operators name who sums by a number, since torch's schemas take no objects: `register` gives one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, library

# As the launcher numbers them.
DTYPES: Mapping[torch.dtype, int] = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
WORLD_SIZES = (2, 4, 8)
# Of a half of the staging buffer: what one call takes, 4096 tokens x 4096 features in bf16.
HALF_BYTES = 32 * 2**20
# As many multiprocessors as NCCL takes at most, beside which products go on.
MAX_BLOCKS = 32
_VECTOR_BYTES = 16
_WORD_BYTES = 8
# The most bytes that every rank reads whole from all peers. Of two ranks that moves no more than the other way, and meets once.
_ONE_SHOT_BYTES = {2: HALF_BYTES, 4: 512 * 2**10, 8: 256 * 2**10}


def all_reduce_ref(parts: Sequence[Tensor]) -> Tensor:
    """The sum of equal tensors in their order, at least in fp32, as the dtype that they have."""
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)


@dataclass(frozen=True)
class Piece:
    """One call of the kernel: elements [start, start + size) of a message."""

    start: int
    size: int
    two_shot: bool
    blocks: int


def pieces(size: int, element_bytes: int, world_size: int, threads: int) -> Iterator[Piece]:
    """The calls that sum a message of `size` elements, the same on every rank. threads: of a block, a vector each."""
    most = HALF_BYTES // element_bytes
    for start in range(0, size, most):
        length = min(most, size - start)
        two_shot = length * element_bytes > _ONE_SHOT_BYTES[world_size]
        vectors = -(-length * element_bytes // _VECTOR_BYTES)
        vectors = -(-vectors // world_size) if two_shot else vectors
        yield Piece(start, length, two_shot, min(MAX_BLOCKS, -(-vectors // threads)))


def staging_bytes() -> int:
    """Of device memory that one group's kernel takes on each rank, beside a few words."""
    return 2 * HALF_BYTES


def signal_bytes(world_size: int) -> int:
    """Of the pad on which a rank's peers signal to it."""
    return MAX_BLOCKS * world_size * _WORD_BYTES


class Sums(Protocol):
    """Sums tensors over the ranks of a group."""

    def sum_into(self, out: Tensor, x: Tensor) -> None:
        """out = the sum of every rank's x, both contiguous; they may be the same. CUDA: on the current stream."""


_registered: WeakValueDictionary[int, Sums] = WeakValueDictionary()
_numbers = count(1)


def register(sums: Sums) -> int:
    """The number by which the operators know who sums, as long as it lives."""
    number = next(_numbers)
    _registered[number] = sums
    return number


library.define("parallel3d::all_reduce", "(Tensor x, int group) -> Tensor")
library.define("parallel3d::all_reduce_", "(Tensor(a!) x, int group) -> ()")


def _all_reduce(x: Tensor, group: int) -> Tensor:
    given = x.contiguous()
    out = torch.empty_like(given, memory_format=torch.contiguous_format)
    _registered[group].sum_into(out, given)
    return out


def _all_reduce_(x: Tensor, group: int) -> None:
    if x.is_contiguous():
        _registered[group].sum_into(x, x)
    else:
        x.copy_(_all_reduce(x, group))


library.impl("parallel3d::all_reduce", ("cpu", "cuda"), _all_reduce)
library.impl("parallel3d::all_reduce_", ("cpu", "cuda"), _all_reduce_)


@library.register_fake("parallel3d::all_reduce")
def _(x: Tensor, group: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@library.register_fake("parallel3d::all_reduce_")
def _(x: Tensor, group: int) -> None:
    return None
