"""Linear layers whose three products are in fp8: of outputs, of the input's gradient, and of the weight's.

Inputs and weights are rounded to e4m3, gradients of outputs to e5m2, which has less precision and more range. An input's cast
for the weight's gradient is made in the forward, so that only fp8 is kept for it; that product can be deferred like others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from parallel3d.autograd.products import NO_BOUNDARY, Pair, RegionBoundary, rows_of
from parallel3d.autograd.recipes import Product, Recipe, RowSum, Value
from parallel3d.autograd.sink import GradientSink
from parallel3d.comm.collectives import Group
from parallel3d.config import Fp8Config
from parallel3d.kernels.fp8 import E4M3, E5M2, Scaled, cast, multiply

# A matrix and its transpose, None where it was not asked for.
Casts = tuple[Scaled | None, Scaled | None]


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
        """accumulator (+)= factor * value, rounded to the accumulator's dtype alone."""
        # A GEMM that adds to its output itself would save a pass over the accumulator here.
        Value(multiply(self.left, self.right, accumulator.dtype)).put(accumulator, adds, factor)


class Fp8:
    """Settings of a model's linears in fp8, and the casts of their weights while these don't change."""

    def __init__(self, config: Fp8Config):
        self.config, self.rowwise = config, config.recipe == "rowwise"
        self.casts_for_weight = config.weight_gradient == "fp8"
        self._step: object = None
        self.kept: dict[Fp8Linear, Casts] = {}

    @property
    def keeps(self) -> bool:
        """Whether casts of weights are kept."""
        return self._step is not None

    def keep(self, step: object) -> None:
        """Keep casts of weights until this is called with another object than now; with None, keep none."""
        if step != self._step:
            self.kept.clear()
        self._step = step

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep casts of weights in this context, in which they must not change."""
        self.keep(object())
        try:
            yield
        finally:
            self.keep(None)


class Fp8Linear:
    """One linear layer in fp8.

    - sink: gets the gradients of its weight and bias that it takes.
    - group, dim: the ranks over which it is sharded, and the dim of its weight that is; None for a whole layer. Scales are
      those of whole tensors, or of their rows, on every rank: the same as on one process.
    """

    def __init__(self, fp8: Fp8, sink: GradientSink, group: Group | None = None, dim: int | None = None):
        self.fp8, self.sink, self._group, self._dim = fp8, sink, group, dim

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave it out of a copy or pickle of the layer, which is not in fp8: NoneType() is None."""
        return type(None), ()

    def cast_weight(self, weight: Tensor, transposed: bool) -> Scaled:
        """Return the weight [out, in] in fp8, or its transpose."""
        found = self.fp8.kept.get(self)
        if found is None:
            # A gathered weight must leave no memory behind when it is released.
            keeps = self.fp8.keeps and "sharded_weights" not in vars(weight)
            found = self._cast(weight, E4M3, self._dim, keeps or not transposed, keeps or transposed)
            if keeps:
                self.fp8.kept[self] = found
        return _made(found[transposed])

    def cast_input(self, x: Tensor, straight: bool, transposed: bool) -> Casts:
        """Return an entered input [n, in] and its transpose in fp8, each if asked for."""
        return self._cast(x, E4M3, 1 if self._dim == 1 else None, straight, transposed)

    def cast_gradient(self, gradient: Tensor, straight: bool, transposed: bool) -> Casts:
        """Return the gradient of an output [n, out] and its transpose in fp8, each if asked for."""
        return self._cast(gradient, E5M2, 1 if self._dim == 0 else None, straight, transposed)

    def _cast(self, x: Tensor, dtype: torch.dtype, sharded: int | None, straight: bool, transposed: bool) -> Casts:
        """Cast x. sharded: the dim of which this rank has a part, or None."""
        sharding = None if self._group is None or sharded is None else (self._group, sharded)
        return cast(x, dtype, self.fp8.rowwise, sharding, straight, transposed)


def _made(scaled: Scaled | None) -> Scaled:
    assert scaled is not None
    return scaled


_COMPILE_REASON = "parallel3d computes this layer in fp8; compile without fullgraph"


@torch.compiler.disable(reason=_COMPILE_REASON)
def fp8_linear(layer: Fp8Linear, linear: nn.Linear, x: Tensor) -> Tensor:
    """Do the same as fp8_linears for one layer that is whole; under torch.func, which can't, run it as it is."""
    if torch._C._are_functorch_transforms_active():
        return F.linear(x, linear.weight, linear.bias)
    return fp8_linears([layer], x, [(linear.weight, linear.bias)])[0]


@torch.compiler.disable(reason=_COMPILE_REASON)
def fp8_linears(
    layers: Sequence[Fp8Linear],
    x: Tensor,
    pairs: Sequence[Pair],
    before: RegionBoundary = NO_BOUNDARY,
    after: RegionBoundary = NO_BOUNDARY,
) -> tuple[Tensor, ...]:
    """Apply linear layers to one input in fp8; torch.compile breaks its graph here.

    x: input of the boundary `before`, which enters as [..., in]; pairs: weight [out, in] and bias [out] or None of each.
    Returns what leaves `after` of each layer's [..., out], in the dtype of x. Can't be differentiated twice.
    """
    parameters = [parameter for pair in pairs for parameter in pair]
    learns = torch.is_grad_enabled()
    outputs: tuple[Tensor, ...] = _Linears.apply(tuple(layers), before, after, learns, x, *parameters)
    return outputs


class _Linears(torch.autograd.Function):
    """The function of fp8_linears; the counterpart of SplitLinears and SplitRowLinear.

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
        entered, fp8 = before.enter(x)(), layers[0].fp8
        ctx.shape = entered.shape
        needs_weight = learns and any(ctx.needs_input_grad[5::2])
        keeps_cast = needs_weight and fp8.casts_for_weight and entered is x
        rows, columns = layers[0].cast_input(rows_of(entered), True, keeps_cast)
        kept = (x if needs_weight else None, None) if columns is None else (columns.values, columns.inverse_scale)
        ctx.save_for_backward(*kept, *weights)
        outputs = []
        for layer, weight, bias in zip(layers, weights, parameters[1::2], strict=True):
            y = multiply(_made(rows), layer.cast_weight(weight, False), x.dtype)
            y = y if bias is None else y.add_(bias)
            outputs.append(after.leave(y.view(*entered.shape[:-1], -1))())
        return tuple(outputs)

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
