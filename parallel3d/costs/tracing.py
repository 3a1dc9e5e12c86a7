"""Layer tracer: the work and the memory of one layer, traced on fake tensors as the executor runs it.

A layer is traced between two others that keep nothing: its inputs have a graph, and its outputs are dropped at once, so that
the bytes counted are the layer's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from parallel3d.autograd.entry import Entry
from parallel3d.autograd.sink import GradientSink
from parallel3d.costs.counter import Memory, OperatorCounter
from parallel3d.costs.operators import storage_of
from parallel3d.costs.work import Work
from parallel3d.optim.precision import Precision
from parallel3d.structures import TensorTree

_HOST = torch.device("cpu")


class Boundary(NamedTuple):
    """A tensor between two layers.

    - nbytes: as a message; storage: bytes of its memory, 0 if an earlier output has the same.
    - source: index of the layer's input in whose memory it is, None if the layer made it.
    - requires_grad: whether a gradient comes back.
    """

    nbytes: int
    storage: int
    source: int | None
    requires_grad: bool


@dataclass(frozen=True)
class Held:
    """Tensors that a layer holds: bytes of its own, and indices of inputs, outputs and of the gradients of both."""

    own: int = 0
    inputs: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()
    output_gradients: frozenset[int] = frozenset()
    input_gradients: frozenset[int] = frozenset()


@dataclass(frozen=True)
class LayerBytes:
    """Memory that a layer holds for one micro-batch, traced with whole backwards or with split ones.

    - saved: from the forward to the backward.
    - deferred: from a BACKWARD_INPUT to its BACKWARD_WEIGHT; gradients of inputs that are needed besides being sent back.
    - forward_peak: peak of the forward, beyond the inputs.
    - backward_peak: peak of BACKWARD or BACKWARD_INPUT, beyond the inputs and what the layers before it hold; includes what
      was saved and the gradients of the outputs.
    - sole_peak: the same with the inputs that only this layer keeps, for as long as it does.
    - weight_peak: peak of BACKWARD_WEIGHT, beyond what is deferred.
    """

    saved: Held
    deferred: Held
    forward_peak: int
    backward_peak: int
    sole_peak: int
    weight_peak: int


@dataclass(frozen=True)
class LayerTrace:
    """One trace of a layer.

    - inputs: bytes of each input; outputs: the tensors that it returns.
    - forward, backward, weight: work of the forward, of the backward (all of it, or the part of the inputs' gradients) and of
      the deferred gradients of weights.
    - tables: bytes that the layer made for all later micro-batches, counted nowhere else.
    - early: indices of the parameters whose gradients come with the backward even if it is split.
    """

    inputs: tuple[int, ...]
    outputs: tuple[Boundary, ...]
    forward: Work
    backward: Work
    weight: Work
    held: LayerBytes
    tables: int
    early: frozenset[int]


class _NextLayer(torch.autograd.Function):
    """The next layer: keeps none of its inputs, and makes gradients for them, whose memory is noted in `made`."""

    @staticmethod
    def forward(ctx: Any, made: list[Memory], *given: Tensor) -> Tensor:
        ctx.made, ctx.kinds = made, [(t.shape, t.dtype, t.device) for t in given]
        return given[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.kinds]
        ctx.made += [Memory(gradient) for gradient in gradients]
        return None, *gradients


def _held(memories: Sequence[Memory]) -> frozenset[int]:
    """Return the indices of those that something keeps."""
    return frozenset(k for k, memory in enumerate(memories) if memory.is_held)


class LayerTracer:
    """Traces a layer with its weights as they are trained.

    - function: runs the layer.
    - parameters: those to train, whose gradients `sink` adds to `accumulators`.
    - counter: counts operators and collectives.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        parameters: Sequence[nn.Parameter],
        sink: GradientSink,
        precision: Precision,
        counter: OperatorCounter,
        accumulators: Sequence[Tensor] = (),
    ):
        self._function, self._parameters, self._sink = function, list(parameters), sink
        self._weights = frozenset(map(storage_of, (*parameters, *accumulators)))
        self._precision, self._counter = precision, counter

    def run(self, inputs: TensorTree, splits: bool) -> tuple[LayerTrace, TensorTree]:
        """Trace one forward and one backward, split in two if `splits`; return also the layer's output."""
        one = _Pass(self._counter)
        self._counter.weights = self._weights
        self._sink.open()
        with torch.enable_grad():
            returned = one.forward(inputs, self._call)
            one.backward(self._sink.deferring(one) if splits else self._whole())
            touched = self._sink.touched()
            one.weights(lambda: self._sink.run_deferred(one))
        early = frozenset(k for k, parameter in enumerate(self._parameters) if parameter in touched)
        return one.trace(early), returned

    def _call(self, x: Any) -> Any:
        with self._precision.autocasting(_HOST):
            return self._function(x)

    def _whole(self) -> AbstractContextManager[None]:
        """Return the context of a whole backward, as GradientReducer.backward runs it."""
        return self._sink.fusing() if self._precision.weights else nullcontext()


