"""Linear and embedding layers whose weight gradients can be left for later.

A backward is split layer by layer: a splittable linear or embedding computes the gradient of its input at once and leaves
that of its weight to the sink, which can queue it (BACKWARD_INPUT) and run it later (BACKWARD_WEIGHT). What can't be
split (norms, convolutions, bare parameters, compiled regions) runs whole at BACKWARD_INPUT. arXiv:2401.10241.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.gradient_sink import GradientSink, Product, RowSum, Scatter


class Border:
    """What lies between a linear layer and its input: here nothing.

    Tensor slicing has communication there. Both methods start it and return what waits for its result, so that a backward
    hides it behind the layer's products. Under torch.is_grad_enabled() the result must be differentiable.
    """

    def enter(self, x: Tensor) -> Callable[[], Tensor]:
        """The input as it came -> as it is multiplied."""
        return lambda: x

    def leave(self, gradient: Tensor) -> Callable[[], Tensor]:
        """The transpose of `enter`: the gradient of what is multiplied, which may be overwritten -> of what came."""
        return lambda: gradient


NO_BORDER = Border()


class SplitLinear(torch.autograd.Function):
    """F.linear behind a border. x: what enters as [..., in], weight: [out, in], bias: [out] or None -> [..., out]."""

    @staticmethod
    def forward(ctx: Any, sink: GradientSink, x: Tensor, weight: Tensor, bias: Tensor | None, border: Border) -> Tensor:
        """Of the layer, see the class."""
        ctx.set_materialize_grads(False)
        ctx.sink, ctx.weight, ctx.bias, ctx.border = sink, weight, bias, border
        _, needs_x, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        return F.linear(border.enter(x)(), weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the input, and of the parameters where autograd handles them."""
        if gradient is None:
            return None, None, None, None, None
        x, weight = ctx.saved_tensors
        rows, dx, dweight, dbias = _rows(gradient), None, None, None
        _, needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if needs_weight:
            entering = ctx.border.enter(x)
        if needs_x:
            leaving = ctx.border.leave(rows.mm(weight).reshape(*gradient.shape[:-1], weight.shape[1]))
        if needs_weight:
            dweight = ctx.sink.route(ctx.weight, ctx.next_functions[1], Product(rows, _rows(entering())))
        if needs_bias:
            dbias = ctx.sink.route(ctx.bias, ctx.next_functions[2], RowSum(rows))
        if needs_x:
            dx = leaving()
        return None, dx, dweight, dbias, None


def _rows(x: Tensor) -> Tensor:
    """[..., n] -> [product of the others, n]."""
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)


class SplitEmbedding(torch.autograd.Function):
    """F.embedding, dense. indices: [...], weight: [num_embeddings, dim] -> [..., dim]."""

    @staticmethod
    def forward(ctx: Any, sink: GradientSink, indices: Tensor, weight: Tensor, padding_idx: int) -> Tensor:
        """Of the layer, see the class."""
        ctx.set_materialize_grads(False)
        ctx.sink, ctx.weight, ctx.padding_idx = sink, weight, padding_idx
        ctx.save_for_backward(indices)
        return F.embedding(indices, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the input, and of the parameters where autograd handles them."""
        if gradient is None:
            return None, None, None, None
        (indices,) = ctx.saved_tensors
        scatter = Scatter(gradient, indices, ctx.weight.shape[0], ctx.padding_idx)
        return None, None, ctx.sink.route(ctx.weight, ctx.next_functions[1], scatter), None


COMPILE_REASON = "parallel3d splits the backward of this layer; compile without fullgraph"


class SplittableLayer(nn.Module):
    """A layer that computes by split_functions' `linear` and `embedding` with its `sink`, which make_splittable sets."""

    def __init__(self) -> None:
        super().__init__()
        self.sink = GradientSink()


class _SplitForward:
    """What stands in for the `forward` of one layer.

    An object, not a closure: a copy or pickle of the layer must call the copy, whose parameters no sink knows.
    """

    def __init__(self, layer: nn.Module, sink: GradientSink):
        self._layer, self._sink = layer, sink
        self._ordinary = type(layer).forward
        # torch.compile breaks its graph here: inside one, the whole backward would run at BACKWARD_INPUT.
        self._outside_graph = torch.compiler.disable(self._split, reason=COMPILE_REASON)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._layer, self._sink)

    def __call__(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled() and _splits(self._layer, input):
            return self._outside_graph(input)
        return self._ordinary(self._layer, input)

    def _split(self, x: Tensor) -> Tensor:
        layer: Any = self._layer
        if not self._sink.takes(layer.weight) or torch._C._are_functorch_transforms_active():
            return self._ordinary(layer, x)
        if isinstance(layer, nn.Linear):
            return SplitLinear.apply(self._sink, x, layer.weight, layer.bias, NO_BORDER)
        return SplitEmbedding.apply(self._sink, x, layer.weight, -1 if layer.padding_idx is None else layer.padding_idx)


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


def is_split(layer: nn.Module) -> bool:
    """Whether the whole of a layer's backward is split: there is nothing in it to compile."""
    return isinstance(layer, SplittableLayer) or isinstance(vars(layer).get("forward"), _SplitForward)


def _can_split(layer: nn.Module) -> bool:
    if type(layer).forward is nn.Linear.forward:
        return True
    if type(layer).forward is nn.Embedding.forward:
        return not layer.sparse and layer.max_norm is None and not layer.scale_grad_by_freq
    return False


def make_splittable(module: nn.Module, sink: GradientSink) -> None:
    """Let `sink` take the weight and bias gradients of the linears and embeddings inside `module`, itself included.

    Those are SplittableLayers, and the instances without a `forward` of their own whose class has that of nn.Linear or
    nn.Embedding (dense, without max_norm and scale_grad_by_freq). Outside of `sink.deferring` and `sink.fusing` they
    compute what they did. A call of the latter runs the ordinary, whole way if its weight is frozen, parametrized or in no
    sink, under autocast and under torch.func. torch.compile breaks its graph at a call that doesn't. Idempotent; another
    sink replaces the first.
    """
    for layer in module.modules():
        if isinstance(layer, SplittableLayer):
            layer.sink = sink
        own = vars(layer).get("forward")
        if _can_split(layer) and (own is None or isinstance(own, _SplitForward)):
            layer.forward = _SplitForward(layer, sink)
