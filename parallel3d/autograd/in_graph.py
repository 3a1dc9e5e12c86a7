"""Linear and embedding layers inside the graphs of torch.compile, where weight gradients go to a sink too.

An operator in the graph of the backward gives weight gradients to a `Port`, which adds them to their accumulators, queues them,
or hands them to autograd. So the layer does not break the graph, and its backward is split. The other products of a layer are
torch's own operators, but for those between which a boundary communicates: these run, in one operator forward and one
backward, the code of the layer outside of graphs.

The tensors of queued gradients outlive the graph's own use of them, so it must not write into their memory: INDUCTOR_OPTIONS.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel3d.autograd.products import (
    NO_BOUNDARY,
    Pair,
    RegionBoundary,
    backward_of_linears,
    multiply,
    products_through,
    rows_of,
)
from parallel3d.autograd.recipes import Product, Recipe, RowSum, Scatter
from parallel3d.autograd.sink import GradientSink
from parallel3d.operators import Numbers, define

# Without these options, inductor or a replay would write into buffers that the graph no longer reads, but the sink does.
INDUCTOR_OPTIONS = {"allow_buffer_reuse": False, "inplace_buffers": False, "triton.cudagraphs": False}


class Port:
    """Passes the gradients of one layer's parameters out of a graph.

    In place of the parameters, `token` is the graph's input that requires gradients: an empty tensor whose node in autograd's
    graph leads to the parameters. So autograd knows when all gradients of a parameter have come, which of them the backward
    under way needs, and gets those that the sink does not take.

    - token: shared by the ports that are opened together, whose parameters it leads to. None until then. It is on the
      parameters' device, where their gradients are accumulated by the same thread.
    - number: the port's index in PORTS, as a tensor on the CPU. It is an input of the graph, so that all layers of a kind share
      one graph. None until the port is opened, because it could not be made where layers are traced on fake tensors.
    - trains_weight: whether the weight required gradients when the port was opened.
    - least_work: see make_splittable.
    """

    def __init__(self, sink: GradientSink, least_work: int = 0):
        self.sink, self.least_work = sink, least_work
        self.token: Tensor | None = None
        self.number: Tensor | None = None
        self.trains_weight = False
        self._parameters: list[Tensor | None] = []
        self._edges: list[Any] = []
        self._values: list[Tensor | None] = []
        self._tokens: _Ports | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle a port as one that is not open."""
        return Port, (self.sink, self.least_work)

    def prepare(self, weight: Tensor | None, bias: Tensor | None) -> list[Tensor]:
        """Return the parameters that require gradients now. The port will pass their gradients out of the graph."""
        self._parameters = [p if p is not None and p.requires_grad else None for p in (weight, bias)]
        self._values, self.trains_weight = [None, None], self._parameters[0] is not None
        if self.number is None:
            self.number = torch.tensor(PORTS.add(self), device="cpu")
        return [p for p in self._parameters if p is not None]

    def use(self, token: Tensor, edges: Iterator[Any], ports: _Ports) -> None:
        """Pass the gradients out by a token. edges: from it to the parameters of `ports`, beginning with this port's."""
        self.token, self._tokens = token, ports
        self._edges = [None if p is None else next(edges) for p in self._parameters]

    def leads_to(self, weight: Tensor | None, bias: Tensor | None) -> bool:
        """Return whether gradients still come to these parameters, and not to others that they have replaced."""
        return all(p is None or p is now for p, now in zip(self._parameters, (weight, bias), strict=False))

    @property
    def is_reached(self) -> bool:
        """Whether the current backward needs gradients of the parameters."""
        node = self.token.grad_fn if self.token is not None else None
        return node is not None and torch._C._will_engine_execute_node(node)

    @property
    def needs_weight(self) -> bool:
        """Whether the current backward needs the weight's gradient."""
        return self._parameters[0] is not None and self.is_reached

    def give(self, *recipes: Recipe | None) -> None:
        """Give gradients of the weight and of the bias to the sink; what it doesn't take is left for autograd."""
        for k, recipe in enumerate(recipes if self.is_reached else ()):
            parameter: Any = self._parameters[k]
            # PyTorch 2.11 does not compile again when a parameter is frozen.
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


class _Ports(list[Port]):
    """Ports that share a token."""


