"""What each layer of a model asks of a device and holds in its memory, found without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from parallel3d.config import Config
from parallel3d.costs.counter import OperatorCounter
from parallel3d.costs.layer_profile import LayerProfile, extrapolated, recomputed
from parallel3d.costs.model_traces import INSTEAD, LossFunction, ModelTraces, TracedModel, rows_of
from parallel3d.errors import PartitionError
from parallel3d.layer_choice import choice_rule
from parallel3d.parameters import ParameterInfo
from parallel3d.planner.predict.parameters import stage_parameters
from parallel3d.specs import Layer, layer_name
from parallel3d.structures import TensorTree
from parallel3d.zero.policy import ZeroPolicy, make_policy

DeviceType = Literal["cpu", "cuda"]
# Numbers of samples that are traced, from which others follow: the first pair for which that holds. Of a single sample some
# copies are mere views.
_FEW = ((1, 2), (2, 3))


class _Layout(NamedTuple):
    slices: int
    sequence_parallel: bool


class ModelProfile:
    """Profiles of a model's layers for any slicing and micro-batch, each traced when it is first asked for.

    layers, loss_fn: as PipelineModule takes them; inputs, labels: of one micro-batch, whose samples lie along dim 0 of its
    tensors; config: with precision, compilation and which layers may be recomputed. device: on whose behalf, "cuda" or
    "cpu". Tensors are without memory, on the meta device or fake ones on the CPU, so that no device is needed; with "cuda"
    attention, dropout and this project's kernels are those of CUDA (costs/fakes.py, fake_device.py). compiled: torch.compile
    fuses element-wise work, see OperatorCounter; the configuration says by default.
    Nothing is joined or communicated: collectives of sliced layers are noted where they are called.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        inputs: Any,
        labels: Any,
        loss_fn: LossFunction,
        config: Config,
        device: DeviceType = "cuda",
        compiled: bool | None = None,
    ):
        self.specs, self.names = list(layers), [layer_name(layer) for layer in layers]
        self.config, self.device = config, device
        fuses = config.compile.enabled if compiled is None else compiled
        self._traceable = TracedModel(self.specs, loss_fn, (inputs, labels), config, device, fuses)
        self.precision = self._traceable.precision
        chosen = choice_rule(config.pipeline.checkpointable_layers, self.names, "checkpointable_layers")
        self._recomputes = [chosen(k, layer) for k, layer in enumerate(self.specs)]
        # Attention of the CPU's is found on fake tensors alone; the meta device has no autocast.
        self._on_meta = device == "cuda" and self.precision.autocast is None
        self._counter = OperatorCounter(INSTEAD, fuses)
        self._losses: dict[Any, LayerProfile] = {}
        self._slicings: dict[_Layout, ModelTraces] = {}
        self._profiles: dict[tuple[_Layout, int], tuple[LayerProfile, ...]] = {}
        self._again: dict[tuple[_Layout, int], tuple[LayerProfile, ...]] = {}
        self._parameters: dict[tuple[object, ...], list[list[ParameterInfo]]] = {}

    def of_layers(self, layers: Sequence[Layer]) -> ModelProfile:
        """Of the same model in other layers, behind which the loss is traced once for both."""
        traced = self._traceable
        other = ModelProfile(layers, *traced.sample, traced.loss_fn, self.config, self.device, traced.fuses)
        other._losses = self._losses
        return other

    def policy(self, zero: int) -> ZeroPolicy:
        """What ZeRO of this stage is asked to do, by the rest of the configuration.

        Stage 2 reduces per micro-batch unless that says no.
        """
        given = self.config.zero_optimization
        each = given.reduce_per_micro_batch is not False
        section = given.model_copy(update={"stage": zero, "reduce_per_micro_batch": each})
        config = self.config.model_copy(update={"zero_optimization": section})
        return make_policy(config, [], torch.device("cpu"), self.precision.weights)

    def loaded(self, micro_batch: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bytes that the loader puts on the device of each tensor of the inputs, and of the labels, of so many samples.

        On the CPU those alone that are cast: the others are the loader's own.
        """
        inputs, labels = self._traceable.sample
        rows = rows_of((inputs, labels))

        def nbytes(tensor: Tensor, cast: bool) -> int:
            weights = self.precision.weights if cast and self.precision.casts_inputs else None
            dtype = weights if weights is not None and tensor.is_floating_point() else tensor.dtype
            if self.device == "cpu" and dtype == tensor.dtype:
                return 0
            samples = micro_batch / rows if tensor.dim() and tensor.shape[0] == rows else 1
            return round(samples * tensor.numel()) * dtype.itemsize

        return (
            tuple(nbytes(t, True) for t in TensorTree.of(inputs).tensors),
            tuple(nbytes(t, False) for t in TensorTree.of(labels).tensors),
        )

    def layers(
        self, slices: int = 1, sequence_parallel: bool = False, micro_batch: int = 1, recompute: int = 0
    ) -> tuple[LayerProfile, ...]:
        """One a layer; equal layers share what they are made of. recompute: as activation_checkpoint_interval.

        Raises PartitionError, that names the layer and the remedy, for one that can't be traced.
        """
        layout = _Layout(slices, sequence_parallel and slices > 1)
        key = (layout, micro_batch)
        if key not in self._profiles:
            self._profiles[key] = self._make(layout, micro_batch)
        profiles = self._profiles[key]
        if not recompute:
            return profiles
        if key not in self._again:
            known = {id(p): recomputed(p) for p in {id(p): p for p in profiles}.values()}
            self._again[key] = tuple(
                known[id(p)] if again else p for p, again in zip(profiles, self._recomputes, strict=True)
            )
        return self._again[key]

    def stage_parameters(
        self, slices: int, sequence_parallel: bool, bounds: Sequence[int], placement: Sequence[int]
    ) -> list[list[ParameterInfo]]:
        """See the function of that name; made once, not to be changed."""
        key = (slices, sequence_parallel, tuple(bounds), tuple(placement))
        if key not in self._parameters:
            layers = self.layers(slices, sequence_parallel)
            self._parameters[key] = stage_parameters(self.specs, layers, bounds, placement)
        return self._parameters[key]

    def _make(self, layout: _Layout, micro_batch: int) -> tuple[LayerProfile, ...]:
        if self._on_meta:
            try:
                return self._made(layout, micro_batch)
            except PartitionError:
                # A layer wants to know more of tensors than there is on the meta device: fake ones have it.
                self._on_meta = False
                self._slicings.clear()
        return self._made(layout, micro_batch)

    def _made(self, layout: _Layout, micro_batch: int) -> tuple[LayerProfile, ...]:
        if layout not in self._slicings:
            self._slicings[layout] = ModelTraces(self._traceable, *layout, self._on_meta, self._counter, self._losses)
        traced = self._slicings[layout].profiles
        for few in _FEW:
            if micro_batch <= max(few):
                break
            one, two = map(traced, few)
            found = _extrapolated(one, two, (micro_batch - few[0]) / (few[1] - few[0]))
            if found is not None:
                return found
        return traced(micro_batch)


def _extrapolated(
    one: Sequence[LayerProfile], two: Sequence[LayerProfile], steps: float
) -> tuple[LayerProfile, ...] | None:
    """Of all layers, equal ones once; None where that can't be for one of them."""
    known: dict[tuple[int, int], LayerProfile | None] = {}
    found = []
    for a, b in zip(one, two, strict=True):
        if (id(a), id(b)) not in known:
            known[id(a), id(b)] = extrapolated(a, b, steps)
        found.append(known[id(a), id(b)])
    whole = tuple(profile for profile in found if profile is not None)
    return whole if len(whole) == len(found) else None
