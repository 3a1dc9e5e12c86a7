"""Profiles of a model's layers, work and memory, traced without a device, and the parameters of each stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from parallel3d.comm.structures import TensorTree
from parallel3d.config import SELECTIVE, Config, RecomputationPolicy, SelectivePolicy
from parallel3d.config.layout import LayerPolicy, Layout
from parallel3d.costs.forked import ForkedCalls
from parallel3d.costs.layer_profile import LayerProfile, extrapolated, recomputed
from parallel3d.costs.model_traces import LossFunction, ModelTraces, TracedModel, rows_of
from parallel3d.parameters import ParameterInfo
from parallel3d.pipe.layer_choice import Policies, policy_rule
from parallel3d.pipe.ties import TieIndex
from parallel3d.specs import Layer, TiedLayerSpec, layer_name
from parallel3d.zero.layout import by_owners
from parallel3d.zero.policy import ZeroPolicy, make_policy

DeviceType = Literal["cpu", "cuda"]
# Numbers of samples that are traced, from which others follow: the first pair for which that holds. With a
# single sample some copies are views.
_FEW = ((1, 2), (2, 3))


_Slicing = tuple[int, bool]  # tensor-parallel ranks, and whether sequences are split among them
_Traced = tuple[_Slicing, SelectivePolicy | None, int]  # what traces depend on besides the layers; last the samples


class ModelProfile:
    """Profiles of a model's layers for any slicing and micro-batch, each traced when it is first asked for.

    - layers, loss_fn: as PipelineModule takes them.
    - inputs, labels: of one micro-batch, whose samples lie along dim 0 of its tensors.
    - config: its precision, whether layers are compiled, and which may be recomputed.
    - device: that the layers are to run on. Tensors have no memory, on the meta device or fake ones on the CPU, so that no
      device is needed; with "cuda", attention, dropout and this project's kernels are those of CUDA (costs/fakes.py,
      fake_device.py).

    No process group is needed: collectives of tensor-parallel layers are counted where they are called.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        inputs: Any,
        labels: Any,
        loss_fn: LossFunction,
        config: Config,
        device: DeviceType = "cuda",
    ):
        self.specs, self.names = list(layers), [layer_name(layer) for layer in layers]
        self.config, self.device = config, device
        self._traceable = TracedModel(loss_fn, (inputs, labels), config, device)
        self.precision = self._traceable.precision
        given = config.activation_checkpointing.policy
        self._has_policies = isinstance(given, Mapping)
        policies: Policies = given if isinstance(given, Mapping) else "full"
        rule = policy_rule(config.pipeline.checkpointable_layers, policies, self.names)
        self._given = [rule(k, layer) for k, layer in enumerate(self.specs)]
        self._in_other_layers: dict[tuple[int, ...], ModelProfile] = {}
        self._elsewhere: tuple[ForkedCalls, int] | None = (
            None  # process that traces, and the number of this profile there
        )
        self._slicings: dict[_Slicing, ModelTraces] = {}
        self._traced: dict[object, tuple[LayerProfile, ...]] = {}
        self._profiles: dict[tuple[_Slicing, int, bool, LayerPolicy | None], tuple[LayerProfile, ...]] = {}
        self._recomputed: dict[tuple[_Slicing, int], Sequence[LayerProfile]] = {}
        self._parameters: dict[object, list[list[ParameterInfo]]] = {}
        self._merged: dict[object, nn.Parameter] = {}
        self._policies: dict[tuple[int, int], ZeroPolicy] = {}

    def of_layers(self, layers: Sequence[Layer]) -> ModelProfile:
        """Return the profile of the same model in other layers; layers that are in both lists are traced once."""
        traced, key = self._traceable, tuple(map(id, layers))  # the profile keeps the layers
        if key not in self._in_other_layers:
            other = ModelProfile(layers, *traced.sample, traced.loss_fn, self.config, self.device)
            other._traceable, other._slicings = traced, self._slicings
            self._in_other_layers[key] = other
        return self._in_other_layers[key].with_zero(self.config)

    def trace_in(self, process: ForkedCalls, ahead: Sequence[_Traced]) -> None:
        """Trace layers in another process from now on, if they can be sent there, and those of `ahead` before they are needed.

        So are layers that `of_layers` has been called for. Nothing may have been traced before: what a module makes for all
        later micro-batches is part of its first trace.
        """
        profiles = [self, *self._in_other_layers.values()]
        if process.begin(_Traces(profiles), [(0, traced) for traced in ahead]):
            for number, profile in enumerate(profiles):
                profile._elsewhere = process, number

    def with_zero(self, config: Config) -> ModelProfile:
        """Return the profile, with the same traces, under a configuration that differs in zero_optimization alone."""
        other = copy(self)
        other.config, other._policies = config, {}
        return other

    def policy(self, zero: int, replicas: int = 1, infos: Iterable[ParameterInfo] = ()) -> ZeroPolicy:
        """Return the policy of a ZeRO stage under the rest of the configuration.

        Stage 2 reduces per micro-batch unless the configuration turns that off. infos: the parameters of a rank, frozen ones
        too, of which offload_param.max_in_cpu may be in host memory.
        """
        given = self.config.zero_optimization
        limited = given.offload_param.max_in_cpu is not None
        key = zero, sum(info.parameter.numel() for info in infos) // replicas if limited else 0
        if key not in self._policies:
            each = given.reduce_per_micro_batch is not False
            section = given.model_copy(update={"stage": zero, "reduce_per_micro_batch": each})
            config = self.config.model_copy(update={"zero_optimization": section})
            self._policies[key] = make_policy(config, [], torch.device("cpu"), self.precision.weights, key[1])
        return self._policies[key]

    def loaded(self, micro_batch: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the bytes that the loader puts on the device, for each tensor of the inputs and of the labels.

        On the CPU only tensors that are cast count: the others are the loader's own.
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
        self,
        tensor_ranks: int = 1,
        sequence_parallel: bool = False,
        micro_batch: int = 1,
        recompute: int = 0,
        policy: LayerPolicy | None = None,
    ) -> tuple[LayerProfile, ...]:
        """Return the profile of each layer; equal layers share theirs. recompute, policy: as those of a Layout.

        Without a policy what is recomputed is so by the configuration's policies, if it has them by layer.

        Raises PartitionError, which names the layer and the remedy, for one that can't be traced.
        """
        slicing = tensor_ranks, sequence_parallel and tensor_ranks > 1
        key = slicing, micro_batch, recompute > 0, policy if recompute else None
        if key not in self._profiles:
            if not recompute:
                self._profiles[key] = self._trace(slicing, micro_batch, None)
            else:
                assert policy != "auto", "policies are chosen before layers have a profile"
                own = policy if isinstance(policy, tuple) else self._policies_of(policy)
                found = {p: self._under(p, slicing, micro_batch) for p in dict.fromkeys(own)}
                self._profiles[key] = tuple(found[p][k] for k, p in enumerate(own))
        return self._profiles[key]

    def of_layout(self, layout: Layout, micro_batch: int) -> tuple[LayerProfile, ...]:
        """Return the profile of each layer on a rank of a layout, for micro-batches of this many samples."""
        how = micro_batch, layout.recompute, layout.policy
        return self.layers(layout.tensor_ranks, layout.sequence_parallel, *how)

    def by_policy(self, layout: Layout) -> dict[RecomputationPolicy, Sequence[LayerProfile]]:
        """Return the profile of each layer on a rank of a layout under each policy."""
        slicing = layout.tensor_ranks, layout.sequence_parallel and layout.tensor_ranks > 1
        policies: Sequence[RecomputationPolicy] = ("none", *SELECTIVE, "full")
        return {policy: self._under(policy, slicing, layout.micro_batch) for policy in policies}

    def keeps(self, k: int) -> bool:
        """Whether nothing of a layer is recomputed in any layout."""
        return self._given[k] == "none"

    def _policies_of(self, policy: SelectivePolicy | None) -> tuple[RecomputationPolicy, ...]:
        """Return each layer's policy where layers are recomputed. policy: of all that may be, else the configuration's."""
        given = policy is None and self._has_policies
        return tuple(own if own == "none" or given else policy or "full" for own in self._given)

    def _under(self, policy: RecomputationPolicy, slicing: _Slicing, micro_batch: int) -> Sequence[LayerProfile]:
        """Return the profile of each layer under one policy."""
        if policy in SELECTIVE:
            return self._trace(slicing, micro_batch, policy)
        plain = self.layers(*slicing, micro_batch)
        if policy == "none":
            return plain
        key = slicing, micro_batch
        if key not in self._recomputed:
            known = {id(p): recomputed(p) for p in {id(p): p for p in plain}.values()}
            self._recomputed[key] = [known[id(p)] for p in plain]
        return self._recomputed[key]

    def stage_parameters(
        self,
        tensor_ranks: int,
        sequence_parallel: bool,
        bounds: Sequence[int],
        placement: Sequence[int],
        merged: bool = False,
    ) -> list[list[ParameterInfo]]:
        """Return each stage's trainable parameters, found once for all callers, who must not change them.

        merged: return one in place of all that have the same owners: enough for a rough prediction.
        """
        key = tensor_ranks, sequence_parallel, tuple(bounds), tuple(placement), merged
        if key not in self._parameters:
            layers = self.layers(tensor_ranks, sequence_parallel)
            stages = stage_parameters(self.specs, self._in_one(layers) if merged else layers, bounds, placement)
            self._parameters[key] = list(map(self._merged_by_owners, stages)) if merged else stages
        return self._parameters[key]

    def _in_one(self, layers: Sequence[LayerProfile]) -> list[LayerProfile]:
        """Return the layers with a single parameter each, but for those that ties may divide."""
        merged = {
            id(layer): replace(layer, parameters=(("", self._merge([p for _, p in layer.parameters])),))
            for layer in {id(layer): layer for layer in layers}.values()
            if layer.parameters
        }
        pairs = zip(self.specs, layers, strict=True)
        return [layer if isinstance(s, TiedLayerSpec) else merged.get(id(layer), layer) for s, layer in pairs]

    def _merged_by_owners(self, parameters: Sequence[ParameterInfo]) -> list[ParameterInfo]:
        groups = by_owners(parameters).items()
        return [ParameterInfo("", self._merge([info.parameter for info in infos]), owners) for owners, infos in groups]

    def _merge(self, parameters: Sequence[nn.Parameter]) -> nn.Parameter:
        """Return one parameter, without memory, in place of several; those of equal sizes are one object."""
        key = numel, dtype = sum(parameter.numel() for parameter in parameters), parameters[0].dtype
        if key not in self._merged:
            self._merged[key] = nn.Parameter(torch.empty(numel, dtype=dtype, device="meta"))
        return self._merged[key]

    def _trace(self, slicing: _Slicing, micro_batch: int, policy: SelectivePolicy | None) -> tuple[LayerProfile, ...]:
        return _at(micro_batch, partial(self._at_samples, slicing, policy))

    def _at_samples(self, slicing: _Slicing, policy: SelectivePolicy | None, samples: int) -> tuple[LayerProfile, ...]:
        key = slicing, policy, samples
        if key not in self._traced:
            process, number = self._elsewhere or (None, 0)
            found = None if process is None else process((number, key))
            if slicing not in self._slicings and found is None:
                self._slicings[slicing] = ModelTraces(self._traceable, *slicing)
            self._traced[key] = found or self._slicings[slicing].profiles(self.specs, policy, samples)
        return self._traced[key]


