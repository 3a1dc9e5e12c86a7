"""Linear and embedding layers inside the graphs of torch.compile, where weight gradients go to a sink too.

A graph has one operator for the forward of such a layer and one for its backward, each of which runs the code of the
layer outside of graphs. The backward's operator gives weight gradients to a `Port`, which adds them to their accumulators,
queues them, or hands them to autograd. So the layer does not break the graph, and its backward is split.

The tensors of queued gradients outlive the graph's own use of them, so it must not write into their memory: INDUCTOR_OPTIONS.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel3d.autograd.products import Pair, RegionBoundary, backward_of_linears, rows_of
from parallel3d.autograd.recipes import Product, Recipe, RowSum, Scatter
from parallel3d.autograd.sink import GradientSink
from parallel3d.operators import Numbers, define

# Options without which inductor would write into buffers that it thinks nobody reads any more, or a replay would.
INDUCTOR_OPTIONS = {"allow_buffer_reuse": False, "inplace_buffers": False, "triton.cudagraphs": False}


class Port:
    """Way of the gradients of one layer's parameters out of a graph.

    In place of the parameters, `token` is the graph's input that requires gradients: a number without a gradient of its own,
    whose node in autograd's graph leads to the parameters. So autograd knows when all gradients of a parameter have come,
    which of them the backward under way needs, and gets those that the sink does not take.

    token: None until `open`.
    """

    def __init__(self, sink: GradientSink):
        self.sink = sink
        self.token: Tensor | None = None
        self._parameters: list[Tensor | None] = []
        self._edges: list[Any] = []
        self._values: list[Tensor | None] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle a port as a closed one."""
        return Port, (self.sink,)

    def open(self, weight: Tensor | None, bias: Tensor | None = None) -> None:
        """Let gradients of these parameters out, as far as they require them now."""
        self._parameters = [p if p is not None and p.requires_grad else None for p in (weight, bias)]
        self._values = [None, None]
        needed = [p for p in self._parameters if p is not None]
        self.token = _Token.apply(PORTS.add(self), *needed)
        edges = iter(self.token.grad_fn.next_functions if self.token.grad_fn is not None else ())
        self._edges = [None if p is None else next(edges) for p in self._parameters]

    @property
    def is_reached(self) -> bool:
        """Whether the backward under way needs gradients of the parameters."""
        node = self.token.grad_fn if self.token is not None else None
        return node is not None and torch._C._will_engine_execute_node(node)

    @property
    def needs_weight(self) -> bool:
        """Whether the backward under way needs the weight's gradient."""
        return self._parameters[0] is not None and self.is_reached

    def give(self, *recipes: Recipe | None) -> None:
        """Give gradients of the weight and of the bias to the sink; what it doesn't take is left for autograd."""
        for k, recipe in enumerate(recipes if self.is_reached else ()):
            parameter: Any = self._parameters[k]
            # PyTorch 2.11 does not compile anew when a parameter is frozen.
            if recipe is None or parameter is None or not parameter.requires_grad:
                continue
            value = self.sink.route(parameter, self._edges[k], recipe)
            if value is not None:
                before = self._values[k]
                self._values[k] = value if before is None else before + value

    def take_values(self) -> list[Tensor | None]:
        """Return what is left for autograd, of each parameter that requires gradients."""
        values, self._values = self._values, [None, None]
        return [value for value, parameter in zip(values, self._parameters, strict=True) if parameter is not None]


PORTS: Numbers[Port] = Numbers()


class _Token(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, number: int, *parameters: Tensor) -> Tensor:
        ctx.number = number
        return torch.tensor(float(number), dtype=torch.float64, device="cpu")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *PORTS[ctx.number].take_values()


def _ports(tokens: Sequence[Tensor]) -> list[Port]:
    return [PORTS[int(token)] for token in tokens]


