"""Linear and embedding layers whose weight gradients can be computed later.

A backward is split layer by layer: a splittable linear or embedding computes the gradient of its input at once and leaves
that of its weight to the sink, which can queue it (BACKWARD_INPUT) and run it later (BACKWARD_WEIGHT). What can't be
split (norms, convolutions, bare parameters, compiled regions) runs whole at BACKWARD_INPUT. arXiv:2401.10241.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from parallel3d.autograd.recipes import Product, RowSum, Scatter
from parallel3d.autograd.sink import GradientSink
from parallel3d.fake_device import on_cuda

# Pairs (left [..., k], right [k, n]) whose matrix products are added up; k may differ.
Factors = Sequence[tuple[Tensor, Tensor]]
# Weight and bias (None without one) of a linear layer.
Pair = tuple[Tensor, "Tensor | None"]


def multiply(factors: Factors, out: Tensor | None = None) -> Tensor:
    """Return the sum of left @ right, [..., n], in one buffer. out: [rows, n], that buffer; then it is not differentiable."""
    (left, right), *others = factors
    total = rows_of(left).mm(right) if out is None else torch.mm(rows_of(left), right, out=out)
    for other, weight in others:
        total.addmm_(rows_of(other), weight)
    return total if left.dim() == 2 else total.view(*left.shape[:-1], right.shape[1])


def rows_of(x: Tensor) -> Tensor:
    """Flatten [..., n] to [rows, n]."""
    if x.dim() == 2:
        return x
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)


class RegionBoundary:
    """Boundary of a region of linear layers, through which their input enters or their output leaves. This class does nothing.

    Tensor parallelism communicates there. Every method starts the communication and returns a function that waits for its
    result, so that a backward overlaps it with the layers' matrix products. Under torch.is_grad_enabled() the result must be
    differentiable.
    """

    def enter(self, x: Tensor) -> Callable[[], Tensor]:
        """Start to make the input of the matrix products from the input of the region."""
        return lambda: x

    def enter_products(self, x: Tensor, pairs: Sequence[Pair]) -> Sequence[Tensor]:
        """Return F.linear of the entered input for each pair; a part of it may enter while another is multiplied."""
        entered = self.enter(x)()
        return [F.linear(entered, *pair) for pair in pairs]

    def enter_kept(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the entered input, and its product with weight [in, out]."""
        entered = self.enter(x)()
        return entered, multiply([(entered, weight)])

    def leave(self, gradient: Tensor) -> Callable[[], Tensor]:
        """Start to apply the transpose of `enter` to the gradient of the entered input, which may be overwritten."""
        return lambda: gradient

    def leave_products(self, factors: Factors, hidden: bool = False) -> Callable[[], Tensor]:
        """Start to `leave` with the sum of these products; a part of it may leave while the rest is multiplied.

        hidden: whether other work runs before the caller waits, so that it hides the communication.
        """
        return self.leave(multiply(factors))


NO_BOUNDARY = RegionBoundary()


