"""Profiles of a model's layers, work and memory, traced without a device, and the parameters of each stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from parallel3d.comm.structures import TensorTree
from parallel3d.config import SELECTIVE, Config, RecomputationPolicy, SelectivePolicy
from parallel3d.config.layout import LayerPolicy, Layout
from parallel3d.costs.layer_profile import LayerProfile, extrapolated, recomputed
from parallel3d.costs.model_traces import LossFunction, Slicing, TracedModel, rows_of
from parallel3d.parameters import ParameterInfo
from parallel3d.pipe.calls import Policies, policy_rule
from parallel3d.pipe.ties import TieIndex
from parallel3d.planner.predict.chunks import Chunks
from parallel3d.specs import Layer, layer_name
from parallel3d.zero.layout import by_owners
from parallel3d.zero.policy import ZeroPolicy, make_policy

DeviceType = Literal["cpu", "cuda"]
_PLAIN = Layout()
# Numbers of samples that are traced, from which others follow: the first pair for which that holds. With a
# single sample some copies are views.
_FEW = ((1, 2), (2, 3))


class ModelProfile:
    """Profiles of a model's layers for any slicing and micro-batch, each traced when it is first asked for.

    - layers, loss_fn: as PipelineModule takes them.
    - inputs, labels: of one micro-batch, whose samples lie along dim 0 of its tensors.
    - config: its precision, whether layers are compiled, and which may be recomputed.
    - traced: traces of the model divided into other layers; number: number of this division in it.
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
        traced: TracedModel | None = None,
    ):
        self.specs, self.names = list(layers), [layer_name(layer) for layer in layers]
        self.config, self.device = config, device
        self.traced = traced or TracedModel(loss_fn, (inputs, labels), config, device)
        self.number, self.precision = self.traced.add(self.specs), self.traced.precision
        given = config.activation_checkpointing.policy
        self._has_policies = isinstance(given, Mapping)
        policies: Policies = given if isinstance(given, Mapping) else "full"
        rule = policy_rule(config.pipeline.checkpointable_layers, policies, self.names)
        self._given = [rule(k, layer) for k, layer in enumerate(self.specs)]
        self._in_other_layers: dict[tuple[int, ...], ModelProfile] = {}
        self._profiles: dict[tuple[Slicing, int, RecomputationPolicy], tuple[LayerProfile, ...]] = {}
        self._mixed: dict[tuple[Slicing, int, LayerPolicy | None], tuple[LayerProfile, ...]] = {}
        self._parameters: dict[object, list[list[ParameterInfo]]] = {}
        self._policies: dict[tuple[int, int], ZeroPolicy] = {}

    def of_layers(self, layers: Sequence[Layer]) -> ModelProfile:
        """Return the profile of the same model in other layers; layers that are in both lists are traced once."""
        traced, key = self.traced, tuple(map(id, layers))  # the profile keeps the layers
        if key not in self._in_other_layers:
            other = ModelProfile(layers, *traced.sample, traced.loss_fn, self.config, self.device, traced)
            self._in_other_layers[key] = other
        return self._in_other_layers[key].with_zero(self.config)

    def with_zero(self, config: Config) -> ModelProfile:
        """Return the profile, with the same traces, under a configuration that differs only in zero_optimization."""
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
        inputs, labels = self.traced.sample
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

    def layers(self, layout: Layout = _PLAIN, micro_batch: int | None = None) -> tuple[LayerProfile, ...]:
        """Return the profile of each layer on a rank of a layout; equal layers share theirs.

        If the layout has no policy, recomputed layers have the configuration's policies, if it gives them by layer.
        micro_batch: samples of a micro-batch, by default those of the layout.

        Raises PartitionError, which names the layer and the remedy, for one that can't be traced.
        """
        slicing, samples, policy = _slicing_of(layout), micro_batch or layout.micro_batch, layout.policy
        if not layout.recompute:
            return self._under("none", slicing, samples)
        assert policy != "auto", "policies are chosen before layers have a profile"
        key = slicing, samples, policy
        if key not in self._mixed:
            own = policy if isinstance(policy, tuple) else self._policies_of(policy)
            found = {p: self._under(p, slicing, samples) for p in dict.fromkeys(own)}
            self._mixed[key] = tuple(found[p][k] for k, p in enumerate(own))
        return self._mixed[key]

    def by_policy(self, layout: Layout) -> dict[RecomputationPolicy, Sequence[LayerProfile]]:
        """Return the profile of each layer on a rank of a layout under each policy."""
        policies: Sequence[RecomputationPolicy] = ("none", *SELECTIVE, "full")
        return {policy: self._under(policy, _slicing_of(layout), layout.micro_batch) for policy in policies}

    def keeps(self, k: int) -> bool:
        """Whether nothing of a layer is recomputed in any layout."""
        return self._given[k] == "none"

    def _policies_of(self, policy: SelectivePolicy | None) -> tuple[RecomputationPolicy, ...]:
        """Return each layer's policy where layers are recomputed. policy: of all that may be, else the configuration's."""
        given = policy is None and self._has_policies
        return tuple(own if own == "none" or given else policy or "full" for own in self._given)

    def _under(self, policy: RecomputationPolicy, slicing: Slicing, samples: int) -> tuple[LayerProfile, ...]:
        """Return the profile of each layer under one policy."""
        key = slicing, samples, policy
        if key not in self._profiles:
            if policy == "full":
                plain = self._under("none", slicing, samples)
                known = {id(p): recomputed(p) for p in {id(p): p for p in plain}.values()}
                self._profiles[key] = tuple(known[id(p)] for p in plain)
            else:
                part = policy if policy in SELECTIVE else None
                self._profiles[key] = _at(samples, partial(self.traced.profiles, self.number, slicing, part))
        return self._profiles[key]

    def stage_parameters(self, chunks: Chunks, merged: bool = False) -> list[list[ParameterInfo]]:
        """Return each stage's trainable parameters, found once for all callers, who must not change them.

        merged: return one in place of all that have the same owners: enough for a rough prediction.
        """
        key = _slicing_of(chunks.layout), chunks.bounds, chunks.placement, merged
        if key not in self._parameters:
            # As in PipelineModule.parameter_infos.
            chunk_of = [chunk for chunk in range(len(chunks.placement)) for _ in chunks.span(chunk)]
            ties, layers = TieIndex(self.specs, chunk_of.__getitem__), self._under("none", key[0], 1)
            builders = ({ties.builder[k] for k in chunks.layers_on(s)} for s in range(max(chunks.placement) + 1))
            stages = [_in_order(ties, layers, sorted(own)) for own in builders]
            self._parameters[key] = list(map(_merged_by_owners, stages)) if merged else stages
        return self._parameters[key]


def _merged_by_owners(parameters: Sequence[ParameterInfo]) -> list[ParameterInfo]:
    """Return one parameter, without memory, in place of all that have the same owners."""
    merged = []
    for owners, infos in by_owners(parameters).items():
        numel, dtype = sum(info.parameter.numel() for info in infos), infos[0].parameter.dtype
        merged.append(ParameterInfo("", nn.Parameter(torch.empty(numel, dtype=dtype, device="meta")), owners))
    return merged


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


def _slicing_of(layout: Layout) -> Slicing:
    return layout.tensor_ranks, layout.sequence_parallel and layout.tensor_ranks > 1


def frozen_infos(layers: Sequence[LayerProfile], owned: Iterable[int]) -> list[ParameterInfo]:
    """Return the frozen parameters of a stage, which has these layers."""
    return [ParameterInfo("", parameter, (0,), k) for k in owned for _, parameter in layers[k].frozen]


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
