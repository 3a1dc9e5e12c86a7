"""Linear and embedding layers whose weight gradients can be computed later.

A backward is split layer by layer: a splittable linear or embedding computes the gradient of its input at once and leaves
that of its weight to the sink, which can queue it (BACKWARD_INPUT) and run it later (BACKWARD_WEIGHT). What can't be
split (norms, convolutions, bare parameters) runs whole at BACKWARD_INPUT. arXiv:2401.10241.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from parallel3d.autograd import in_graph
from parallel3d.autograd.in_graph import Port, is_in_graph, open_together
from parallel3d.autograd.products import (
    NO_BOUNDARY,
    Pair,
    RegionBoundary,
    backward_of_linears,
    products_through,
    rows_of,
)
from parallel3d.autograd.recipes import Product, Recipe, RowSum, Scatter
from parallel3d.autograd.selective import changeable, kept
from parallel3d.autograd.sink import GradientSink
from parallel3d.fake_device import on_cuda


def _number(tensors: Sequence[Tensor | None]) -> int:
    return sum(tensor is not None for tensor in tensors)


class SplitLinears(torch.autograd.Function):
    """F.linear of one input for one or several weights: x enters through a boundary, or the output of one weight leaves.

    x: input of the boundary, which enters as [..., in]; parameters: weight [out, in] and bias ([out] or None) of each linear.
    Returns [..., out] of each. The gradient of x is summed in one buffer. It leaves while the weight gradients are computed or,
    if these are deferred, while the rest of it is computed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        sinks: Sequence[GradientSink],
        boundary: RegionBoundary,
        leaves: bool,
        x: Tensor,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Run the forward of the layers. sinks: one for each; leaves: see products_through."""
        ctx.set_materialize_grads(False)
        ctx.sinks, ctx.boundary, ctx.leaves, ctx.parameters = sinks, boundary, leaves, parameters
        _, _, _, needs_x, *needs = ctx.needs_input_grad
        weights: Any = parameters[::2]
        saved = (x if any(needs[::2]) else None, *(weights if needs_x else ()))
        ctx.save_for_backward(*saved)
        pairs = list(zip(weights, parameters[1::2], strict=True))
        what = "row products" if leaves else "column products"
        return kept(what, lambda: products_through(boundary, leaves, x, pairs), _number(saved))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of the input, and of the parameters that autograd handles.

        gradients: None for an output that is not used.
        """
        needs = ctx.needs_input_grad[4:]
        dparameters: list[Tensor | None] = [None] * len(needs)
        used = [k for k, gradient in enumerate(gradients) if gradient is not None]
        if not used:
            return None, None, None, None, *dparameters
        x, *weights = ctx.saved_tensors
        # Edges lead to the tensors among the arguments, the first being x.
        edges = iter(ctx.next_functions[1:])
        edge_of = [None if parameter is None else next(edges) for parameter in ctx.parameters]

        def give(k: int, rows: Tensor, entered: Any) -> None:
            recipes: tuple[Recipe, ...] = Product(rows, entered), RowSum(rows)
            for place, recipe in enumerate(recipes, 2 * k):
                if needs[place]:
                    dparameters[place] = ctx.sinks[k].route(ctx.parameters[place], edge_of[place], recipe)

        given = x if any(needs[2 * k] for k in used) else None
        hides = not ctx.sinks[0].is_deferring
        dx = backward_of_linears(ctx.boundary, ctx.leaves, given, weights, gradients, hides, give)
        return None, None, None, dx, *dparameters