class _Traces:
    """Traces of the layers of several profiles, by (number of the profile, what its trace depends on)."""

    def __init__(self, profiles: Sequence[ModelProfile]):
        self._profiles = profiles

    def __call__(self, key: tuple[int, _Traced]) -> tuple[LayerProfile, ...]:
        return self._profiles[key[0]]._at_samples(*key[1])

    def following(self, key: tuple[int, _Traced]) -> list[tuple[int, _Traced]]:
        """Return the same of the other profiles, after layers of the first one that are recomputed in part."""
        number, traced = key
        return [(n, traced) for n in range(1, len(self._profiles)) if number == 0 and traced[1] is not None]

    def process(self, key: tuple[int, _Traced]) -> int:
        """Return which of two processes traces it: all of one number of tensor-parallel ranks in one, for they share losses."""
        return key[1][0][0].bit_length() % 2


def _at(micro_batch: int, traced: Callable[[int], tuple[LayerProfile, ...]]) -> tuple[LayerProfile, ...]:
    """Return the profiles at a number of samples, from those that are traced at a few."""
    for few in _FEW:
        if micro_batch <= max(few):
            break
        one, two = map(traced, few)
        steps = (micro_batch - few[0]) / (few[1] - few[0])
        pairs = {(id(a), id(b)): (a, b) for a, b in zip(one, two, strict=True)}  # equal layers once
        found = {key: extrapolated(a, b, steps) for key, (a, b) in pairs.items()}
        whole = tuple(p for a, b in zip(one, two, strict=True) if (p := found[id(a), id(b)]) is not None)
        if len(whole) == len(one):
            return whole
    return traced(micro_batch)


