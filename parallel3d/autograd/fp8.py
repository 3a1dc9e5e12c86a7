"""Linear layers whose three GEMMs run in fp8: those of the output, of the input's gradient, and of the weight's gradient.

Inputs and weights are rounded to e4m3, gradients of outputs to e5m2, which has less precision and more range. An input's cast
for the weight's gradient is made in the forward, so that only fp8 is kept for it; that product can be deferred like others.

In a graph of torch.compile the casts and products of a layer that is whole are torch's operators, so that the compiler fuses
casts with what is computed before them. Casts of weights, which are kept, come from an operator; gradients go to a `Port`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from parallel3d.autograd.in_graph import (
    PORTS,
    Port,
    gradient_of_token,
    is_in_graph,
    linears_given,
    tokens_of,
)
from parallel3d.autograd.products import NO_BOUNDARY, Pair, RegionBoundary, rows_of
from parallel3d.autograd.recipes import Product, Recipe, RowSum, Value
from parallel3d.autograd.selective import kept
from parallel3d.autograd.sink import GradientSink
from parallel3d.comm.collectives import Group
from parallel3d.config import Fp8Config
from parallel3d.kernels.fp8 import E4M3, E5M2, Casts, Scaled, cast, multiply, multiply_into, transpose
from parallel3d.operators import Numbers, define


@dataclass(eq=False)
class ScaledProduct(Recipe):
    """Gradient of a linear layer's weight, left @ right^T. left: [out, n], right: [in, n]; dtype: of the value."""

    left: Scaled
    right: Scaled
    dtype: torch.dtype

    def value(self) -> Tensor:
        """Return the product."""
        return multiply(self.left, self.right, self.dtype)

    def put(self, accumulator: Tensor, adds: bool, factor: float = 1.0) -> None:
        """accumulator (+)= factor * value, rounded only to the accumulator's dtype."""
        if not multiply_into(self.left, self.right, accumulator, adds, factor):
            Value(multiply(self.left, self.right, accumulator.dtype)).put(accumulator, adds, factor)