class SplitLinear(torch.autograd.Function):
    """The same as SplitLinears for one layer without a boundary, in a fraction of the host's time."""

    @staticmethod
    def forward(ctx: Any, sink: GradientSink, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Run the forward of the layer."""
        ctx.set_materialize_grads(False)
        ctx.sink, ctx.parameters = sink, (weight, bias)
        _, needs_x, needs_weight, _ = ctx.needs_input_grad
        saved = x if needs_weight else None, weight if needs_x else None
        ctx.save_for_backward(*saved)
        if not torch._C._len_torch_dispatch_stack():
            return changeable(F.linear(x, weight, bias))
        return kept("column products", lambda: [F.linear(x, weight, bias)], _number(saved))[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the input, and of the parameters that autograd handles."""
        if gradient is None:
            return None, None, None, None
        x, weight = ctx.saved_tensors
        _, needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows, edges, dx, dweight, dbias = rows_of(gradient), ctx.next_functions, None, None, None
        if needs_x:
            dx = rows.mm(weight).view(*gradient.shape[:-1], weight.shape[1])
        if needs_weight:
            dweight = ctx.sink.route(ctx.parameters[0], edges[1], Product(rows, rows_of(x)))
        if needs_bias:
            dbias = ctx.sink.route(ctx.parameters[1], edges[2], RowSum(rows))
        return None, dx, dweight, dbias


# Not its `apply` itself, which looks for the transforms of torch.func: where they are active, layers are not split.
_split_linear: Any = super(torch.autograd.Function, SplitLinear).apply


class SplitEmbedding(torch.autograd.Function):
    """F.embedding, dense. indices: [...], weight: [num_embeddings, dim] -> [..., dim]."""

    @staticmethod
    def forward(ctx: Any, sink: GradientSink, indices: Tensor, weight: Tensor, padding_idx: int) -> Tensor:
        """Run the forward of the layer."""
        ctx.set_materialize_grads(False)
        ctx.sink, ctx.weight, ctx.padding_idx = sink, weight, padding_idx
        ctx.save_for_backward(indices)
        return changeable(F.embedding(indices, weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradient of the weight if autograd handles it."""
        if gradient is None:
            return None, None, None, None
        (indices,) = ctx.saved_tensors
        scatter = Scatter(gradient, indices, ctx.weight.shape[0], ctx.padding_idx)
        return None, None, ctx.sink.route(ctx.weight, ctx.next_functions[1], scatter), None


def linear(
    port: Port, x: Tensor, weight: Tensor, bias: Tensor | None = None, boundary: RegionBoundary = NO_BOUNDARY
) -> Tensor:
    """Apply F.linear to x after it has entered; the port's sink gets the gradients of weight and bias that it takes.

    x: input of `boundary`, which enters as [..., in], weight: [out, in], bias: [out] -> [..., out]. Follows autocast.
    """
    (y,) = linears([port], x, [(weight, bias)], boundary)
    return y


def linears(
    ports: Sequence[Port],
    x: Tensor,
    pairs: Sequence[Pair],
    boundary: RegionBoundary = NO_BOUNDARY,
    leaves: bool = False,
) -> Sequence[Tensor]:
    """Apply several linear layers to one input, each with its port; x enters once, and its gradient leaves once.

    leaves: the output of the one layer, which has no bias, leaves through the boundary, and nothing enters.
    """
    x, *parameters = _following_autocast(x, x, *(parameter for pair in pairs for parameter in pair))
    weights, biases = parameters[::2], parameters[1::2]
    if boundary is NO_BOUNDARY and all(
        p.least_work > x.numel() * w.shape[0] for p, w in zip(ports, weights, strict=True)
    ):
        return [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    if is_in_graph(ports, weights):
        return in_graph.linears(ports, x, list(zip(weights, biases, strict=True)), boundary, leaves)
    if boundary is NO_BOUNDARY and len(ports) == 1:
        return [_apply(SplitLinear, ports[0].sink, x, *parameters)]
    sinks = tuple(port.sink for port in ports)
    outputs: tuple[Tensor, ...] = _apply(SplitLinears, sinks, boundary, leaves, x, *parameters)
    return outputs


def row_linear(port: Port, x: Tensor, weight: Tensor, boundary: RegionBoundary) -> Tensor:
    """Return `boundary.leave` of x W^T. x: [..., in], weight: [out, in] -> [..., out]. Follows autocast."""
    (y,) = linears([port], x, [(weight, None)], boundary, leaves=True)
    return y


def embedding(port: Port, indices: Tensor, weight: Tensor, padding_idx: int = -1) -> Tensor:
    """Apply F.embedding, dense; the port's sink gets the gradient of weight if it takes it. padding_idx: -1 for none."""
    if is_in_graph([port], [weight]):
        return in_graph.embedding(port, indices, weight, padding_idx)
    y: Tensor = _apply(SplitEmbedding, port.sink, indices, weight, padding_idx)
    return y


def _following_autocast(x: Tensor, *operands: Any) -> tuple[Any, ...]:
    dtype = autocast_dtype(x)
    if dtype is None:
        return operands
    return tuple(y if y is None or y.dtype == torch.float64 else y.to(dtype) for y in operands)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype in which autocast lets a linear layer compute with x; None where it is not enabled."""
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return None  # the meta device has no autocast state
    return torch.get_autocast_dtype(x.device.type)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    if torch.compiler.is_compiling():
        from parallel3d.autograd.outside_graphs import apply_without_port

        return apply_without_port(function, *args)
    return function.apply(*args)


class SplittableLayer(nn.Module):
    """A layer that computes by `linears`, `row_linear` or `embedding` with its `port`, which make_splittable sets."""

    def __init__(self) -> None:
        super().__init__()
        self.port = Port(GradientSink())


class _SplitForward:
    """Holder of one layer's replaced `forward`, the method `forward`.

    It is an object, not a closure, because a copy or pickle of the layer must call the copy, whose parameters no sink knows.
    `forward` is a method, because torch.compile would compile again for each callable object.
    """

    def __init__(self, layer: Any, port: Port):
        self._layer, self.port = layer, port
        self._ordinary = type(layer).forward
        self._instead: Callable[[Port, Any, Tensor], Tensor] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._layer, self.port)

    def compute_by(self, function: Callable[[Port, Any, Tensor], Tensor]) -> None:
        """Let calls of this layer, but not of its copies, run another function, of (port, layer, input)."""
        self._instead = function

    @staticmethod
    def of(layer: nn.Module) -> _SplitForward | None:
        """Return the _SplitForward of a layer; None if it has none."""
        owner = getattr(vars(layer).get("forward"), "__self__", None)
        return owner if isinstance(owner, _SplitForward) else None

    def forward(self, input: Tensor) -> Tensor:
        """Run the layer's forward."""
        if self._instead is not None:
            return self._instead(self.port, self._layer, input)
        layer, port = self._layer, self.port
        if not (torch.is_grad_enabled() and _splits(layer, input)) or torch._C._are_functorch_transforms_active():
            return self._ordinary(layer, input)
        weight, compiles = layer._parameters["weight"], torch.compiler.is_compiling()
        is_linear = isinstance(layer, nn.Linear)
        is_small = port.least_work > (input.numel() * weight.shape[0] if is_linear else 0)
        if is_small or not (is_in_graph([port], [weight]) if compiles else weight in port.sink):
            return self._ordinary(layer, input)
        if is_linear:
            bias = layer._parameters["bias"]
            return linear(port, input, weight, bias) if compiles else _split_linear(port.sink, input, weight, bias)
        return embedding(port, input, weight, -1 if layer.padding_idx is None else layer.padding_idx)


# Includes FakeTensor, so that a traced layer splits as in training.
_PLAIN = (Tensor, nn.Parameter, FakeTensor)


def _splits(layer: nn.Module, x: Tensor) -> bool:
    """Return whether this call can be split, by the conditions that torch.compile can trace."""
    # Not `layer.weight`, which computes the weight of a parametrized layer.
    weight: Any = layer._parameters.get("weight")
    kind = type(weight)
    return (
        # isinstance of a Parameter runs Python.
        (kind is nn.Parameter or (kind in _PLAIN and isinstance(weight, nn.Parameter)))
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
    return isinstance(layer, SplittableLayer) or _SplitForward.of(layer) is not None


def _can_split(layer: nn.Module) -> bool:
    if type(layer).forward is nn.Linear.forward:
        return True
    if type(layer).forward is nn.Embedding.forward:
        return not layer.sparse and layer.max_norm is None and not layer.scale_grad_by_freq
    return False


def make_splittable(module: nn.Module, sink: GradientSink, least_work: int = 0) -> None:
    """Let `sink` take the weight and bias gradients of the linears and embeddings inside `module`, or of `module` itself.

    That includes SplittableLayers, and plain layers: instances without a `forward` of their own whose class has that of
    nn.Linear or nn.Embedding (dense, without max_norm and scale_grad_by_freq). Outside of `sink.deferring` and `sink.fusing`
    they compute the same as before. A call of a plain layer is not split if its weight is frozen, parametrized or in no sink,
    under autocast or under torch.func. Idempotent; another sink replaces the first.

    least_work: calls of linears with fewer multiply-adds, and of embeddings unless it is 0, are left to autograd.
    """
    for layer in module.modules():
        if isinstance(layer, SplittableLayer):
            layer.port = Port(sink, least_work)
        if _can_split(layer) and ("forward" not in vars(layer) or _SplitForward.of(layer) is not None):
            layer.forward = _SplitForward(layer, Port(sink, least_work)).forward


def _block_of(name: str) -> str:
    """Return a module's name up to its last number."""
    parts = name.split(".")
    while parts and not parts[-1].isdigit():
        parts.pop()
    return ".".join(parts)


def open_ports(module: nn.Module, sink: GradientSink) -> list[tuple[str, nn.Module, Port]]:
    """Let torch.compile take the layers inside `module` into its graphs, with the parameters that they have now.

    sink: takes the gradients of SplittableLayers; plain layers keep that of make_splittable, if they have one.

    The layers of a block, the innermost module with a number in its name, share a token.

    Returns the name of each layer, the layer and its port.
    """
    opened, together = [], defaultdict[str, list[Any]](list)
    for name, layer in module.named_modules():
        own = layer if isinstance(layer, SplittableLayer) else _SplitForward.of(layer)
        if isinstance(layer, SplittableLayer):
            layer.port = Port(sink, layer.port.least_work)
        if own is not None:
            opened.append((name, layer, own.port))
            parameters = layer._parameters.get("weight"), layer._parameters.get("bias")
            together[_block_of(name)].append((own.port, *parameters))
    for layers in together.values():
        open_together(layers)
    return opened
