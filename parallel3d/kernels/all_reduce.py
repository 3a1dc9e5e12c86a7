"""All-reduce over NVLink (csrc/all_reduce.cu): how a message is cut into calls, the operators, and the reference in torch.

The operators name who sums by a number, since torch's schemas take no objects: `register` gives one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
# Half the multiprocessors of an H200: of 4 MiB and more, fewer take up to 1.8 times as long.
MAX_BLOCKS = {2: 64, 4: 64, 8: 32}  # by ranks: torch's signal pads have a word for each block of so many
_VECTOR_BYTES = 16
_WORD_BYTES = 8
# The most bytes that every rank reads whole from all peers, rather than summing its part for all.
_ONE_SHOT_BYTES = {2: 16 * 2**20, 4: 512 * 2**10, 8: 256 * 2**10}


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


def pieces(size: int, element_bytes: int, world_size: int, threads: int) -> list[Piece]:
    """The calls that sum a message of `size` elements, the same on every rank. threads: of a block, a vector each."""
    most, calls = HALF_BYTES // element_bytes, []
    for start in range(0, size, most):
        length = min(most, size - start)
        two_shot = length * element_bytes > _ONE_SHOT_BYTES[world_size]
        vectors = -(-length * element_bytes // _VECTOR_BYTES)
        vectors = -(-vectors // world_size) if two_shot else vectors
        calls.append(Piece(start, length, two_shot, min(MAX_BLOCKS[world_size], -(-vectors // threads))))
    return calls


def staging_bytes() -> int:
    """Of device memory that one group's kernel takes on each rank, beside a few words."""
    return 2 * HALF_BYTES


def signal_bytes(world_size: int) -> int:
    """Of the pad on which a rank's peers signal to it."""
    return MAX_BLOCKS[world_size] * world_size * _WORD_BYTES


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
