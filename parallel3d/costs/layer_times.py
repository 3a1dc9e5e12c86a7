"""Seconds that a model's layers take on a device that is there: forward, gradients of inputs, gradients of weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from parallel3d.autograd.sink import GradientSink
from parallel3d.autograd.split_backward import make_splittable
from parallel3d.comm.collectives import DONE
from parallel3d.comm.groups import ProcessGroups
from parallel3d.config import Config
from parallel3d.costs.layer_costs import LayerCost, Run, Sample, bound, made_ready
from parallel3d.costs.profiling import Profiler, stopwatch
from parallel3d.optim.precision import make_precision
from parallel3d.planner.predict.timing import Floats, Times
from parallel3d.planner.search.model import PlannedModel
from parallel3d.specs import BuildContext, Layer
from parallel3d.zero.policy import make_policy

_WARM_UP, _TIMED = 3, 7


class LayerSeconds(NamedTuple):
    """Of one sample through a layer, the loss behind the last one included."""

    forward: float
    input_gradient: float
    weight_gradient: float


def factors(measured: Sequence[LayerSeconds], expected: Times) -> Floats:
    """[3, layers]: by how much the forward and both parts of the backward of each layer take longer than expected."""
    taken = np.array(measured).T
    whole = np.stack([expected.forward, expected.input_gradient, expected.weight_gradient])
    known = (taken > 0) & (whole > 0)
    return np.where(known, taken / np.where(known, whole, 1.0), 1.0)


@dataclass(frozen=True)
class _SplitCost(LayerCost):
    """Seconds; backward: of inputs' gradients alone."""

    weight: float = 0.0


def measure_layers(model: PlannedModel, config: Config, device: torch.device) -> tuple[LayerSeconds, ...]:
    """Of each layer of the whole model, in training's precision; layers that are alike are measured once.

    Medians of a few runs, with weight gradients added to accumulators as training does, one layer in memory at a time.
    Raises PartitionError, that names the layer and the remedy, for one that can't run there.
    """
    inputs, labels = model.sample(1)
    sample = Sample(inputs, labels, model.loss_fn, make_precision(config))
    context = BuildContext(ProcessGroups.imagined(1, lambda kind, nbytes: DONE), device)
    found = _SplitRuler(sample, context, config).measure_all(model.layers)
    return tuple(LayerSeconds(c.forward, c.backward, c.weight if isinstance(c, _SplitCost) else 0.0) for c in found)


class _SplitRuler(Profiler):
    """Costs in seconds, with the backward in two parts."""

    remedy = "give a cluster by --cluster instead of --measure, which needs no device"

    def __init__(self, sample: Sample, context: BuildContext, config: Config):
        super().__init__(sample, context)
        self._policy = make_policy(config, [], context.device, sample.precision.weights)

    def _measure(self, layer: Layer, x: Any, labels: Any, is_last: bool) -> tuple[LayerCost, Any]:
        device, precision = self.context.device, self.sample.precision
        module = self._built(layer)
        built = [p.dtype for p in module.parameters()] if isinstance(module, nn.Module) else []
        parameters = made_ready(module, device, precision.weights)
        sink = self._sink(parameters, built)
        if isinstance(module, nn.Module):
            make_splittable(module, sink)
        function = bound(layer, module, self._loss if is_last else None, labels)
        watch = stopwatch(device)
        for pass_ in range(_WARM_UP + _TIMED):
            sink.open()
            run = Run(function, x, (), precision.autocasting(device))
            watch.time(run.forward)
            watch.time(partial(self._input_gradients, run, sink, pass_))
            watch.time(partial(sink.run_deferred, pass_))
        times = watch.seconds()[3 * _WARM_UP :]
        forward, backward, weight = (median(times[k::3]) for k in range(3))
        return _SplitCost(forward, backward, weight=weight), run.handed_on()

    def _sink(self, parameters: Sequence[nn.Parameter], built: Sequence[torch.dtype]) -> GradientSink:
        sink = GradientSink()
        for parameter, dtype in zip(parameters, built, strict=True):
            if parameter.requires_grad:
                accumulator = torch.zeros_like(parameter, dtype=self._policy.accumulator_dtype(dtype))
                sink.attach(parameter, accumulator)
        return sink

    @staticmethod
    def _input_gradients(run: Run, sink: GradientSink, pass_: int) -> None:
        outputs = [t for t in tree_leaves(run.output) if isinstance(t, Tensor) and t.requires_grad]
        with sink.deferring(pass_):
            if outputs:
                torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
