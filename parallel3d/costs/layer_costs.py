"""What each layer of a list costs on a sample micro-batch, counted on tensors without memory or measured on the device.

Layers run one after the other, each on what the one before returned. A layer that was there already, with the same
arguments and inputs of the same structure, is taken to cost the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from parallel3d.errors import PartitionError
from parallel3d.optim.precision import Precision
from parallel3d.specs import BuildContext, Layer, LayerSpec, TiedLayerSpec, layer_name
from parallel3d.structures import Structure, describe


@dataclass(frozen=True)
class LayerCost:
    """forward and backward: in the unit of whoever found it; saved: bytes that the forward keeps for the backward, and
    given: of the layer's input, both 0 where that isn't counted.
    """

    forward: float
    backward: float
    saved: int = 0
    given: int = 0


@dataclass(frozen=True)
class Sample:
    """One micro-batch to find costs with: what the first layer takes, and labels, with which the loss is counted too.

    loss_fn: as PipelineModule takes it; precision: of training, for weights, inputs and autocast.
    """

    inputs: Any
    labels: Any
    loss_fn: Callable[[Any, Any], Any] | LayerSpec | None
    precision: Precision

    @property
    def has_loss(self) -> bool:
        """Whether the last layer's cost includes the loss."""
        return self.loss_fn is not None and self.labels is not None


class Ruler(ABC):
    """Finds the cost of layers, in their order."""

    def __init__(self, sample: Sample, context: BuildContext):
        self.sample, self.context = sample, context

    @abstractmethod
    def place(self, tree: Any) -> Any:
        """The sample's tensors where layers are to run."""

    @abstractmethod
    def measure(self, layer: Layer, x: Any, labels: Any, is_last: bool) -> tuple[LayerCost, Any]:
        """(cost, output) of a layer on x; where is_last and the sample has a loss, that of both."""

    def measure_all(self, layers: Sequence[Layer]) -> list[LayerCost]:
        """One cost a layer. Raises PartitionError that names the layer which can't run, and the remedy."""
        x = self.sample.precision.cast(self.place(self.sample.inputs))
        labels = self.place(self.sample.labels)
        known: list[tuple[Layer, Structure, tuple[LayerCost, Any]]] = []
        costs = []
        for k, layer in enumerate(layers):
            structure, is_last = describe(x)[0], k == len(layers) - 1
            found = None
            if not (is_last and self.sample.has_loss):
                found = next((f for other, s, f in known if alike(layer, other) and structure == s), None)
            if found is None:
                try:
                    found = self.measure(layer, x, labels, is_last)
                except PartitionError as error:
                    raise PartitionError(f"layer {k} ({layer_name(layer)}): {error}") from error
                known.append((layer, structure, found))
            cost, x = found
            costs.append(cost)
        return costs


def alike(a: Layer, b: Layer) -> bool:
    """Whether two entries of a list run the same computation, with weights of their own or not."""
    if a is b:
        return True
    if type(a) is not type(b) or not isinstance(a, LayerSpec) or not isinstance(b, LayerSpec):
        return False
    same_call = not isinstance(a, TiedLayerSpec) or a.forward_fn is getattr(b, "forward_fn", None)
    return same_call and a.costs_like(b)


def bound(layer: Layer, module: Any, loss: Callable[[Any, Any], Any] | None, labels: Any) -> Callable[[Any], Any]:
    """What runs a layer that was built as `module`, and then the loss, if there is one."""
    function = module
    if isinstance(layer, TiedLayerSpec) and layer.forward_fn is not None:
        function = partial(layer.forward_fn, module)
    return function if loss is None else lambda x: loss(function(x), labels)


def replace_tensors(module: nn.Module, convert: Callable[[Tensor], Tensor]) -> None:
    """Put convert(tensor) in place of each parameter and buffer, wherever one is shared.

    Not module.to(): that swaps the contents of fake tensors, which it can't for those that something else refers to.
    """
    converted: dict[Tensor, Tensor] = {}
    for owner in module.modules():
        tables: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if tensor not in converted:
                    is_parameter = isinstance(tensor, nn.Parameter)
                    new = convert(tensor.detach())
                    converted[tensor] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
                    converted[tensor].__dict__.update(tensor.__dict__)
                table[name] = converted[tensor]


def made_ready(module: Any, device: torch.device, weights: torch.dtype | None) -> list[nn.Parameter]:
    """The parameters of a layer, now in training mode on `device`, with floating-point tensors in dtype `weights`, if any.

    Buffers too, as initialize casts them. Of a function there are none.
    """
    if not isinstance(module, nn.Module):
        return []

    def convert(tensor: Tensor) -> Tensor:
        return tensor.to(device, weights if tensor.is_floating_point() else None)

    replace_tensors(module, convert)
    return list(module.train().parameters())


@dataclass
class Run:
    """One forward and backward of a layer, which leave no gradient in its parameters.

    tensors: copies of the input's tensors, not leaves, for a layer may work on its input in place.
    """

    function: Callable[[Any], Any]
    x: Any
    parameters: Sequence[nn.Parameter]
    autocasting: AbstractContextManager[Any]

    def __post_init__(self) -> None:
        # Of the first layer's inputs nothing asks for a gradient; of the others those that the layer before computed with one.
        self._leaves = [
            t.detach().requires_grad_(t.requires_grad) for t in tree_leaves(self.x) if isinstance(t, Tensor)
        ]
        copies = iter([leaf.clone() for leaf in self._leaves])
        self.x = tree_map(lambda t: next(copies) if isinstance(t, Tensor) else t, self.x)
        self.output: Any = None

    def forward(self) -> None:
        """Run the layer."""
        with self.autocasting:
            self.output = self.function(self.x)

    def backward(self) -> None:
        """Gradients of the inputs and parameters, from ones as the gradients of all outputs."""
        outputs = [t for t in tree_leaves(self.output) if isinstance(t, Tensor) and t.requires_grad]
        inputs = [t for t in (*self._leaves, *self.parameters) if t.requires_grad]
        if outputs and inputs:
            torch.autograd.grad(outputs, inputs, [torch.ones_like(t) for t in outputs], allow_unused=True)

    def handed_on(self) -> Any:
        """The output for the next layer, without the graph behind it."""
        return tree_map(
            lambda t: t.detach().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t, self.output
        )
