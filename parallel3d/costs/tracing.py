"""Layer tracer: the work and the memory of one layer, traced on fake tensors as the executor runs it.

A layer is traced between two others that keep nothing: its inputs have a graph, and its outputs are dropped at once, so that
the bytes counted are the layer's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from parallel3d.autograd.entry import Entry
from parallel3d.comm.structures import TensorTree
from parallel3d.costs.counter import Memory, OperatorCounter
from parallel3d.costs.trained_layer import TrainedLayer
from parallel3d.costs.work import Work

T = TypeVar("T")


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


class LayerTrace:
    """Trace of the forward and the backward of one micro-batch through a layer.

    - inputs: bytes of each input; outputs: the tensors that it returns; returned: its output, without memory.
    - forward, backward, weight: work of the forward, of the backward (all of it, or the part of the inputs' gradients) and of
      the deferred gradients of weights.
    - tables: bytes that the layer made for all later micro-batches, counted nowhere else.
    - held: memory, without the tables.
    - early: indices of the parameters whose gradients come with the backward even if it is split.
    """

    def __init__(self, layer: TrainedLayer, inputs: TensorTree, splits: bool, counter: OperatorCounter):
        """Run the layer. splits: run its backward in two parts. counter: counts operators and collectives."""
        counter.start_trace((*layer.parameters, *layer.accumulators))
        self._counter, self._base, sink = counter, counter.nbytes, layer.sink
        self.outputs: list[Boundary] = []
        self._output_memories: list[Memory] = []
        self._output_gradients: list[Memory] = []
        self._input_gradients: list[Memory] = []
        self._entry: Entry | None = None
        self._root: Tensor | None = None
        sink.open()
        with torch.enable_grad():
            self.returned, self.forward, forward_peak = self._forward(inputs, layer.run)
            saved = self._held_now()
            # A whole backward is run as by GradientReducer.backward.
            whole = sink.fusing() if layer.precision.weights else nullcontext()
            self.backward, backward_peak, sole_peak = self._backward(sink.deferring(self) if splits else whole)
            deferred, touched = self._held_now(), sink.touched()
            _, self.weight, weight_peak = self._counted(partial(sink.run_deferred, self), counter.nbytes)
        self.tables = tables = counter.nbytes - self._base
        saved, deferred = (replace(held, own=held.own - tables) for held in (saved, deferred))
        forward_peak, backward_peak, sole_peak = (p - tables for p in (forward_peak, backward_peak, sole_peak))
        self.held = LayerBytes(saved, deferred, forward_peak, backward_peak, sole_peak, weight_peak)
        self.inputs = tuple(memory.nbytes for memory in self._input_memories)
        self.early = frozenset(k for k, parameter in enumerate(layer.parameters) if parameter in touched)

    def _counted(self, run: Callable[[], T], base: int) -> tuple[T, Work, int]:
        """Return run(), its work, and its peak beyond `base`."""
        self._counter.restart_peak()
        with self._counter:
            result = run()
        return result, self._counter.take(), self._counter.peak - base

    def _forward(self, inputs: TensorTree, run: Callable[[Any], Any]) -> tuple[TensorTree, Work, int]:
        """Run the forward; only the graph stays alive."""
        given = inputs.empty_like()
        self._input_memories = [Memory(t) for t in given.tensors]
        pairs = zip(given.tensors, inputs.tensors, strict=True)
        requiring = [t for t, template in pairs if template.requires_grad]
        self._entry = Entry(requiring) if requiring else None
        x = [given.value()]  # the call gets the only reference
        del given, requiring, pairs
        output, work, peak = self._counted(lambda: TensorTree.of(run(x.pop())), self._base)
        returned = output.empty_like(keep_requires_grad=True)
        self._hand_on(output.tensors)
        del output
        self._counter.drop_recomputed(self._output_memories)
        return returned, work, peak

    def _hand_on(self, tensors: Sequence[Tensor]) -> None:
        """Give the outputs to the next layer."""
        entered = {memory.key: k for k, memory in enumerate(self._input_memories)}
        for tensor in tensors:
            memory = Memory(tensor)
            storage = 0 if memory.key in {m.key for m in self._output_memories} else memory.nbytes
            self._output_memories.append(memory)
            self.outputs.append(Boundary(tensor.nbytes, storage, entered.get(memory.key), tensor.requires_grad))
        outgoing = [t for t in tensors if t.requires_grad]
        self._root = _NextLayer.apply(self._output_gradients, *outgoing) if outgoing else None

    def _backward(self, how: AbstractContextManager[None]) -> tuple[Work, int, int]:
        """Run the backward from the gradients of the outputs to those of the inputs; return its work and both peaks."""
        self._counter.count_with_others(self._input_memories)

        def run() -> None:
            with how:
                if self._root is not None:
                    # From a tensor, the backward and the recomputations in it would run outside the function modes.
                    edge = torch.autograd.graph.get_gradient_edge(self._root)
                    torch.autograd.backward(edge, torch.empty_like(self._root))

        _, work, peak = self._counted(run, self._base)
        self._root = None
        self._input_gradients = [Memory(gradient) for gradient in self._entry.gradients()] if self._entry else []
        self._entry = None
        return work, peak, self._counter.peak_with_others - self._base

    def _held_now(self) -> Held:
        groups = self._input_memories, self._output_memories, self._output_gradients, self._input_gradients
        # For each group, the indices of the tensors that something keeps.
        held = [frozenset(k for k, memory in enumerate(group) if memory.is_held) for group in groups]
        made = zip(self._output_memories, self.outputs, strict=True)
        shared = [memory for memory, boundary in made if boundary.source is None]
        shared += [*self._output_gradients, *self._input_gradients]
        others = {memory.key: memory.nbytes for memory in shared if memory.is_held}
        own = self._counter.nbytes - self._base - sum(others.values())
        return Held(own, *held)