class Fp8:
    """Settings of a model's linears in fp8, and the casts of their weights while these don't change.

    layers: modules -> what computes them.
    """

    def __init__(self, config: Fp8Config):
        self.config, self.rowwise = config, config.recipe == "rowwise"
        self.casts_for_weight = config.weight_gradient == "fp8"
        self._step: object = None
        self.kept: dict[tuple[Fp8Linear, int], Casts] = {}  # by layer and version of the weight
        self.layers: WeakKeyDictionary[nn.Module, Fp8Linear] = WeakKeyDictionary()
        self._memory: WeakKeyDictionary[Fp8Linear, Casts] = WeakKeyDictionary()
        self._on_keep: Callable[[bool], None] = lambda _: None

    def call_on_keep(self, function: Callable[[bool], None]) -> None:
        """Call a function whenever weights may have changed since casts were kept.

        function: gets True if casts will be kept from now on.
        """
        self._on_keep = function

    @property
    def keeps(self) -> bool:
        """Whether casts of weights are kept."""
        return self._step is not None

    def keep(self, step: object) -> None:
        """Keep casts of weights until the next call with another `step`; with None, keep none."""
        if step != self._step:
            self.kept.clear()
            self._on_keep(step is not None)
        self._step = step

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep casts of weights in this context, in which they must not change."""
        self.keep(object())
        try:
            yield
        finally:
            self.keep(None)

    @torch.no_grad()
    def cast_weights(self, modules: Iterable[nn.Module]) -> None:
        """Cast weights of these modules, and keep them where the last call did: CUDA graphs read them there."""
        if not self.layers:
            return
        for module, layer in [(m, self.layers[m]) for m in modules if m in self.layers]:
            weight = module.get_parameter("weight")
            layer.cast_weight(weight, False)
            now = self.kept[layer, weight._version]
            memory = self._memory.setdefault(layer, now)
            for old, new in zip(memory, now, strict=True):
                if old is not new:
                    _made(old).values.copy_(_made(new).values)
                    _made(old).inverse_scale.copy_(_made(new).inverse_scale)
            self.kept[layer, weight._version] = memory


class Fp8Linear:
    """One linear layer in fp8.

    - sink: takes the gradients of weight and bias; those that it leaves go to autograd.
    - group, dim: the ranks over which it is sharded, and the dim of its weight that is; None for a whole layer. Scales are
      those of whole tensors, or of their rows, on every rank: the same as on one process.
    - number: the layer's index in LAYERS, as a tensor on the CPU. It is an input of graphs, so that all layers of a kind share
      one graph.
    """

    def __init__(self, fp8: Fp8, sink: GradientSink, group: Group | None = None, dim: int | None = None):
        self.fp8, self.sink, self.group, self._dim = fp8, sink, group, dim
        self.number = torch.tensor(LAYERS.add(self), device="cpu")
        self._gathered: Callable[[], Scaled | None] = lambda: None

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave this object out of a copy or pickle of the layer, which then is not in fp8. NoneType() is None."""
        return type(None), ()

    def gather_by(self, gathered: Callable[[], Scaled | None]) -> None:
        """Take the weight in fp8 from `gathered` when that returns one, because ZeRO-3 has gathered the weight in fp8."""
        self._gathered = gathered

    def cast_weight(self, weight: Tensor, transposed: bool) -> Scaled:
        """Return the weight [out, in] in fp8, or its transpose."""
        if (gathered := self._gathered()) is not None:
            return transpose(gathered) if transposed else gathered
        key = self, weight._version  # a script may write into it between two calls
        found = self.fp8.kept.get(key)
        if found is None:
            # A gathered weight must leave no memory behind when it is released.
            keeps = self.fp8.keeps and "sharded_weights" not in vars(weight)
            found = self._cast(weight, E4M3, self._dim, keeps or not transposed, keeps or transposed)
            if keeps:
                self.fp8.kept[key] = found
        return _made(found[transposed])

    def cast_input(self, x: Tensor, straight: bool, transposed: bool) -> Casts:
        """Return an entered input [n, in] and its transpose in fp8, each if asked for."""
        return self._cast(x, E4M3, 1 if self._dim == 1 else None, straight, transposed)

    def cast_gradient(self, gradient: Tensor, straight: bool, transposed: bool) -> Casts:
        """Return the gradient of an output [n, out] and its transpose in fp8, each if asked for."""
        return self._cast(gradient, E5M2, 1 if self._dim == 0 else None, straight, transposed)

    def _cast(self, x: Tensor, dtype: torch.dtype, sharded: int | None, straight: bool, transposed: bool) -> Casts:
        """Cast x. sharded: the dim of which this rank has a part, or None."""
        sharding = None if self.group is None or sharded is None else (self.group, sharded)
        return cast(x, dtype, self.fp8.rowwise, sharding, straight, transposed)

    def forward(self, port: Port, linear: nn.Linear, x: Tensor) -> Tensor:
        """Run a linear layer that is whole; under torch.func, which can't run it in fp8, as it is."""
        if torch._C._are_functorch_transforms_active():
            return F.linear(x, linear.weight, linear.bias)
        # Not linear.weight, whose readers get it in its own dtype.
        pair: Any = linear._parameters.get("weight"), linear._parameters.get("bias")
        return fp8_linears([self], [port], x, [pair])[0]


LAYERS: Numbers[Fp8Linear] = Numbers()


def _made(scaled: Scaled | None) -> Scaled:
    assert scaled is not None
    return scaled


def fp8_linears(
    layers: Sequence[Fp8Linear],
    ports: Sequence[Port],
    x: Tensor,
    pairs: Sequence[Pair],
    before: RegionBoundary = NO_BOUNDARY,
    after: RegionBoundary = NO_BOUNDARY,
) -> tuple[Tensor, ...]:
    """Apply linear layers to one input in fp8; torch.compile breaks its graph here if they are sharded.

    ports: of the layers; x: input of the boundary `before`, which enters as [..., in]; pairs: weight [out, in] and bias [out]
    or None of each. Returns what leaves `after` of each layer's [..., out], in the dtype of x. Can't be differentiated twice.
    """
    weights, biases = [weight for weight, _ in pairs], [bias for _, bias in pairs]
    outputs: tuple[Tensor, ...]
    if before is after is NO_BOUNDARY and layers[0].group is None and is_in_graph(ports, weights):
        settings = layers[0].fp8.rowwise, layers[0].fp8.casts_for_weight, tuple(port.trains_weight for port in ports)
        numbers = [layer.number for layer in layers], [port.number for port in ports]
        outputs = _InGraph.apply(settings, x, *weights, *biases, *numbers[0], *numbers[1], *tokens_of(ports))
        return outputs
    given = (tuple(layers), before, after, torch.is_grad_enabled(), x, *(p for pair in pairs for p in pair))
    if torch.compiler.is_compiling():
        from parallel3d.autograd.outside_graphs import apply_sharded_fp8

        outputs = apply_sharded_fp8(_Linears, *given)
    else:
        outputs = _Linears.apply(*given)
    return outputs


