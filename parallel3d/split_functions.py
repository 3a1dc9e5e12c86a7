"""Linear and embedding as functions, with gradients that a sink takes: what sliced layers compute by.

Apart from split_backward.py, since to mark a function for torch.compile is to import the compiler, a second for each process.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel3d.gradient_sink import GradientSink
from parallel3d.split_backward import COMPILE_REASON, NO_BORDER, Border, SplitEmbedding, SplitLinear


@torch.compiler.disable(reason=COMPILE_REASON)
def linear(
    sink: GradientSink, x: Tensor, weight: Tensor, bias: Tensor | None = None, border: Border = NO_BORDER
) -> Tensor:
    """F.linear of what `border` makes of x; gradients of weight and bias go to `sink` where it takes them.

    x: what enters as [..., in], weight: [out, in], bias: [out] -> [..., out]. Follows autocast.
    """
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = _narrowed(x, dtype), _narrowed(weight, dtype)
        bias = None if bias is None else _narrowed(bias, dtype)
    y: Tensor = SplitLinear.apply(sink, x, weight, bias, border)
    return y


def _narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == torch.float64 else x.to(dtype)


@torch.compiler.disable(reason=COMPILE_REASON)
def embedding(sink: GradientSink, indices: Tensor, weight: Tensor, padding_idx: int = -1) -> Tensor:
    """F.embedding, dense; the gradient of weight goes to `sink` where it takes it. padding_idx -1: none."""
    y: Tensor = SplitEmbedding.apply(sink, indices, weight, padding_idx)
    return y