class _Pass:
    """Forward and backward of one micro-batch through a layer."""

    def __init__(self, counter: OperatorCounter):
        counter.take()  # what a trace that failed has left
        self._counter, self._base = counter, counter.nbytes
        self._inputs: list[Memory] = []
        self._outputs: list[Memory] = []
        self._output_gradients: list[Memory] = []
        self._input_gradients: list[Memory] = []
        self._entry: Entry | None = None
        self._root: Tensor | None = None
        self._boundaries: list[Boundary] = []
        self._works: list[Work] = []
        self._peaks: list[int] = []

    @contextmanager
    def _counting(self, base: int) -> Iterator[None]:
        """Count what runs inside, and its peak beyond `base`."""
        self._counter.peak = self._counter.nbytes
        with self._counter:
            yield
        self._works.append(self._counter.take())
        self._peaks.append(self._counter.peak - base)

    def forward(self, inputs: TensorTree, run: Callable[[Any], Any]) -> TensorTree:
        """Run the forward; only the graph stays alive."""
        given = inputs.empty_like()
        self._inputs = [Memory(t) for t in given.tensors]
        pairs = zip(given.tensors, inputs.tensors, strict=True)
        requiring = [t for t, template in pairs if template.requires_grad]
        self._entry = Entry(requiring) if requiring else None
        x = given.value()
        del given, requiring, pairs
        with self._counting(self._base):
            output = TensorTree.of(run(x))
        del x
        returned = output.empty_like(keep_requires_grad=True)
        self._hand_on(output.tensors)
        del output
        self._counter.drop_recomputed(self._outputs)
        self._saved = self._held_now()
        return returned

    def _hand_on(self, tensors: Sequence[Tensor]) -> None:
        """Give the outputs to the next layer."""
        entered = {memory.key: k for k, memory in enumerate(self._inputs)}
        for tensor in tensors:
            memory = Memory(tensor)
            source = entered.get(memory.key)
            storage = 0 if memory.key in {m.key for m in self._outputs} else memory.nbytes
            self._outputs.append(memory)
            self._boundaries.append(Boundary(tensor.nbytes, storage, source, tensor.requires_grad))
        outgoing = [t for t in tensors if t.requires_grad]
        self._root = _NextLayer.apply(self._output_gradients, *outgoing) if outgoing else None

    def backward(self, how: AbstractContextManager[None]) -> None:
        """Run the backward from the gradients of the outputs to those of the inputs."""
        self._counter.count_with_others(self._inputs)
        with self._counting(self._base), how:
            if self._root is not None:
                # From a tensor, the backward and the recomputations in it would run outside the function modes.
                edge = torch.autograd.graph.get_gradient_edge(self._root)
                torch.autograd.backward(edge, torch.empty_like(self._root))
        self._sole_peak = self._counter.peak_with_others - self._base
        self._root = None
        gradients = self._entry.gradients() if self._entry is not None else []
        self._input_gradients = [Memory(gradient) for gradient in gradients]
        self._entry = None
        del gradients
        self._deferred = self._held_now()

    def weights(self, run: Callable[[], None]) -> None:
        """Run what was deferred."""
        before = self._counter.nbytes
        with self._counting(before):
            run()

    def _held_now(self) -> Held:
        groups = self._outputs, self._output_gradients, self._input_gradients
        outputs, output_gradients, input_gradients = map(_held, groups)
        shared = [m for m, boundary in zip(self._outputs, self._boundaries, strict=True) if boundary.source is None]
        shared += [*self._output_gradients, *self._input_gradients]
        others = {memory.key: memory.nbytes for memory in shared if memory.is_held}
        own = self._counter.nbytes - self._base - sum(others.values())
        return Held(own, _held(self._inputs), outputs, output_gradients, input_gradients)

    def trace(self, early: frozenset[int]) -> LayerTrace:
        """Return the trace."""
        tables = self._counter.nbytes - self._base
        saved, deferred = (replace(held, own=held.own - tables) for held in (self._saved, self._deferred))
        forward, backward, weight = self._works
        forward_peak, backward_peak, weight_peak = self._peaks
        backward_peaks = backward_peak - tables, self._sole_peak - tables
        held = LayerBytes(saved, deferred, forward_peak - tables, *backward_peaks, weight_peak)
        inputs = tuple(memory.nbytes for memory in self._inputs)
        return LayerTrace(inputs, tuple(self._boundaries), forward, backward, weight, held, tables, early)
