"""All-reduce over NVLink (csrc/all_reduce.cu): how a message is cut into calls, the operators, and the reference in torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, library

from parallel3d.kernels.peers import PAD_BYTES, VECTOR_BYTES, registered

# Of a half of the staging buffer: what one call takes, 4096 tokens x 4096 features in bf16.
HALF_BYTES = 32 * 2**20
# The most that the kernel takes: NCCL is faster from about 128 MiB on.
MOST_BYTES = 2 * HALF_BYTES
# Nearly all multiprocessors of an H200: of 32 MiB, half of them take 1.1 times as long.
MAX_BLOCKS = 128
# The most bytes that every rank reads whole from all peers, rather than summing its part for all.
_ONE_SHOT_BYTES = {2: 512 * 2**10, 4: 512 * 2**10, 8: 256 * 2**10}


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
        two_shot = is_two_shot(length * element_bytes, world_size)
        vectors = -(-length * element_bytes // VECTOR_BYTES)
        vectors = -(-vectors // world_size) if two_shot else vectors
        calls.append(Piece(start, length, two_shot, min(MAX_BLOCKS, -(-vectors // threads))))
    return calls


def is_two_shot(num_bytes: int, world_size: int) -> bool:
    """Whether ranks sum slices of such a message for each other."""
    return num_bytes > _ONE_SHOT_BYTES[world_size]


def staging_bytes() -> int:
    """Of device memory that one group's kernel takes on each rank, beside a few words."""
    return PAD_BYTES + 2 * HALF_BYTES


class Sums(Protocol):
    """Sums tensors over the ranks of a group."""

    def sum_into(self, out: Tensor, x: Tensor) -> None:
        """out = the sum of every rank's x, both contiguous; they may be the same. CUDA: on the current stream."""


library.define("parallel3d::all_reduce", "(Tensor x, int group) -> Tensor")
library.define("parallel3d::all_reduce_", "(Tensor(a!) x, int group) -> ()")


def _sums(group: int) -> Sums:
    found: Sums = registered(group)
    return found


def _all_reduce(x: Tensor, group: int) -> Tensor:
    given = x.contiguous()
    out = torch.empty_like(given, memory_format=torch.contiguous_format)
    _sums(group).sum_into(out, given)
    return out


def _all_reduce_(x: Tensor, group: int) -> None:
    if x.is_contiguous():
        _sums(group).sum_into(x, x)
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
