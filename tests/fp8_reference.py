"""A linear layer in fp8 in plain PyTorch on one process: nothing of parallel3d."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def rounded(x: Tensor, dtype: torch.dtype, along: int | None) -> Tensor:
    """x as fp8 holds it, in float64. along: the dim over which elements share a scale, None for all of them."""
    amax = x.abs().max() if along is None else x.abs().max(along, keepdim=True).values
    scale = LARGEST[dtype] / amax.to(torch.float32).clamp(min=1e-12)
    return (x.to(torch.float32) * scale).to(dtype).double() / scale.double()


class Products(torch.autograd.Function):
    """x: [n, in], weight: [out, in]. Scales are never along the dim that a product sums over, where they are per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rowwise: bool, weight_gradient: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rowwise, ctx.weight_gradient = rowwise, weight_gradient
        sums_over = 1 if rowwise else None
        y = rounded(x, torch.float8_e4m3fn, sums_over) @ rounded(weight, torch.float8_e4m3fn, sums_over).T
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        outputs, tokens = (1, 0) if ctx.rowwise else (None, None)
        to_x = rounded(g, torch.float8_e5m2, outputs) @ rounded(weight, torch.float8_e4m3fn, 0 if ctx.rowwise else None)
        if ctx.weight_gradient == "fp8":
            to_weight = rounded(g, torch.float8_e5m2, tokens).T @ rounded(x, torch.float8_e4m3fn, tokens)
        else:
            to_weight = g.double().T @ x.double()
        return to_x.to(x.dtype), to_weight.to(weight.dtype), None, None


class Fp8(nn.Linear):
    """Gets its settings by `into_fp8`."""

    recipe, weight_gradient = "tensorwise", "fp8"

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = Products.apply(rows, self.weight, self.recipe == "rowwise", self.weight_gradient)
        return (y if self.bias is None else y + self.bias).view(*x.shape[:-1], -1)


def into_fp8(
    modules: Iterable[nn.Module | None], recipe: str, weight_gradient: str, but: Sequence[nn.Module] = ()
) -> None:
    """Make the linears inside these modules compute in fp8, but for some."""
    for module in (m for top in modules if top is not None for m in top.modules()):
        if type(module) is nn.Linear and module not in but:
            module.__class__ = Fp8
            module.recipe, module.weight_gradient = recipe, weight_gradient
