"""Cost of each layer of a list on a sample micro-batch, computed on tensors without memory or measured on the device.

Layers run one after the other, each on the previous one's output. A layer that repeats an earlier one, with the same
arguments and inputs of the same structure, is assumed to cost the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from parallel3d.autograd.sink import GradientSink
from parallel3d.autograd.split_backward import make_splittable
from parallel3d.comm.structures import Structure, describe
from parallel3d.errors import PartitionError
from parallel3d.optim.precision import Precision
from parallel3d.parameters import replace_tensors
from parallel3d.specs import BuildContext, Layer, LayerSpec, LossFunction, TiedLayerSpec, function_of, layer_name


@dataclass(frozen=True)
class LayerCost:
    """Cost of one layer, in FLOPs or in seconds.

    - forward, backward: the two passes.
    - weight: the gradients of weights, where `backward` doesn't include them, else 0.
    - saved: bytes that the forward keeps for the backward; given: bytes of the layer's input. Both 0 if not counted.
    """

    forward: float
    backward: float
    weight: float = 0.0
    saved: int = 0
    given: int = 0

    @property
    def parts(self) -> tuple[float, float, float]:
        """The forward, the backward, and the gradients of weights apart from it."""
        return self.forward, self.backward, self.weight


@dataclass(frozen=True)
class Sample:
    """One micro-batch: the first layer's inputs, and labels, with which the loss is counted too.

    loss_fn: as PipelineModule takes it; precision: of training, for weights, inputs and autocast.
    """

    inputs: Any
    labels: Any
    loss_fn: LossFunction
    precision: Precision

    def build_loss(self, context: BuildContext) -> Callable[[Any, Any], Any] | None:
        """Return the loss function, built if it is a spec; None without labels: the cost then doesn't include it."""
        if self.labels is None:
            return None
        return self.loss_fn.build(context) if isinstance(self.loss_fn, LayerSpec) else self.loss_fn


class LayerProfiler(ABC):
    """Finds the cost of layers, in their order. loss: as Sample.build_loss returns it; it is part of the last layer."""

    def __init__(self, sample: Sample, context: BuildContext, loss: Callable[[Any, Any], Any] | None):
        self.sample, self.context, self._loss = sample, context, loss

    @abstractmethod
    def place(self, tree: Any) -> Any:
        """Return the sample's tensors on the device on which layers run."""

    @abstractmethod
    def measure(self, layer: Layer, x: Any, loss: Callable[[Any], Any] | None) -> tuple[LayerCost, Any]:
        """Return (cost, output) of a layer on x; the loss of the layer's output is part of both, if there is one."""

    def measure_all(self, layers: Sequence[Layer]) -> list[LayerCost]:
        """Return the cost of each layer. Raises PartitionError that names the layer which can't run, and the remedy."""
        x = self.sample.precision.cast(self.place(self.sample.inputs))
        labels, loss_fn = self.place(self.sample.labels), self._loss
        loss = None if loss_fn is None else lambda output: loss_fn(output, labels)
        known: list[tuple[Layer, Structure, tuple[LayerCost, Any]]] = []
        costs = []
        for k, layer in enumerate(layers):
            structure = describe(x)[0]
            own_loss = loss if k == len(layers) - 1 else None
            same = (r for other, s, r in known if own_loss is None and alike(layer, other) and structure == s)
            result = next(same, None)
            if result is None:
                try:
                    result = self.measure(layer, x, own_loss)
                except PartitionError as error:
                    raise PartitionError(f"layer {k} ({layer_name(layer)}): {error}") from error
                known.append((layer, structure, result))
            cost, x = result
            costs.append(cost)
        return costs


def alike(a: Layer, b: Layer) -> bool:
    """Return whether two entries of a list run the same computation, with shared weights or not."""
    if a is b:
        return True
    if type(a) is not type(b) or not isinstance(a, LayerSpec) or not isinstance(b, LayerSpec):
        return False
    same_call = not isinstance(a, TiedLayerSpec) or a.forward_fn is getattr(b, "forward_fn", None)
    return same_call and a.costs_like(b)


