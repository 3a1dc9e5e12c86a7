"""FLOPs, and bytes held, of layers on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel3d.costs.counting import cost_of, storage_of, tensors_of
from parallel3d.costs.fakes import Fakes, refuse_collective
from parallel3d.costs.layer_costs import LayerCost, Ruler, Run, Sample, bound, made_ready
from parallel3d.parameters import slicing_of
from parallel3d.specs import BuildContext, Layer, LayerSpec, blueprint

# What moves data without a formula for its FLOPs takes as long as so many FLOPs a byte: an H200 sustains some 690e12 FLOP/s
# in bf16 GEMMs and 4.3e12 byte/s, an A100 some 260e12 and 1.7e12.
FLOPS_PER_BYTE = 160
_INSTEAD = "use partition method 'profile' or 'parameters'"


class _Counter(TorchDispatchMode):
    """Sums the FLOPs of what runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        refuse_collective(func, _INSTEAD)
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        cost = cost_of(func, args, kwargs, tensors_of((args, kwargs)), tensors_of(out), out)
        self.flops += cost.gemm_flops + cost.attention_flops + FLOPS_PER_BYTE * float(cost.moved)
        return out


class Tracer(Ruler):
    """Costs in FLOPs. Layers that slice themselves are built whole, without any other rank, and counted by their share."""

    def __init__(self, sample: Sample, context: BuildContext):
        super().__init__(sample, context)
        whole = replace(context, groups=context.groups.unsliced(), sequence_parallel=False)
        self._fakes = Fakes(whole, _INSTEAD)
        loss = sample.loss_fn
        self._loss = (loss.build(whole) if isinstance(loss, LayerSpec) else loss) if sample.has_loss else None

    def place(self, tree: Any) -> Any:
        """Fake ones on the device."""
        return self._fakes.place(tree)

    def measure(self, layer: Layer, x: Any, labels: Any, is_last: bool) -> tuple[LayerCost, Any]:
        """See Ruler."""

        def traced(module: Any) -> tuple[LayerCost, Any]:
            cost, output = self._trace(layer, module, x, labels, is_last)
            share = self.context.groups.model.size if self._is_sliced(layer) else 1
            return replace(cost, forward=cost.forward / share, backward=cost.backward / share), output

        found: tuple[LayerCost, Any] = self._fakes.first_that_works(layer, traced)
        return found

    def _is_sliced(self, layer: Layer) -> bool:
        if self.context.groups.model.size == 1 or not isinstance(layer, LayerSpec):
            return False
        return any(slicing_of(parameter) is not None for parameter in blueprint(layer, self.context).parameters())

    def _trace(self, layer: Layer, module: Any, x: Any, labels: Any, is_last: bool) -> tuple[LayerCost, Any]:
        with self._fakes.mode:
            parameters = made_ready(module, self.context.device, self.sample.precision.weights)
            function = bound(layer, module, self._loss if is_last else None, labels)
            run = Run(function, x, parameters, self.sample.precision.autocasting(self.context.device))
            saved: dict[int, int] = {}
            with _Counter() as counter, _saving(saved):
                run.forward()
            forward = counter.flops
            with counter:
                run.backward()
        for parameter in parameters:
            saved.pop(storage_of(parameter), None)
        given = {storage_of(t): t.untyped_storage().nbytes() for t in tree_leaves(x) if isinstance(t, Tensor)}
        held, inputs = sum(saved.values()), sum(given.values())
        return LayerCost(forward, counter.flops - forward, held, inputs), run.handed_on()


@contextmanager
def _saving(storages: dict[int, int]) -> Iterator[None]:
    """Note the bytes of each storage that is saved for a backward inside."""

    def pack(tensor: Tensor) -> Tensor:
        storages[storage_of(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield
