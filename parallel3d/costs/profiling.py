"""Seconds that layers take on this rank's device, in training's precision."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from parallel3d.costs.layer_costs import LayerCost, Ruler, Run, Sample, bound, made_ready
from parallel3d.errors import PartitionError
from parallel3d.specs import BuildContext, Layer, LayerSpec

# Of each layer. Always as many, on every rank: ranks that share a sliced layer run it together.
_WARM_UP = 2
_TIMED = 5


class Profiler(Ruler):
    """Costs in seconds: the median of a few runs of each layer, after a few others, one layer in memory at a time."""

    remedy = (
        "check that sample_input is what the first layer takes, of a micro-batch that fits into memory, or use partition "
        "method 'flops' or 'parameters'"
    )

    def __init__(self, sample: Sample, context: BuildContext):
        super().__init__(sample, context)
        loss = sample.loss_fn
        self._loss = (loss.build(context) if isinstance(loss, LayerSpec) else loss) if sample.has_loss else None

    def place(self, tree: Any) -> Any:
        """On the device."""
        return tree_map(lambda t: t.detach().to(self.context.device) if isinstance(t, Tensor) else t, tree)

    def measure(self, layer: Layer, x: Any, labels: Any, is_last: bool) -> tuple[LayerCost, Any]:
        """See Ruler."""
        try:
            return self._measure(layer, x, labels, is_last)
        except Exception as error:  # whatever a layer's own code raises
            raise PartitionError(
                f"it failed while it was measured: {type(error).__name__}: {error}; {self.remedy}"
            ) from error

    def _measure(self, layer: Layer, x: Any, labels: Any, is_last: bool) -> tuple[LayerCost, Any]:
        device, precision = self.context.device, self.sample.precision
        module = self._built(layer)
        parameters = made_ready(module, device, precision.weights)
        function = bound(layer, module, self._loss if is_last else None, labels)
        watch = stopwatch(device)
        for _ in range(_WARM_UP + _TIMED):
            run = Run(function, x, parameters, precision.autocasting(device))
            watch.time(run.forward)
            watch.time(run.backward)
        times = watch.seconds()[2 * _WARM_UP :]
        return LayerCost(median(times[::2]), median(times[1::2])), run.handed_on()

    def _built(self, layer: Layer) -> Any:
        """What runs, for this ruler alone."""
        module: Any = layer
        if isinstance(layer, LayerSpec):
            with self.context.device:
                module = layer.build(self.context)
        if isinstance(layer, nn.Module) or _is_made_of_modules(layer):
            module = copy.deepcopy(module)  # training's own: a run changes their dtype, and what they count and average
        return module


def _is_made_of_modules(layer: Layer) -> bool:
    given = tree_leaves((layer.module_args, layer.module_kwargs)) if isinstance(layer, LayerSpec) else ()
    return any(isinstance(argument, nn.Module) for argument in given)


def stopwatch(device: torch.device) -> Stopwatch:
    """For work on a device."""
    return _CudaWatch(device) if device.type == "cuda" else _HostWatch()


class Stopwatch(Protocol):
    """Times pieces of work, one after the other."""

    def time(self, work: Callable[[], None]) -> None:
        """Run it."""

    def seconds(self) -> list[float]:
        """Of each piece; waits for the device."""


class _HostWatch:
    def __init__(self) -> None:
        self._seconds: list[float] = []

    def time(self, work: Callable[[], None]) -> None:
        start = time.perf_counter()
        work()
        self._seconds.append(time.perf_counter() - start)

    def seconds(self) -> list[float]:
        return self._seconds


class _CudaWatch:
    """By events, so that the host may run ahead as it does in training."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def time(self, work: Callable[[], None]) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(self._stream)
        work()
        end.record(self._stream)
        self._events.append((start, end))

    def seconds(self) -> list[float]:
        self._stream.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in self._events]
