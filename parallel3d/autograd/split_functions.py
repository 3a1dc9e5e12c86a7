"""Linears and embeddings as functions, with gradients that a sink takes: what sliced layers compute by.

Who calls them marks itself for torch.compile, as the layers of tensor_parallel do: inside of a compiled graph nothing would be
split.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel3d.autograd.sink import GradientSink
from parallel3d.autograd.split_backward import (
    NO_BOUNDARY,
    Pair,
    RegionBoundary,
    SplitEmbedding,
    SplitLinears,
    SplitRowLinear,
)


def linear(
    sink: GradientSink, x: Tensor, weight: Tensor, bias: Tensor | None = None, boundary: RegionBoundary = NO_BOUNDARY
) -> Tensor:
    """F.linear of what `boundary` makes of x; gradients of weight and bias go to `sink` where it takes them.

    x: what enters as [..., in], weight: [out, in], bias: [out] -> [..., out]. Follows autocast.
    """
    (y,) = linears([sink], x, [(weight, bias)], boundary)
    return y


def linears(
    sinks: Sequence[GradientSink], x: Tensor, pairs: Sequence[Pair], boundary: RegionBoundary = NO_BOUNDARY
) -> tuple[Tensor, ...]:
    """`linear` of one input by several weights and biases, each with its sink; x enters once, and so leaves its gradient."""
    parameters = _following_autocast(x, x, *(parameter for pair in pairs for parameter in pair))
    outputs: tuple[Tensor, ...] = SplitLinears.apply(tuple(sinks), boundary, *parameters)
    return outputs


def row_linear(sink: GradientSink, x: Tensor, weight: Tensor, boundary: RegionBoundary) -> Tensor:
    """Return `boundary.leave` of x W^T. x: [..., in], weight: [out, in] -> [..., out]. Follows autocast."""
    y: Tensor = SplitRowLinear.apply(sink, boundary, *_following_autocast(x, x, weight))
    return y


def _following_autocast(x: Tensor, *operands: Tensor | None) -> tuple[Tensor | None, ...]:
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return operands
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(None if operand is None else _narrowed(operand, dtype) for operand in operands)


def _narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == torch.float64 else x.to(dtype)


def embedding(sink: GradientSink, indices: Tensor, weight: Tensor, padding_idx: int = -1) -> Tensor:
    """F.embedding, dense; the gradient of weight goes to `sink` where it takes it. padding_idx -1: none."""
    y: Tensor = SplitEmbedding.apply(sink, indices, weight, padding_idx)
    return y