def frozen_infos(layers: Sequence[LayerProfile], owned: Iterable[int]) -> list[ParameterInfo]:
    """Return the frozen parameters of a stage, which has these layers."""
    return [ParameterInfo("", parameter, (0,), k) for k in owned for _, parameter in layers[k].frozen]


def stage_layers(bounds: Sequence[int], placement: Sequence[int], stage: int) -> list[int]:
    """Return the layers of a stage."""
    return [k for c, s in enumerate(placement) if s == stage for k in range(bounds[c], bounds[c + 1])]


def stage_parameters(
    specs: Sequence[Layer], layers: Sequence[LayerProfile], bounds: Sequence[int], placement: Sequence[int]
) -> list[list[ParameterInfo]]:
    """Return each stage's trainable parameters, as in PipelineModule.parameter_infos. placement: each chunk's stage."""
    chunk_of = np.repeat(np.arange(len(placement)), np.diff(bounds)).tolist()
    ties = TieIndex(specs, chunk_of.__getitem__)
    builders: list[set[int]] = [set() for _ in range(max(placement) + 1)]
    for k, builder in enumerate(ties.builder):
        builders[placement[chunk_of[k]]].add(builder)
    return [_in_order(ties, layers, sorted(own)) for own in builders]


def _in_order(ties: TieIndex, layers: Sequence[LayerProfile], builders: Sequence[int]) -> list[ParameterInfo]:
    """Order parameters by the layers that build them; in each layer, those that are tied by attribute come first."""
    found: dict[str, ParameterInfo] = {}
    for builder in builders:
        named = layers[builder].parameters
        tied = tuple(attribute + "." for attribute in ties.attributes(builder))
        if not tied:
            owners = ties.owners(builder, "")
            infos = [ParameterInfo(f"layers.{builder}.{name}", p, owners, builder) for name, p in named]
            found |= {info.name: info for info in infos}
        for name, parameter in sorted(named, key=lambda item: not f"{item[0]}.".startswith(tied)) if tied else ():
            origin, source = ties.origin(builder, name)
            path = f"layers.{origin}.{source}"
            found.setdefault(path, ParameterInfo(path, parameter, ties.owners(builder, name), origin))
    return list(found.values())


def layer_units(specs: Sequence[Layer], layers: Sequence[LayerProfile]) -> list[tuple[int, ...]]:
    """Return, for each layer, the units (see ParameterInfo) that its parameters belong to."""
    ties = TieIndex(specs, lambda layer: 0)
    names = [[name for name, _ in (*layer.parameters, *layer.frozen)] for layer in layers]
    return [tuple(dict.fromkeys(ties.origin(b, name)[0] for name in names[b])) for b in ties.builder]
