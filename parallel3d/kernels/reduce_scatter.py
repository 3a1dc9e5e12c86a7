"""Reduce-scatter of gradients over NVLink (csrc/reduce_scatter.cu): how shards are cut, the operator, the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, library

from parallel3d.kernels.peers import PAD_BYTES, VECTOR_BYTES, registered

# Of a half of the staging buffer, which one call takes: what all ranks send.
HALF_BYTES = 64 * 2**20
# Nearly all multiprocessors of an H200: with half of them 1 GiB takes 1.15 times as long.
MAX_BLOCKS = 128
# Beside a backward, which then lasts 2% less long than with all of them.
BESIDE_BLOCKS = 32


def reduce_scatter_ref(parts: Sequence[Tensor], wire: torch.dtype) -> Tensor:
    """The sum in fp32, in their order, of equal tensors that were rounded to the dtype in which they travel."""
    total = parts[0].to(wire).float()
    for part in parts[1:]:
        total = total + part.to(wire).float()
    return total


@dataclass(frozen=True)
class Piece:
    """One call of the kernel: elements [start, start + size) of each shard."""

    start: int
    size: int
    blocks: int


def pieces(size: int, wire_bytes: int, world_size: int, threads: int, most_blocks: int = MAX_BLOCKS) -> list[Piece]:
    """The calls that reduce shards of `size` elements, the same on every rank. threads: of a block, a vector each."""
    slot = HALF_BYTES // world_size // VECTOR_BYTES * VECTOR_BYTES
    most, per_vector = slot // wire_bytes, VECTOR_BYTES // wire_bytes
    calls = []
    for start in range(0, size, most):
        length = min(most, size - start)
        calls.append(Piece(start, length, min(most_blocks, -(-length // (per_vector * threads)))))
    return calls


def staging_bytes() -> int:
    """Of device memory that one group's kernel takes on each rank, beside a few words."""
    return PAD_BYTES + 2 * HALF_BYTES


class Reductions(Protocol):
    """Reduces gradients over the ranks of a group."""

    def reduce_into(
        self, output: Tensor, whole: Tensor, wire: torch.dtype, accumulate: bool, squares: Tensor | None
    ) -> None:
        """output [n] (+)= the sum of every rank's part of whole [ranks * n], in rank order; contiguous, fp32 or as `wire`.

        output may be this rank's part of whole. wire: in which parts travel, to which the own one is rounded too. squares:
        float64 [squares_size(n)], whose sum becomes that of the results' squares. CUDA: on the current stream.
        """


library.define(
    "parallel3d::reduce_scatter_",
    "(Tensor(a!) output, Tensor whole, ScalarType wire, bool accumulate, Tensor(b!)? squares, int group) -> ()",
)


def _reduce_scatter_(
    output: Tensor, whole: Tensor, wire: torch.dtype, accumulate: bool, squares: Tensor | None, group: int
) -> None:
    reductions: Reductions = registered(group)
    reductions.reduce_into(output, whole, wire, accumulate, squares)


library.impl("parallel3d::reduce_scatter_", ("cpu", "cuda"), _reduce_scatter_)


@library.register_fake("parallel3d::reduce_scatter_")
def _(output: Tensor, whole: Tensor, wire: torch.dtype, accumulate: bool, squares: Tensor | None, group: int) -> None:
    return None