def _of_tokens(tokens: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients of tokens, which nobody reads."""
    return [token.new_zeros(()) for token in tokens]


def _boundary(kind: str, group: int, length: int | None) -> RegionBoundary:
    return RegionBoundary.kinds[kind].of(group, length)


def _forward_of_linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *boundary: Any
) -> list[Tensor]:
    return list(_boundary(*boundary).enter_products(x, list(zip(weights, biases, strict=True))))


def _fake_linears(x: Tensor, weights: Sequence[Tensor], biases: Any, *boundary: Any) -> list[Tensor]:
    entered = _boundary(*boundary).entered(x.shape)
    return [x.new_empty(*entered[:-1], weight.shape[0]) for weight in weights]


def _gradients_of_linears(
    gradients: Sequence[Tensor | None],
    x: Tensor,
    weights: Sequence[Tensor],
    tokens: Sequence[Tensor],
    *boundary: Any,
) -> tuple[Tensor, list[Tensor]]:
    ports = _ports(tokens)
    given = x if any(port.needs_weight for port in ports) else None

    def give(k: int, rows: Tensor, entered: Tensor | None) -> None:
        ports[k].give(None if entered is None else Product(rows, entered), RowSum(rows))

    hides = not ports[0].sink.is_deferring
    dx = backward_of_linears(_boundary(*boundary), given, weights, gradients, hides, give)
    return x.new_empty(0) if dx is None else dx, _of_tokens(tokens)


def _forward_of_row_linear(x: Tensor, weight: Tensor, *boundary: Any) -> Tensor:
    return _boundary(*boundary).leave_products([(x, weight.t())])()


def _fake_row_linear(x: Tensor, weight: Tensor, *boundary: Any) -> Tensor:
    return x.new_empty(*_boundary(*boundary).left((*x.shape[:-1], weight.shape[0])))


def _gradients_of_row_linear(
    gradient: Tensor, x: Tensor, weight: Tensor, token: Tensor, needs_x: bool, *boundary: Any
) -> tuple[Tensor, Tensor]:
    (port,), region, dx = _ports([token]), _boundary(*boundary), None
    if needs_x:
        entered, dx = region.enter_kept(gradient, weight)
    else:
        entered = region.enter(gradient)()
    port.give(Product(rows_of(entered), rows_of(x)))
    return x.new_empty(0) if dx is None else dx, token.new_zeros(())


def _gradients_of_embedding(
    gradient: Tensor, indices: Tensor, token: Tensor, num_embeddings: int, padding_idx: int
) -> Tensor:
    (port,) = _ports([token])
    port.give(Scatter(gradient, indices, num_embeddings, padding_idx))
    return token.new_zeros(())


_BOUNDARY = "str kind, int group, SymInt? length"

_linears_backward = define(
    "linears_backward",
    f"(Tensor?[] gradients, Tensor x, Tensor[] weights, Tensor[] tokens, {_BOUNDARY}) -> (Tensor, Tensor[])",
    _gradients_of_linears,
    lambda gradients, x, weights, tokens, *_: (x.new_empty(x.shape if weights else 0), _of_tokens(tokens)),
)
_linears = define(
    "linears",
    f"(Tensor x, Tensor[] weights, Tensor?[] biases, {_BOUNDARY}) -> Tensor[]",
    _forward_of_linears,
    _fake_linears,
)
_row_linear_backward = define(
    "row_linear_backward",
    f"(Tensor gradient, Tensor x, Tensor weight, Tensor token, bool needs_x, {_BOUNDARY}) -> (Tensor, Tensor)",
    _gradients_of_row_linear,
    lambda gradient, x, weight, token, needs_x, *_: (x.new_empty(x.shape if needs_x else 0), token.new_zeros(())),
)
_row_linear = define(
    "row_linear",
    f"(Tensor x, Tensor weight, {_BOUNDARY}) -> Tensor",
    _forward_of_row_linear,
    _fake_row_linear,
)
_embedding_backward = define(
    "embedding_backward",
    "(Tensor gradient, Tensor indices, Tensor token, SymInt num_embeddings, int padding_idx) -> Tensor",
    _gradients_of_embedding,
    lambda gradient, indices, token, *_: token.new_zeros(()),
)

# Functions of autograd around the operators: kernels of operators for autograd cost the host 10 us more a call.


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, boundary: tuple[Any, ...], x: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        number = len(tensors) // 3
        weights, biases, tokens = (list(tensors[k * number : (k + 1) * number]) for k in range(3))
        ctx.boundary, ctx.number = boundary, number if ctx.needs_input_grad[1] else 0
        ctx.save_for_backward(x, *tokens, *weights[: ctx.number])
        return tuple(_linears(x, weights, biases, *boundary))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *others = ctx.saved_tensors
        tokens, weights = others[: len(gradients)], others[len(gradients) :]
        dx, dtokens = _linears_backward(gradients, x, weights, tokens, *ctx.boundary)
        return None, dx if weights else None, *[None] * (2 * len(tokens)), *dtokens


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, boundary: tuple[Any, ...], x: Tensor, weight: Tensor, token: Tensor) -> Tensor:
        ctx.boundary, ctx.needs_x = boundary, ctx.needs_input_grad[1]
        ctx.save_for_backward(x, weight, token)
        y: Tensor = _row_linear(x, weight, *boundary)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        dx, dtoken = _row_linear_backward(gradient, *ctx.saved_tensors, ctx.needs_x, *ctx.boundary)
        return None, dx if ctx.needs_x else None, None, dtoken


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor, token: Tensor, padding_idx: int) -> Tensor:
        ctx.of_weight = weight.shape[0], padding_idx
        ctx.save_for_backward(indices, token)
        return F.embedding(indices, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, _embedding_backward(gradient, *ctx.saved_tensors, *ctx.of_weight), None


def linears(ports: Sequence[Port], x: Tensor, pairs: Sequence[Pair], boundary: RegionBoundary) -> Sequence[Tensor]:
    """Do the same as split_backward.linears, in a graph."""
    weights, biases = [weight for weight, _ in pairs], [bias for _, bias in pairs]
    outputs: Sequence[Tensor] = _Linears.apply(
        boundary.described, x, *weights, *biases, *(port.token for port in ports)
    )
    return outputs


def row_linear(port: Port, x: Tensor, weight: Tensor, boundary: RegionBoundary) -> Tensor:
    """Do the same as split_backward.row_linear, in a graph."""
    y: Tensor = _RowLinear.apply(boundary.described, x, weight, port.token)
    return y


def embedding(port: Port, indices: Tensor, weight: Tensor, padding_idx: int) -> Tensor:
    """Do the same as split_backward.embedding, in a graph."""
    y: Tensor = _Embedding.apply(indices, weight, port.token, padding_idx)
    return y