_OF_TOKENS: Numbers[_Ports] = Numbers()
_FIRST = 2**64 - 1  # place in the order of backwards: before all others, as autograd's own accumulation of gradients


def open_together(layers: Sequence[tuple[Port, Tensor | None, Tensor | None]]) -> None:
    """Pass the gradients of layers out of graphs by one token, which costs the host less than one token each.

    layers: (port, weight, bias) of each layer; parameters that don't require gradients now are left out.
    """
    ports = _Ports(port for port, *_ in layers)
    needed = [parameter for port, *parameters in layers for parameter in port.prepare(*parameters)]
    token = _Token.apply(_OF_TOKENS.add(ports), *needed) if needed else torch.empty(0)
    node: Any = token.grad_fn
    if needed:
        # Tokens are older than every forward: their backwards, and with them the reductions, would run after all layers'.
        node._set_sequence_nr(_FIRST)
    edges = iter(node.next_functions if needed else ())
    for port in ports:
        port.use(token, edges, ports)


class _Token(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, number: int, *parameters: Tensor) -> Tensor:
        ctx.number = number
        return parameters[0].new_empty(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(value for port in _OF_TOKENS[ctx.number] for value in port.take_values())


def gradient_of_token(x: Tensor) -> Tensor:
    """Return the gradient of a token on the device of x."""
    return x.new_empty(0, dtype=torch.float32)


def _boundary(kind: str, group: int, length: int | None) -> RegionBoundary:
    return RegionBoundary.kinds[kind].of(group, length)


def _forward_of_linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], leaves: bool, *boundary: Any
) -> list[Tensor]:
    return list(products_through(_boundary(*boundary), leaves, x, list(zip(weights, biases, strict=True))))


def _fake_linears(x: Tensor, weights: Sequence[Tensor], biases: Any, leaves: bool, *boundary: Any) -> list[Tensor]:
    region = _boundary(*boundary)
    if leaves:
        return [x.new_empty(*region.left((*x.shape[:-1], weight.shape[0]))) for weight in weights]
    return [x.new_empty(*region.entered(x.shape)[:-1], weight.shape[0]) for weight in weights]


def _gradients_of_linears(
    gradients: Sequence[Tensor | None],
    x: Tensor,
    weights: Sequence[Tensor],
    numbers: Sequence[Tensor],
    leaves: bool,
    *boundary: Any,
) -> tuple[Tensor, Tensor]:
    ports = [PORTS[int(number)] for number in numbers]
    given = x if any(port.needs_weight for port in ports) else None

    def give(k: int, rows: Tensor, entered: Tensor | None) -> None:
        # The bias of a layer whose output leaves is added to what has left, and is no part of the layer here.
        ports[k].give(None if entered is None else Product(rows, entered), None if leaves else RowSum(rows))

    hides = not ports[0].sink.is_deferring
    dx = backward_of_linears(_boundary(*boundary), leaves, given, weights, gradients, hides, give)
    return x.new_empty(0) if dx is None else dx, gradient_of_token(x)


def _give_linears(
    gradients: Sequence[Tensor], x: Tensor, numbers: Sequence[Tensor], have_bias: Sequence[bool]
) -> Tensor:
    entered = rows_of(x)
    for gradient, number, has_bias in zip(gradients, numbers, have_bias, strict=True):
        rows = rows_of(gradient)
        PORTS[int(number)].give(Product(rows, entered), RowSum(rows) if has_bias else None)
    return gradient_of_token(x)


def _gradients_of_embedding(
    gradient: Tensor, indices: Tensor, number: Tensor, num_embeddings: int, padding_idx: int
) -> Tensor:
    PORTS[int(number)].give(Scatter(gradient, indices, num_embeddings, padding_idx))
    return gradient_of_token(gradient)


_BOUNDARY = "bool leaves, str kind, int group, SymInt? length"

