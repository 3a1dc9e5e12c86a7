"""Stopwatch of layers: their seconds on a device.

Layers run one after the other, each on the previous one's output. A layer that repeats an earlier one, with the same
arguments and inputs of the same structure, is assumed to take as long.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from parallel3d.comm.clock import Clock, clock_of
from parallel3d.comm.collectives import DONE
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.structures import Structure, TensorTree
from parallel3d.config import Config
from parallel3d.costs.trained_layer import Sample, TrainedLayer, alike
from parallel3d.errors import PartitionError
from parallel3d.specs import BuildContext, Layer, LayerSpec, layer_name
from parallel3d.zero.policy import make_policy

# Runs of each layer. The same on every rank: tensor-parallel ranks run a layer together.
_WARM_UP, _TIMED = 3, 7
_FP32_OR_WIDER = partial(torch.promote_types, torch.float32)


class LayerCost(NamedTuple):
    """Seconds of one layer: of the forward, of the backward without the gradients of weights, and of these."""

    forward: float
    backward: float
    weight: float


class TimeProfiler:
    """Measures layers on the context's device: medians of a few runs, one layer in memory at a time.

    Backwards are split as in pipeline training: the gradients of weights are timed apart and added to accumulators.

    - accumulator_dtype: returns the dtype of an accumulator for a parameter's dtype.
    - remedy: advice of the error for a layer that can't run.
    """

    def __init__(
        self,
        sample: Sample,
        context: BuildContext,
        accumulator_dtype: Callable[[torch.dtype], torch.dtype] = _FP32_OR_WIDER,
        clock: Clock | None = None,
        remedy: str = (
            "check that sample_input is what the first layer takes, of a micro-batch that fits into memory, or use partition "
            "method 'flops' or 'parameters'"
        ),
    ):
        self._sample, self._context, self._clock = sample, context, clock or clock_of(context.device)
        self._accumulator_dtype, self._remedy = accumulator_dtype, remedy

    def measure_all(self, layers: Sequence[Layer]) -> list[LayerCost]:
        """Return the seconds of each layer. The loss is part of the last one, if the sample has labels.

        Raises PartitionError that names the layer which can't run, and the remedy.
        """
        loss, x = self._loss(), self._placed(self._sample.precision.cast(self._sample.inputs))
        known: list[tuple[Layer, Structure, tuple[LayerCost, TensorTree]]] = []
        costs = []
        for k, layer in enumerate(layers):
            own_loss = loss if k == len(layers) - 1 else None
            same = (r for other, s, r in known if own_loss is None and alike(layer, other) and x.structure == s)
            result = next(same, None)
            if result is None:
                try:
                    result = self._measure(layer, x, own_loss)
                except Exception as error:  # whatever a layer's own code raises
                    raise PartitionError(
                        f"layer {k} ({layer_name(layer)}): it failed while it was measured: {type(error).__name__}: {error}; "
                        f"{self._remedy}"
                    ) from error
                known.append((layer, x.structure, result))
            cost, x = result
            costs.append(cost)
        return costs

    def _placed(self, value: Any) -> TensorTree:
        tree = TensorTree.of(value)
        return tree.with_tensors([tensor.detach().to(self._context.device) for tensor in tree.tensors])

    def _loss(self) -> Callable[[Any], Any] | None:
        """Return the function of the last layer's output; None without labels."""
        loss_fn, labels = self._sample.loss_fn, self._placed(self._sample.labels).value()
        if loss_fn is None or labels is None:
            return None
        built: Any = loss_fn.build(self._context) if isinstance(loss_fn, LayerSpec) else loss_fn
        return lambda output: built(output, labels)

    def _measure(self, layer: Layer, x: TensorTree, loss: Callable[[Any], Any] | None) -> tuple[LayerCost, TensorTree]:
        """Return (seconds, output) of a layer on x; the loss is part of both, if there is one.

        The layer gets copies of the input's tensors that aren't leaves, since it may work on its input in place. A gradient
        goes to those inputs for which the previous layer's output requires one, and to none of the first layer's.
        """
        module, precision, device = self._build(layer), self._sample.precision, self._context.device
        trained, marks = TrainedLayer.of(layer, module, device, precision, self._accumulator_dtype), []
        if loss is not None:
            alone = trained.function
            trained = replace(trained, function=lambda x: loss(alone(x)))
        sink = trained.sink
        for _ in range(_WARM_UP + _TIMED):
            leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in x.tensors]
            given = x.with_tensors([leaf.clone() for leaf in leaves]).value()
            sink.open()
            marks.append(self._clock.mark())
            output = TensorTree.of(trained.run(given, device))
            marks.append(self._clock.mark())
            outputs = [tensor for tensor in output.tensors if tensor.requires_grad]
            with sink.deferring(self):
                if outputs:
                    torch.autograd.backward(outputs, [torch.ones_like(tensor) for tensor in outputs])
            marks.append(self._clock.mark())
            sink.run_deferred(self)
            marks.append(self._clock.mark())
        seconds = [end - start for start, end in pairwise(self._clock.read(marks))]
        # Each run has three phases, and the time between it and the next one.
        forward, backward, weight = (median(seconds[4 * _WARM_UP + phase :: 4]) for phase in range(3))
        return LayerCost(forward, backward, weight), output.with_tensors(
            [t.detach().requires_grad_(t.requires_grad) for t in output.tensors]
        )

    def _build(self, layer: Layer) -> Any:
        """Return a layer for this profiler alone: a run changes dtypes, and what modules count and average."""
        module: Any = layer
        given: list[Any] = [layer]
        if isinstance(layer, LayerSpec):
            with self._context.device:
                module = layer.build(self._context)
            given = tree_leaves((layer.module_args, layer.module_kwargs))
        return copy.deepcopy(module) if any(isinstance(value, nn.Module) for value in given) else module


def measure_layers(layers: Sequence[Layer], sample: Sample, config: Config, device: torch.device) -> list[LayerCost]:
    """Return the seconds of each layer on a device; layers that are alike are measured once.

    Weight gradients are added to accumulators as the configuration's training does. Raises PartitionError, which names the
    layer and the remedy, for one that can't run there.
    """
    policy = make_policy(config, [], device, sample.precision.weights)
    remedy = "give a cluster by --cluster instead of --measure, which needs no device"
    context = BuildContext(ProcessGroups.imagined(1, lambda kind, nbytes: DONE), device)
    profiler = TimeProfiler(sample, context, policy.accumulator_dtype, remedy=remedy)
    return profiler.measure_all(layers)
