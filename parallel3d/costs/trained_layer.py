"""A layer as it is trained, ready to be traced or measured, and the sample on which its costs are found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.autograd.sink import GradientSink
from parallel3d.autograd.split_backward import make_splittable
from parallel3d.optim.precision import Precision
from parallel3d.parameters import replace_tensors
from parallel3d.specs import Layer, LayerSpec, LossFunction, TiedLayerSpec, function_of

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class Sample:
    """One micro-batch: the first layer's inputs, and labels, with which the loss is counted too.

    loss_fn: as PipelineModule takes it; precision: of training, for weights, inputs and autocast.
    """

    inputs: Any
    labels: Any
    loss_fn: LossFunction
    precision: Precision


def alike(a: Layer, b: Layer) -> bool:
    """Return whether two entries of a list run the same computation, with shared weights or not."""
    if a is b:
        return True
    if type(a) is not type(b) or not isinstance(a, LayerSpec) or not isinstance(b, LayerSpec):
        return False
    same_call = not isinstance(a, TiedLayerSpec) or a.forward_fn is getattr(b, "forward_fn", None)
    return same_call and a.costs_like(b)


@dataclass(frozen=True)
class TrainedLayer:
    """A layer with its weights as they are trained.

    - function: runs the layer; precision: of training.
    - parameters: those to train, whose gradients `sink` adds to `accumulators`.
    """

    function: Callable[[Any], Any]
    precision: Precision
    sink: GradientSink = field(default_factory=GradientSink)
    parameters: Sequence[nn.Parameter] = ()
    accumulators: Sequence[Tensor] = ()

    @classmethod
    def of(
        cls,
        layer: Layer,
        module: Any,
        device: torch.device,
        precision: Precision,
        accumulator_dtype: Callable[[torch.dtype], torch.dtype],
        least_work: int | None = 0,
    ) -> TrainedLayer:
        """Put a layer, built as `module`, in training mode on `device`, cast as `initialize` casts it; functions stay.

        accumulator_dtype: of a parameter's dtype as built; least_work: of make_splittable, None to leave it out.
        """
        sink, accumulators = GradientSink(), list[Tensor]()
        if not isinstance(module, nn.Module):
            return cls(function_of(layer, module), precision)
        trained = [p.dtype for p in module.parameters() if p.requires_grad]
        weights = precision.weights
        replace_tensors(module, lambda t: t.detach().to(device, weights if t.is_floating_point() else None))
        parameters = [p for p in module.train().parameters() if p.requires_grad]
        for parameter, dtype in zip(parameters, trained, strict=True):
            accumulators.append(torch.zeros(parameter.shape, dtype=accumulator_dtype(dtype), device=parameter.device))
            sink.attach(parameter, accumulators[-1])
        if least_work is not None:
            make_splittable(module, sink, least_work)
        return cls(function_of(layer, module), precision, sink, parameters, accumulators)

    def run(self, x: Any, device: torch.device = _HOST) -> Any:
        """Return the layer's output. device: for autocast."""
        with self.precision.autocasting(device):
            return self.function(x)
