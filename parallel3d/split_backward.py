"""Linear and embedding layers whose weight gradients can be left for later.

A backward is split layer by layer: a splittable linear or embedding computes the gradient of its input at once and leaves
that of its weight to the sink, which can queue it (BACKWARD_INPUT) and run it later (BACKWARD_WEIGHT). What can't be
split (norms, convolutions, bare parameters, compiled regions) runs whole at BACKWARD_INPUT. arXiv:2401.10241.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.gradient_sink import GradientSink, Product, RowSum, Scatter


class _Linear(torch.autograd.Function):
    """F.linear. x: [..., in], weight: [out, in], bias: [out] or None -> [..., out]."""

    @staticmethod
    def forward(ctx: Any, sink: GradientSink, x: Tensor, weight: nn.Parameter, bias: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.sink, ctx.weight, ctx.bias = sink, weight, bias
        ctx.save_for_backward(x, weight if x.requires_grad else None)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None, None, None
        x, weight = ctx.saved_tensors
        rows, dx, dweight, dbias = _rows(gradient), None, None, None
        _, needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        if needs_x:
            dx = rows.mm(weight).reshape(x.shape)
        if needs_weight:
            dweight = ctx.sink.route(ctx.weight, ctx.next_functions[1], Product(rows, _rows(x)))
        if needs_bias:
            dbias = ctx.sink.route(ctx.bias, ctx.next_functions[2], RowSum(rows))
        return None, dx, dweight, dbias


def _rows(x: Tensor) -> Tensor:
    """[..., n] -> [product of the others, n]."""
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)


class _Embedding(torch.autograd.Function):
    """F.embedding, dense. indices: [...], weight: [num_embeddings, dim] -> [..., dim]."""

    @staticmethod
    def forward(ctx: Any, sink: GradientSink, indices: Tensor, weight: nn.Parameter, padding_idx: int) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.sink, ctx.weight, ctx.padding_idx = sink, weight, padding_idx
        ctx.save_for_backward(indices)
        return F.embedding(indices, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None, None, None
        (indices,) = ctx.saved_tensors
        scatter = Scatter(gradient, indices, ctx.weight.shape[0], ctx.padding_idx)
        return None, None, ctx.sink.route(ctx.weight, ctx.next_functions[1], scatter), None


class _SplitForward:
    """What stands in for the `forward` of one layer.

    An object, not a closure: a copy or pickle of the layer must call the copy, whose parameters no sink knows.
    """

    def __init__(self, layer: nn.Module, sink: GradientSink):
        self._layer, self._sink = layer, sink
        self._ordinary = type(layer).forward
        # torch.compile breaks its graph here: inside one, the whole backward would run at BACKWARD_INPUT.
        self._outside_graph = torch.compiler.disable(
            self._split, reason="parallel3d splits the backward of this layer; compile without fullgraph"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._layer, GradientSink())

    def __call__(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled() and _splits(self._layer, input):
            return self._outside_graph(input)
        return self._ordinary(self._layer, input)

    def _split(self, x: Tensor) -> Tensor:
        layer: Any = self._layer
        if not self._sink.takes(layer.weight) or torch._C._are_functorch_transforms_active():
            return self._ordinary(layer, x)
        if isinstance(layer, nn.Linear):
            return _Linear.apply(self._sink, x, layer.weight, layer.bias)
        return _Embedding.apply(self._sink, x, layer.weight, -1 if layer.padding_idx is None else layer.padding_idx)


def _splits(layer: nn.Module, x: Tensor) -> bool:
    """Whether this call can be split, as far as torch.compile can follow the question."""
    # Not `layer.weight`: of a parametrized layer, that computes the weight.
    weight = layer._parameters.get("weight")
    return (
        type(weight) is nn.Parameter
        and weight.requires_grad
        and weight.is_floating_point()
        and type(x) in (Tensor, nn.Parameter)
        and x.layout is torch.strided
        and not x.is_nested
        and not x.is_meta  # which has no autocast to ask about
        and not torch.is_autocast_enabled(x.device.type)
    )


def _can_split(layer: nn.Module) -> bool:
    if type(layer).forward is nn.Linear.forward:
        return True
    if type(layer).forward is nn.Embedding.forward:
        return not layer.sparse and layer.max_norm is None and not layer.scale_grad_by_freq
    return False


def make_splittable(module: nn.Module, sink: GradientSink) -> None:
    """Let `sink` take the weight and bias gradients of the linears and embeddings inside `module`, itself included.

    Those are the instances whose class has the `forward` of nn.Linear or nn.Embedding (dense, without max_norm and
    scale_grad_by_freq) and that have no `forward` of their own. Outside of `sink.deferring` and `sink.fusing` they compute
    what they did. A call runs the ordinary, whole way if its weight is frozen, parametrized or in no sink, under autocast
    and under torch.func. torch.compile breaks its graph at a call that doesn't. Idempotent; another sink replaces the first.
    """
    for layer in module.modules():
        own = vars(layer).get("forward")
        if _can_split(layer) and (own is None or isinstance(own, _SplitForward)):
            layer.forward = _SplitForward(layer, sink)
