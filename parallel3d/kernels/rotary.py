"""Rotary positions with an explicit backward: half of the operators that autograd would run, and a quarter of its nodes.

arXiv:2104.09864. Every product and sum is the same as in autograd, so that results are bitwise equal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rotate_ref(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + dim / 2) of x, [..., dim], by angles with these cosines and sines, [..., dim / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate query and key, [batch, seq, heads, head_dim], by the angles of their positions, see `rotate_ref`.

    cos, sin: [seq, head_dim / 2] or [batch, seq, head_dim / 2], without gradients.
    """
    cos, sin = cos[..., None, :], sin[..., None, :]
    if torch.compiler.is_compiling():  # which fuses all this
        return rotate_ref(query, cos, sin), rotate_ref(key, cos, sin)
    turned: tuple[Tensor, Tensor] = _Rotate.apply(cos, sin, query, key)
    return turned


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cos: Tensor, sin: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin)
        return rotate_ref(query, cos, sin), rotate_ref(key, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        needed = zip(gradients, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(_turn_back(g, cos, sin) if g is not None and needs else None for g, needs in needed)


def _turn_back(gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = gradient.chunk(2, dim=-1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)