class SplitLinears(torch.autograd.Function):
    """F.linear of one input, which enters through a boundary, for one or several weights.

    x: input of the boundary, which enters as [..., in]; parameters: weight [out, in] and bias ([out] or None) of each linear.
    Returns [..., out] of each. The gradient of x is summed in one buffer. It leaves while the weight gradients are computed or,
    if these are deferred, while the rest of it is computed.
    """

    @staticmethod
    def forward(
        ctx: Any, sinks: Sequence[GradientSink], boundary: RegionBoundary, x: Tensor, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Run the forward of the layers. sinks: one for each."""
        ctx.set_materialize_grads(False)
        ctx.sinks, ctx.boundary, ctx.parameters = sinks, boundary, parameters
        _, _, needs_x, *needs = ctx.needs_input_grad
        weights: Any = parameters[::2]
        ctx.save_for_backward(x if any(needs[::2]) else None, *(weights if needs_x else ()))
        return tuple(boundary.enter_products(x, list(zip(weights, parameters[1::2], strict=True))))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of the input, and of the parameters that autograd handles.

        gradients: None for an output that is not used.
        """
        _, _, needs_x, *needs = ctx.needs_input_grad
        used = [k for k, gradient in enumerate(gradients) if gradient is not None]
        dx, dparameters = None, [None] * len(needs)
        if not used:
            return None, None, None, *dparameters
        x, *weights = ctx.saved_tensors
        needs_weight = any(needs[2 * k] for k in used)
        if needs_weight:
            entering = ctx.boundary.enter(x)
        if needs_x:
            factors: Any = [(gradients[k], weights[k]) for k in used]
            hidden = needs_weight and not ctx.sinks[0].is_deferring
            leaving = ctx.boundary.leave_products(factors, hidden)
        entered: Any = rows_of(entering()) if needs_weight else None
        # Edges lead to the tensors among the arguments, the first being x.
        edges = iter(ctx.next_functions[1:])
        edge_of = [None if parameter is None else next(edges) for parameter in ctx.parameters]
        for k in used:
            rows = rows_of(gradients[k])
            for place, recipe in ((2 * k, Product(rows, entered)), (2 * k + 1, RowSum(rows))):
                if needs[place]:
                    dparameters[place] = ctx.sinks[k].route(ctx.parameters[place], edge_of[place], recipe)
        if needs_x:
            dx = leaving()
        return None, None, dx, *dparameters


class SplitRowLinear(torch.autograd.Function):
    """F.linear whose output leaves through a boundary. x: [..., in], weight: [out, in] -> boundary.leave(x W^T), [..., out]."""

    @staticmethod
    def forward(ctx: Any, sink: GradientSink, boundary: RegionBoundary, x: Tensor, weight: Tensor) -> Tensor:
        """Run the forward of the layer."""
        ctx.set_materialize_grads(False)
        ctx.sink, ctx.weight, ctx.boundary = sink, weight, boundary
        _, _, needs_x, needs_weight = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        return boundary.leave_products([(x, weight.t())])()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the input, and of the weight if autograd handles it."""
        if gradient is None:
            return None, None, None, None
        x, weight = ctx.saved_tensors
        _, _, needs_x, needs_weight = ctx.needs_input_grad
        dx, dweight = None, None
        if needs_x:
            entered, dx = ctx.boundary.enter_kept(gradient, weight)
        else:
            entered = ctx.boundary.enter(gradient)()
        if needs_weight:
            dweight = ctx.sink.route(ctx.weight, ctx.next_functions[1], Product(rows_of(entered), rows_of(x)))
        return None, None, dx, dweight


class SplitEmbedding(torch.autograd.Function):
    """F.embedding, dense. indices: [...], weight: [num_embeddings, dim] -> [..., dim]."""

    @staticmethod
    def forward(ctx: Any, sink: GradientSink, indices: Tensor, weight: Tensor, padding_idx: int) -> Tensor:
        """Run the forward of the layer."""
        ctx.set_materialize_grads(False)
        ctx.sink, ctx.weight, ctx.padding_idx = sink, weight, padding_idx
        ctx.save_for_backward(indices)
        return F.embedding(indices, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradient of the weight if autograd handles it."""
        if gradient is None:
            return None, None, None, None
        (indices,) = ctx.saved_tensors
        scatter = Scatter(gradient, indices, ctx.weight.shape[0], ctx.padding_idx)
        return None, None, ctx.sink.route(ctx.weight, ctx.next_functions[1], scatter), None


# Functions for sharded layers. Their callers exclude themselves from torch.compile, because inside a compiled graph nothing
# would be split.


def linear(
    sink: GradientSink, x: Tensor, weight: Tensor, bias: Tensor | None = None, boundary: RegionBoundary = NO_BOUNDARY
) -> Tensor:
    """Apply F.linear to x after it has entered; `sink` gets the gradients of weight and bias that it takes.

    x: input of `boundary`, which enters as [..., in], weight: [out, in], bias: [out] -> [..., out]. Follows autocast.
    """
    (y,) = linears([sink], x, [(weight, bias)], boundary)
    return y


def linears(
    sinks: Sequence[GradientSink], x: Tensor, pairs: Sequence[Pair], boundary: RegionBoundary = NO_BOUNDARY
) -> tuple[Tensor, ...]:
    """Apply several linear layers to one input, each with its sink; x enters once, and its gradient leaves once."""
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
    return tuple(x if x is None or x.dtype == torch.float64 else x.to(dtype) for x in operands)


def embedding(sink: GradientSink, indices: Tensor, weight: Tensor, padding_idx: int = -1) -> Tensor:
    """Apply F.embedding, dense; `sink` gets the gradient of weight if it takes it. padding_idx: -1 for none."""
    y: Tensor = SplitEmbedding.apply(sink, indices, weight, padding_idx)
    return y


COMPILE_REASON = "parallel3d splits the backward of this layer; compile without fullgraph"


class SplittableLayer(nn.Module):
    """A layer that computes by `linears`, `row_linear` or `embedding` with its `sink`, which make_splittable sets."""

    def __init__(self) -> None:
        super().__init__()
        self.sink = GradientSink()


class _SplitForward:
    """The replacement of one layer's `forward`.

    It is an object, not a closure: a copy or pickle of the layer must call the copy, whose parameters no sink knows.
    """

    def __init__(self, layer: nn.Module, sink: GradientSink):
        self._layer, self._sink = layer, sink
        self._ordinary = type(layer).forward
        self._instead: Callable[[Tensor], Tensor] | None = None
        # torch.compile breaks its graph here: inside one, the whole backward would run at BACKWARD_INPUT.
        self._outside_graph = torch.compiler.disable(self._split, reason=COMPILE_REASON)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._layer, self._sink)

    def compute_by(self, function: Callable[[Tensor], Tensor]) -> None:
        """Let calls of this layer, but not of its copies, run another function."""
        self._instead = function

    def __call__(self, input: Tensor) -> Tensor:
        if self._instead is not None:
            return self._instead(input)
        if torch.is_grad_enabled() and _splits(self._layer, input):
            return self._outside_graph(input)
        return self._ordinary(self._layer, input)

    def _split(self, x: Tensor) -> Tensor:
        layer: Any = self._layer
        if not self._sink.takes(layer.weight) or torch._C._are_functorch_transforms_active():
            return self._ordinary(layer, x)
        if isinstance(layer, nn.Linear):
            (y,) = SplitLinears.apply((self._sink,), NO_BOUNDARY, x, layer.weight, layer.bias)
            return y
        return SplitEmbedding.apply(self._sink, x, layer.weight, -1 if layer.padding_idx is None else layer.padding_idx)