def bind_forward(layer: Layer, module: Any, loss: Callable[[Any], Any] | None = None) -> Callable[[Any], Any]:
    """Return the function that runs a layer, built as `module`, and then the loss, if there is one."""
    function = function_of(layer, module)
    return function if loss is None else lambda x: loss(function(x))


def prepare(module: Any, device: torch.device, weights: torch.dtype | None) -> list[nn.Parameter]:
    """Put a layer in training mode on `device`, cast as `initialize` casts it, and return its parameters.

    weights: dtype of floating-point parameters and buffers, None to keep theirs. A function has no parameters.
    """
    if not isinstance(module, nn.Module):
        return []
    replace_tensors(module, lambda t: t.detach().to(device, weights if t.is_floating_point() else None))
    return list(module.train().parameters())


def attach_sink(
    module: Any,
    device: torch.device,
    weights: torch.dtype | None,
    accumulator_dtype: Callable[[torch.dtype], torch.dtype],
    least_work: int | None = 0,
) -> tuple[GradientSink, list[nn.Parameter], list[Tensor]]:
    """Prepare a layer whose gradients go to a sink; return the sink, the parameters to train, and their accumulators.

    accumulator_dtype: of a parameter's dtype as built; least_work: of make_splittable, None to leave it out.
    """
    trained = [p.dtype for p in module.parameters() if p.requires_grad] if isinstance(module, nn.Module) else []
    parameters = [p for p in prepare(module, device, weights) if p.requires_grad]
    sink, accumulators = GradientSink(), []
    for parameter, dtype in zip(parameters, trained, strict=True):
        accumulators.append(torch.zeros(parameter.shape, dtype=accumulator_dtype(dtype), device=parameter.device))
        sink.attach(parameter, accumulators[-1])
    if least_work is not None and isinstance(module, nn.Module):
        make_splittable(module, sink, least_work)
    return sink, parameters, accumulators


class LayerRun:
    """One forward and backward of a layer, as `function`, on x.

    The layer gets copies of the input's tensors that aren't leaves, since it may work on its input in place. A gradient
    goes to those inputs for which the previous layer's output requires one, and to none of the first layer's.
    """

    def __init__(self, function: Callable[[Any], Any], x: Any, autocasting: AbstractContextManager[Any]):
        self._function, self._autocasting = function, autocasting
        self._leaves = [t.detach().requires_grad_(t.requires_grad) for t in tree_leaves(x) if isinstance(t, Tensor)]
        copies = iter([leaf.clone() for leaf in self._leaves])
        self._x = tree_map(lambda t: next(copies) if isinstance(t, Tensor) else t, x)
        self._output: Any = None

    def forward(self) -> None:
        """Run the layer."""
        with self._autocasting:
            self._output = self._function(self._x)

    def backward(self, parameters: Sequence[nn.Parameter]) -> None:
        """Compute gradients of the inputs and of these parameters, without storing them; output gradients are ones."""
        outputs, ones = self._outputs()
        inputs = [t for t in (*self._leaves, *parameters) if t.requires_grad]
        if outputs and inputs:
            torch.autograd.grad(outputs, inputs, ones, allow_unused=True)

    def accumulate(self) -> None:
        """Run a backward whose gradients go to the leaves, or where their hooks take them; output gradients are ones."""
        outputs, ones = self._outputs()
        if outputs:
            torch.autograd.backward(outputs, ones)

    def _outputs(self) -> tuple[list[Tensor], list[Tensor]]:
        outputs = [t for t in tree_leaves(self._output) if isinstance(t, Tensor) and t.requires_grad]
        return outputs, [torch.ones_like(t) for t in outputs]

    def next_input(self) -> Any:
        """Return the output as the next layer's input, without its autograd graph."""
        return tree_map(
            lambda t: t.detach().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t, self._output
        )