_linears_backward = define(
    "linears_backward",
    f"(Tensor?[] gradients, Tensor x, Tensor[] weights, Tensor[] numbers, {_BOUNDARY}) -> (Tensor, Tensor)",
    _gradients_of_linears,
    lambda _, x, weights, *__: (x.new_empty(x.shape if weights else 0), gradient_of_token(x)),
    has_effects=True,
)
linears_given = define(
    "linears_given",
    "(Tensor[] gradients, Tensor x, Tensor[] numbers, bool[] have_bias) -> Tensor",
    _give_linears,
    lambda _, x, *__: gradient_of_token(x),
    has_effects=True,
)
_LINEARS = f"(Tensor x, Tensor[] weights, Tensor?[] biases, {_BOUNDARY})"
_linears = define("linears", f"{_LINEARS} -> Tensor[]", _forward_of_linears, _fake_linears)
# For one layer: with cpp_wrapper, graphs of PyTorch 2.11 can't unpack a list of one tensor, nor a list in a tuple.
_linear = define(
    "linear",
    f"{_LINEARS} -> Tensor",
    lambda *given: _forward_of_linears(*given)[0],
    lambda *given: _fake_linears(*given)[0],
)
_embedding_backward = define(
    "embedding_backward",
    "(Tensor gradient, Tensor indices, Tensor number, SymInt num_embeddings, int padding_idx) -> Tensor",
    _gradients_of_embedding,
    lambda gradient, *_: gradient_of_token(gradient),
    has_effects=True,
)

# Functions of autograd around the operators: kernels of operators for autograd cost the host 10 us more a call.


class _Linears(torch.autograd.Function):
    """Linear layers, `size` of them. boundary: `leaves`, and an operator's arguments of the boundary; None without one."""

    @staticmethod
    def forward(ctx: Any, boundary: tuple[Any, ...] | None, size: int, x: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
        weights, biases, numbers = (list(tensors[k * size : (k + 1) * size]) for k in range(3))
        ctx.boundary, ctx.num_tokens = boundary, len(tensors) - 3 * size
        ctx.have_bias = [bias is not None for bias in biases]
        ctx.save_for_backward(x, *numbers, *(weights if ctx.needs_input_grad[2] else ()))
        if boundary is not None:
            given = x, weights, biases, *boundary
            return tuple(_linears(*given)) if size > 1 else (_linear(*given),)
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *others = ctx.saved_tensors
        numbers, weights, unused = others[: len(gradients)], others[len(gradients) :], [None] * len(gradients)
        dx: Tensor | None = None
        if ctx.boundary is not None:
            dx, dtoken = _linears_backward(gradients, x, weights, numbers, *ctx.boundary)
        else:
            dx = multiply(list(zip(gradients, weights, strict=True))) if weights else None
            dtoken = linears_given(gradients, x, numbers, ctx.have_bias)
        return None, None, dx if weights else None, *unused, *unused, *unused, *[dtoken] * ctx.num_tokens


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor, token: Tensor, number: Tensor, padding_idx: int) -> Tensor:
        ctx.of_weight = weight.shape[0], padding_idx
        ctx.save_for_backward(indices, number)
        return F.embedding(indices, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, _embedding_backward(gradient, *ctx.saved_tensors, *ctx.of_weight), None, None


def is_in_graph(ports: Sequence[Port], weights: Sequence[Any]) -> bool:
    """Return whether the layers are being compiled, with ports that pass out all gradients that they need."""
    if not torch.compiler.is_compiling():
        return False
    return all(
        port.token is not None and (port.trains_weight or not weight.requires_grad)
        for port, weight in zip(ports, weights, strict=True)
    )


def tokens_of(ports: Sequence[Port]) -> list[Any]:
    """Return the ports' tokens, each once, as a function takes a tensor once."""
    tokens: list[Any] = []
    for port in ports:
        if not any(port.token is token for token in tokens):
            tokens.append(port.token)
    return tokens


def linears(
    ports: Sequence[Port], x: Tensor, pairs: Sequence[Pair], boundary: RegionBoundary, leaves: bool
) -> Sequence[Tensor]:
    """Do the same as split_backward.linears, in a graph."""
    weights, biases = [weight for weight, _ in pairs], [bias for _, bias in pairs]
    numbers = [port.number for port in ports]
    described = None if boundary is NO_BOUNDARY else (leaves, *boundary.described)
    outputs: Sequence[Tensor] = _Linears.apply(described, len(ports), x, *weights, *biases, *numbers, *tokens_of(ports))
    return outputs


def embedding(port: Port, indices: Tensor, weight: Tensor, padding_idx: int) -> Tensor:
    """Do the same as split_backward.embedding, in a graph."""
    y: Tensor = _Embedding.apply(indices, weight, port.token, port.number, padding_idx)
    return y