class _Linears(torch.autograd.Function):
    """The function of fp8_linears; the counterpart of SplitLinears.

    For the weights' gradients it keeps the transposed input in fp8; or the input as it is, if that is communicated before it
    enters, or if they are not computed in fp8.
    """

    @staticmethod
    def forward(
        ctx: Any,
        layers: Sequence[Fp8Linear],
        before: RegionBoundary,
        after: RegionBoundary,
        learns: bool,
        x: Tensor,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.layers, ctx.before, ctx.after, ctx.parameters = layers, before, after, parameters
        weights: Any = parameters[::2]
        ctx.shape, casts_for_weight = before.entered(x.shape), layers[0].fp8.casts_for_weight
        needs_weight = learns and any(ctx.needs_input_grad[5::2])
        keeps_cast = needs_weight and casts_for_weight and ctx.shape == x.shape
        columns: Scaled | None = None

        def multiplied() -> list[Tensor]:
            nonlocal columns
            rows, columns = layers[0].cast_input(rows_of(before.enter(x)()), True, keeps_cast)
            outputs = []
            for layer, weight, bias in zip(layers, weights, parameters[1::2], strict=True):
                y = multiply(_made(rows), layer.cast_weight(weight, False), x.dtype)
                y = y if bias is None else y.add_(bias)
                outputs.append(after.leave(y.view(*ctx.shape[:-1], -1))())
            return outputs

        outputs = kept("products in fp8", multiplied, len(weights) + needs_weight + keeps_cast)
        if keeps_cast and columns is None:  # in a recomputation that has kept the outputs
            _, columns = layers[0].cast_input(rows_of(x), False, True)
        saved = (x if needs_weight else None, None) if columns is None else (columns.values, columns.inverse_scale)
        ctx.save_for_backward(*saved, *weights)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        needs_x, *needs = ctx.needs_input_grad[4:]
        dparameters: list[Tensor | None] = [None] * len(needs)
        used = [(k, gradient) for k, gradient in enumerate(gradients) if gradient is not None]
        if not used:
            return (None,) * 5 + tuple(dparameters)
        kept, inverse_scale, *weights = ctx.saved_tensors
        needs_weight, casts_for_weight = any(needs[2 * k] for k, _ in used), ctx.layers[0].fp8.casts_for_weight
        entering = ctx.before.enter(kept) if needs_weight and inverse_scale is None else None
        rows = {k: rows_of(ctx.after.enter(gradient)()) for k, gradient in used}
        casts = {k: ctx.layers[k].cast_gradient(rows[k], needs_x, needs[2 * k] and casts_for_weight) for k in rows}
        if needs_x:
            total: Any = None
            for k, (cast_rows, _) in casts.items():
                part = multiply(_made(cast_rows), ctx.layers[k].cast_weight(weights[k], True), rows[k].dtype)
                total = part if total is None else total.add_(part)
            leaving = ctx.before.leave(total.view(ctx.shape))
        x = None if entering is None else rows_of(entering())
        columns = Scaled(kept, inverse_scale) if inverse_scale is not None else None
        if x is not None and casts_for_weight:
            _, columns = ctx.layers[0].cast_input(x, False, True)
        # Edges lead to the tensors among the arguments, the first being x.
        edges = iter(ctx.next_functions[1:])
        edge_of = [None if parameter is None else next(edges) for parameter in ctx.parameters]
        for k, (_, transposed) in casts.items():
            weight, bias = ctx.parameters[2 * k : 2 * k + 2]
            if needs[2 * k]:
                recipe: Recipe
                if transposed is None:
                    assert x is not None
                    recipe = Product(rows[k], x)
                else:
                    recipe = ScaledProduct(transposed, _made(columns), weight.dtype)
                dparameters[2 * k] = ctx.layers[k].sink.route(weight, edge_of[2 * k], recipe)
            if needs[2 * k + 1]:
                dparameters[2 * k + 1] = ctx.layers[k].sink.route(bias, edge_of[2 * k + 1], RowSum(rows[k]))
        return (None,) * 4 + (leaving() if needs_x else None,) + tuple(dparameters)


def _cast_weights(
    weights: Sequence[Tensor], numbers: Sequence[Tensor], rowwise: bool, transposed: bool, after: Tensor
) -> list[Tensor]:
    """Return the values of weights, or of their transposes, in fp8, and then their inverse scales.

    after: not read; the dependence keeps the compiler from casting in the forward what only the backward needs.
    """
    casts = [LAYERS[int(number)].cast_weight(w, transposed) for w, number in zip(weights, numbers, strict=True)]
    return [*(c.values for c in casts), *(c.inverse_scale for c in casts)]


def _fake_casts(
    weights: Sequence[Tensor], numbers: Any, rowwise: bool, transposed: bool, after: Tensor
) -> list[Tensor]:
    shaped = [weight.t() if transposed else weight for weight in weights]
    values = [weight.new_empty(weight.shape, dtype=E4M3) for weight in shaped]
    return values + [w.new_empty((len(w), 1) if rowwise else (), dtype=torch.float32) for w in shaped]


def _give_scaled(
    lefts: Sequence[Tensor],
    scales: Sequence[Tensor],
    right: Tensor,
    right_scale: Tensor,
    rows: Sequence[Tensor | None],
    numbers: Sequence[Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """Give the ports the gradients of weights (products of transposes in fp8) and of biases (sums of `rows`)."""
    for left, scale, row, number in zip(lefts, scales, rows, numbers, strict=True):
        product = ScaledProduct(Scaled(left, scale), Scaled(right, right_scale), dtype)
        PORTS[int(number)].give(product, None if row is None else RowSum(row))
    return gradient_of_token(right)


_casts_of_weights = define(
    "fp8_weights",
    "(Tensor[] weights, Tensor[] numbers, bool rowwise, bool transposed, Tensor after) -> Tensor[]",
    _cast_weights,
    _fake_casts,
)
_scaled_given = define(
    "fp8_linears_given",
    "(Tensor[] lefts, Tensor[] scales, Tensor right, Tensor right_scale, Tensor?[] rows, Tensor[] numbers, ScalarType dtype) "
    "-> Tensor",
    _give_scaled,
    lambda lefts, scales, right, *_: gradient_of_token(right),
    has_effects=True,
)


class _InGraph(torch.autograd.Function):
    """The function of fp8_linears in a graph. settings: (rowwise, casts_for_weight, trains_weight of each layer)."""

    @staticmethod
    def forward(
        ctx: Any, settings: tuple[bool, bool, tuple[bool, ...]], x: Tensor, *tensors: Any
    ) -> tuple[Tensor, ...]:
        rowwise, casts_for_weight, trains = settings
        size = len(trains)
        weights, biases, numbers, ports = (tensors[k * size : (k + 1) * size] for k in range(4))
        ctx.settings, ctx.num_tokens, ctx.shape = settings, len(tensors) - 4 * size, x.shape
        ctx.have_bias, ctx.dtype = [bias is not None for bias in biases], weights[0].dtype
        rows, columns = cast(rows_of(x), E4M3, rowwise, None, True, casts_for_weight and any(trains))
        kept = (x, x) if columns is None else (columns.values, columns.inverse_scale)
        ctx.save_for_backward(*kept, *numbers, *ports, *weights)
        outputs = []
        casts = _casts_of_weights(weights, numbers, rowwise, False, x)
        for value, scale, bias in zip(casts[:size], casts[size:], biases, strict=True):
            y = multiply(_made(rows), Scaled(value, scale), x.dtype)
            y = y if bias is None else y + bias
            # No view: torch refuses to change in place a view that an autograd function returns.
            outputs.append(torch.ops.aten._unsafe_view(y, [*x.shape[:-1], y.shape[1]]))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rowwise, casts_for_weight, trains = ctx.settings
        size, needs_x = len(trains), ctx.needs_input_grad[1]
        kept, inverse_scale, *others = ctx.saved_tensors
        numbers, ports, weights = (others[k * size : (k + 1) * size] for k in range(3))
        rows = [rows_of(gradient) for gradient in gradients]
        casts_columns = casts_for_weight and any(trains)
        casts = [cast(r, E5M2, rowwise, None, needs_x, casts_columns) for r in rows]
        dx: Any = None
        if needs_x:
            casts_of_weights = _casts_of_weights(weights, numbers, rowwise, True, gradients[0])
            for (one, _), value, scale in zip(casts, casts_of_weights[:size], casts_of_weights[size:], strict=True):
                part = multiply(_made(one), Scaled(value, scale), rows[0].dtype)
                dx = part if dx is None else dx + part
            dx = dx.view(ctx.shape) if dx is not None else None
        if casts_columns:
            columns = [_made(other) for _, other in casts]
            lefts, left_scales = [c.values for c in columns], [c.inverse_scale for c in columns]
            of_biases = [r if has else None for r, has in zip(rows, ctx.have_bias, strict=True)]
            dtoken = _scaled_given(lefts, left_scales, kept, inverse_scale, of_biases, ports, ctx.dtype)
        else:
            dtoken = linears_given(gradients, kept, ports, ctx.have_bias)
        return None, dx, *[None] * (4 * size), *[dtoken] * ctx.num_tokens