# Includes FakeTensor, so that a traced layer splits as in training.
_PLAIN = (Tensor, nn.Parameter, FakeTensor)


def _splits(layer: nn.Module, x: Tensor) -> bool:
    """Return whether this call can be split, by the conditions that torch.compile can trace."""
    # Not `layer.weight`, which computes the weight of a parametrized layer.
    weight = layer._parameters.get("weight")
    return (
        isinstance(weight, nn.Parameter)
        and type(weight) in _PLAIN
        and weight.requires_grad
        and weight.is_floating_point()
        and type(x) in _PLAIN
        and x.layout is torch.strided
        and not x.is_nested
        # The meta device has no autocast state.
        and (on_cuda(x) if x.is_meta else not torch.is_autocast_enabled(x.device.type))
    )


def has_hooks(module: nn.Module) -> bool:
    """Return whether the module has hooks, which must see its calls."""
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def is_split(layer: nn.Module) -> bool:
    """Return whether a layer's whole backward is split: there is nothing in it to compile."""
    return isinstance(layer, SplittableLayer) or isinstance(vars(layer).get("forward"), _SplitForward)


def _can_split(layer: nn.Module) -> bool:
    if type(layer).forward is nn.Linear.forward:
        return True
    if type(layer).forward is nn.Embedding.forward:
        return not layer.sparse and layer.max_norm is None and not layer.scale_grad_by_freq
    return False


def make_splittable(module: nn.Module, sink: GradientSink) -> None:
    """Let `sink` take the weight and bias gradients of the linears and embeddings inside `module`, itself included.

    That includes SplittableLayers, and plain layers: instances without a `forward` of their own whose class has that of
    nn.Linear or nn.Embedding (dense, without max_norm and scale_grad_by_freq). Outside of `sink.deferring` and `sink.fusing`
    they compute the same as before. A call of a plain layer is not split if its weight is frozen, parametrized or in no sink,
    under autocast or under torch.func; torch.compile breaks its graph at any other call. Idempotent; another sink replaces
    the first.
    """
    for layer in module.modules():
        if isinstance(layer, SplittableLayer):
            layer.sink = sink
        own = vars(layer).get("forward")
        if _can_split(layer) and (own is None or isinstance(own, _SplitForward)):
            layer.forward = _SplitForward(layer, sink)
