"""A row layer and what follows it in a decoder, the residual and RMSNorm: with the layer's all-reduce in one kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from parallel3d.autograd.sink import GradientSink, Product
from parallel3d.autograd.split_backward import COMPILE_REASON, has_hooks, multiply, rows_of
from parallel3d.comm.collectives import Group, ReduceNormKernel
from parallel3d.kernels.all_reduce_norm import Normed, empty_normed
from parallel3d.kernels.rms_norm import rms_norm, rms_norm_gradients
from parallel3d.tensor_parallel.linear import RowParallelLinear
from parallel3d.tensor_parallel.regions import halves, in_halves


def has_row_norm(layer: nn.Module, norm: nn.Module) -> bool:
    """Whether `row_rms_norm` may compute these two: a kernel is open, and nobody wants to see what lies between them."""
    if type(layer) is not RowParallelLinear or type(norm) is not nn.RMSNorm:
        return False
    if layer.group.kernels.all_reduce_norm is None or layer.sequence_parallel or not layer.input_is_parallel:
        return False
    return layer.bias is None and norm.eps is not None and not has_hooks(layer) and not has_hooks(norm)


@torch.compiler.disable(reason=COMPILE_REASON)
def row_rms_norm(layer: RowParallelLinear, x: Tensor, residual: Tensor, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
    """x: [..., this rank's in], residual: [..., out], replicated -> (norm of hidden, hidden = residual + layer(x)).

    Of what has_row_norm is true of. Continue with both. Differentiable once. hidden is bit by bit what the all-reduce's
    kernel and an addition make; tensors that the kernel doesn't take go that way.
    """
    kernel = layer.group.kernels.all_reduce_norm
    assert kernel is not None, "see has_row_norm"
    assert norm.eps is not None, "see has_row_norm"
    alike = x.dtype == layer.weight.dtype == residual.dtype and not torch.is_autocast_enabled(x.device.type)
    if not alike or not kernel.takes(residual, norm.weight):
        return rms_norm(residual + layer(x), norm.weight, norm.eps)
    result: tuple[Tensor, Tensor] = _RowNorm.apply(
        layer.sink, layer.group, kernel, norm.eps, x, layer.weight, residual, norm.weight
    )
    return result


class _RowNorm(torch.autograd.Function):
    """x: [..., in], weight: [out, in], residual: [..., out], gain: [out] -> (normed, hidden), [..., out]."""

    @staticmethod
    def forward(
        ctx: Any,
        sink: GradientSink,
        group: Group,
        kernel: ReduceNormKernel,
        eps: float,
        x: Tensor,
        weight: Tensor,
        residual: Tensor,
        gain: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.sink, ctx.weight = sink, weight
        needs_x, needs_weight = ctx.needs_input_grad[4:6]
        hidden, normed, scale = _normed_products(kernel, group, x, weight, residual, gain, eps)
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None, hidden, gain, scale)
        return normed, hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, handed_on: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, hidden, gain, scale = ctx.saved_tensors
        needs_x, needs_weight, needs_residual, needs_gain = ctx.needs_input_grad[4:]
        total, dx, dweight, dgain = handed_on, None, None, None
        if gradient is not None:
            total, dgain = rms_norm_gradients(gradient, handed_on, hidden, gain, scale, needs_gain)
        if total is not None and needs_x:
            dx = multiply([(total, weight)])
        if total is not None and needs_weight:
            # Edges lead to the tensors among the arguments, the first being x.
            dweight = ctx.sink.route(ctx.weight, ctx.next_functions[1], Product(rows_of(total), rows_of(x)))
        return None, None, None, None, dx, dweight, total if needs_residual else None, dgain


def _normed_products(
    kernel: ReduceNormKernel, group: Group, x: Tensor, weight: Tensor, residual: Tensor, gain: Tensor, eps: float
) -> Normed:
    """The kernel's results of x W^T; where that is large, of one half while the other multiplies."""
    out, factors = empty_normed(residual), [(x, weight.t())]
    if not in_halves(factors, group):
        torch.ops.parallel3d.all_reduce_rms_norm(multiply(factors), residual, gain, eps, kernel.number, *out)
        return out
    added = rows_of(residual.contiguous())
    partial, targets, started = torch.empty_like(added), (rows_of(out.hidden), rows_of(out.normed), out.scale), []
    try:
        for half in halves(len(added)):
            multiply([(rows_of(x)[half], weight.t())], out=partial[half])
            results = Normed(*(target[half] for target in targets))
            started.append(kernel.start(results, partial[half], added[half], gain, eps, hidden=half.start == 0))
    finally:
        for work in started:
            work.wait()
    return out
