"""All-reduce, residual and RMSNorm in one kernel (csrc/all_reduce_norm.cuh): calls, operator, reference in torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, library

from parallel3d.kernels.all_reduce import HALF_BYTES, MAX_BLOCKS, all_reduce_ref, is_two_shot
from parallel3d.kernels.peers import VECTOR_BYTES, registered

LONGEST = 16384  # numbers of a row
_HELD = 32  # of them, by a thread
_WARP = 32


class Normed(NamedTuple):
    """hidden, normed: [..., n]; scale: [rows], at least in fp32, by which RMSNorm multiplies the numbers of each row."""

    hidden: Tensor
    normed: Tensor
    scale: Tensor


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def empty_normed(x: Tensor) -> Normed:
    """Results of x: [..., n], without values."""
    rows = x.numel() // max(1, x.shape[-1])
    hidden, normed = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    return Normed(hidden, normed, x.new_empty(rows, dtype=_wide(x)))


def all_reduce_norm_ref(parts: Sequence[Tensor], residual: Tensor, weight: Tensor, eps: float) -> Normed:
    """The residual with the sum of equal tensors in their order, rounded to their dtype before, and RMSNorm of that, at least
    in fp32."""
    hidden = residual + all_reduce_ref(parts)
    wide = hidden.to(_wide(hidden))
    scale = 1 / (wide.square().mean(-1, keepdim=True) + eps).sqrt()
    return Normed(hidden, (wide * scale * weight).to(hidden.dtype), scale.flatten())


@dataclass(frozen=True)
class RowsPiece:
    """One call of the kernel: rows [start, start + rows) of a message, each held by `team` threads."""

    start: int
    rows: int
    two_shot: bool
    team: int
    blocks: int


def rows_pieces(rows: int, columns: int, element_bytes: int, world_size: int, threads: int) -> list[RowsPiece]:
    """The calls that take a message of `rows` rows, the same on every rank. threads: of a block."""
    vectors = -(-columns * element_bytes // VECTOR_BYTES)
    most, calls = HALF_BYTES // (vectors * VECTOR_BYTES), []
    for start in range(0, rows, most):
        given = min(most, rows - start)
        two_shot = is_two_shot(given * vectors * VECTOR_BYTES, world_size)
        own = -(-given // world_size) if two_shot else given
        team = _team(own, columns, vectors, threads)
        calls.append(RowsPiece(start, given, two_shot, team, min(MAX_BLOCKS, -(-own * team // threads))))
    return calls


def _team(rows: int, columns: int, vectors: int, threads: int) -> int:
    """As many as a row has vectors; fewer, which hold more each, where there are more rows than all blocks take at once."""
    team = min(threads, max(_WARP, 1 << (vectors - 1).bit_length()))
    while team > _WARP and rows * team > MAX_BLOCKS * threads and columns <= _HELD * team // 2:
        team //= 2
    return team


class NormedSums(Protocol):
    """Sums tensors over the ranks of a group, adds them to a residual and normalizes that."""

    def norm_into(self, out: Normed, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        """All contiguous; x: this rank's part of the sum, residual, weight: the same on every rank. CUDA: on the current
        stream."""


library.define(
    "parallel3d::all_reduce_rms_norm",
    "(Tensor x, Tensor residual, Tensor weight, float eps, int group, Tensor(a!) hidden, Tensor(b!) normed, "
    "Tensor(c!) scale) -> ()",
)


def _all_reduce_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    group: int,
    hidden: Tensor,
    normed: Tensor,
    scale: Tensor,
) -> None:
    sums: NormedSums = registered(group)
    sums.norm_into(Normed(hidden, normed, scale), x.contiguous(), residual.contiguous(), weight.contiguous(), eps)


library.impl("parallel3d::all_reduce_rms_norm", ("cpu", "cuda"), _all_reduce_rms_norm)


library.register_fake("parallel3d::all_reduce_rms_norm", lambda *operands: None)
