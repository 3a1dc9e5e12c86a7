"""The two layer profilers: FLOPs of layers on fake tensors, and seconds of layers on a device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from parallel3d.comm.clock import Clock, clock_of
from parallel3d.comm.collectives import DONE
from parallel3d.comm.groups import ProcessGroups
from parallel3d.config import Config
from parallel3d.costs.counter import OperatorCounter
from parallel3d.costs.fakes import Fakes
from parallel3d.costs.layer_costs import LayerCost, LayerProfiler, LayerRun, Sample, attach_sink, bind_forward, prepare
from parallel3d.costs.operators import storage_of
from parallel3d.costs.work import Work
from parallel3d.errors import PartitionError
from parallel3d.parameters import slicing_of
from parallel3d.specs import BuildContext, Layer, LayerSpec, blueprint
from parallel3d.zero.policy import make_policy

# A byte moved takes as long as this number of FLOPs: an H200 sustains some 690e12 FLOP/s in bf16 GEMMs and 4.3e12 byte/s, an
# A100 some 260e12 and 1.7e12.
FLOPS_PER_BYTE = 160
# Runs of each layer. The same on every rank: tensor-parallel ranks run a layer together.
_WARM_UP, _TIMED = 3, 7
_FP32_OR_WIDER = partial(torch.promote_types, torch.float32)
_INSTEAD = "use partition method 'profile' or 'parameters'"


class FlopProfiler(LayerProfiler):
    """Costs in FLOPs, from shapes alone.

    Tensor-parallel layers are built whole, without any other rank, and a rank's share of their FLOPs is counted.
    """

    def __init__(self, sample: Sample, context: BuildContext):
        whole = replace(context, groups=context.groups.unsliced(), sequence_parallel=False)
        super().__init__(sample, context, sample.build_loss(whole))
        self._fakes = Fakes(whole, _INSTEAD)

    def place(self, tree: Any) -> Any:
        """Return fake tensors on the device."""
        return self._fakes.place(tree)

    def measure(self, layer: Layer, x: Any, loss: Callable[[Any], Any] | None) -> tuple[LayerCost, Any]:
        """Trace the layer on fake tensors."""
        return self._fakes.first_that_works(layer, partial(self._trace, layer, x, loss))

    def _trace(self, layer: Layer, x: Any, loss: Callable[[Any], Any] | None, module: Any) -> tuple[LayerCost, Any]:
        counter = OperatorCounter(_INSTEAD)
        saved: dict[int, int] = {}  # storage -> bytes

        def pack(tensor: Tensor) -> Tensor:
            saved[storage_of(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        share, model = 1, self.context.groups.model
        if model.size > 1 and isinstance(layer, LayerSpec):
            parameters = list(blueprint(layer, self.context).parameters())
            share = model.size if any(slicing_of(parameter) is not None for parameter in parameters) else 1
        with self._fakes.mode:
            parameters = prepare(module, self.context.device, self.sample.precision.weights)
            run = LayerRun(bind_forward(layer, module, loss), x, self.sample.precision.autocasting(self.context.device))
            with counter, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                run.forward()
            forward = _flops(counter.take())
            with counter:
                run.backward(parameters)
            backward = _flops(counter.take())
        for parameter in parameters:
            saved.pop(storage_of(parameter), None)
        given = {storage_of(t): t.untyped_storage().nbytes() for t in tree_leaves(x) if isinstance(t, Tensor)}
        cost = LayerCost(forward / share, backward / share, saved=sum(saved.values()), given=sum(given.values()))
        return cost, run.next_input()


def _flops(work: Work) -> float:
    return work.flops + FLOPS_PER_BYTE * work.moved


class TimeProfiler(LayerProfiler):
    """Costs in seconds on the context's device: medians of a few runs, one layer in memory at a time.

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
        super().__init__(sample, context, sample.build_loss(context))
        self._clock = clock or clock_of(context.device)
        self._accumulator_dtype, self._remedy = accumulator_dtype, remedy

    def place(self, tree: Any) -> Any:
        """Return the tensors on the device."""
        return tree_map(lambda t: t.detach().to(self.context.device) if isinstance(t, Tensor) else t, tree)

    def measure(self, layer: Layer, x: Any, loss: Callable[[Any], Any] | None) -> tuple[LayerCost, Any]:
        """Run the layer. Raises PartitionError if it fails."""
        try:
            return self._measure(layer, x, loss)
        except Exception as error:  # whatever a layer's own code raises
            raise PartitionError(
                f"it failed while it was measured: {type(error).__name__}: {error}; {self._remedy}"
            ) from error

    def _measure(self, layer: Layer, x: Any, loss: Callable[[Any], Any] | None) -> tuple[LayerCost, Any]:
        module, precision = self._build(layer), self.sample.precision
        sink, *_ = attach_sink(module, self.context.device, precision.weights, self._accumulator_dtype)
        function = bind_forward(layer, module, loss)
        marks: list[Any] = []
        for _ in range(_WARM_UP + _TIMED):
            run = LayerRun(function, x, precision.autocasting(self.context.device))
            sink.open()
            marks.append(self._clock.mark())
            run.forward()
            marks.append(self._clock.mark())
            with sink.deferring(run):
                run.accumulate()
            marks.append(self._clock.mark())
            sink.run_deferred(run)
            marks.append(self._clock.mark())
        seconds = [end - start for start, end in pairwise(self._clock.read(marks))]
        # Each run has three phases, and the time between it and the next one.
        forward, backward, weight = (median(seconds[4 * _WARM_UP + phase :: 4]) for phase in range(3))
        return LayerCost(forward, backward, weight), run.next_input()

    def _build(self, layer: Layer) -> Any:
        """Return a layer for this profiler alone: a run changes dtypes, and what modules count and average."""
        module: Any = layer
        given: list[Any] = [layer]
        if isinstance(layer, LayerSpec):
            with self.context.device:
                module = layer.build(self.context)
            given = tree_leaves((layer.module_args, layer.module_kwargs))
        return copy.deepcopy(module) if any(isinstance(value, nn.Module) for value in given) else module


def measure_layers(layers: Sequence[Layer], sample: Sample, config: Config, device: torch.device) -> list[LayerCost]:
    """Return the cost of each layer in seconds on a device; layers that are alike are measured once.

    Weight gradients are added to accumulators as the configuration's training does. Raises PartitionError, which names the
    layer and the remedy, for one that can't run there.
    """
    policy = make_policy(config, [], device, sample.precision.weights)
    remedy = "give a cluster by --cluster instead of --measure, which needs no device"
    context = BuildContext(ProcessGroups.imagined(1, lambda kind, nbytes: DONE), device)
    profiler = TimeProfiler(sample, context, policy.accumulator_dtype, remedy=remedy)
    return profiler.measure_all(layers)
