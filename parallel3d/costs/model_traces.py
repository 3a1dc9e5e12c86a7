"""Traces of a model's layers at one tensor-parallel degree; each distinct layer is traced once per number of samples."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from parallel3d.autograd.fp8 import Fp8
from parallel3d.autograd.recomputation import Checkpointer
from parallel3d.autograd.sink import GradientSink
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.structures import TensorTree
from parallel3d.config import ActivationCheckpointingConfig, Config, SelectivePolicy
from parallel3d.costs.counter import OperatorCounter
from parallel3d.costs.fakes import CudaFunctions, Fakes, MetaFakes
from parallel3d.costs.layer_costs import alike, attach_sink, bind_forward
from parallel3d.costs.layer_profile import LayerProfile
from parallel3d.costs.tracing import LayerTrace, TrainedLayer
from parallel3d.errors import PartitionError
from parallel3d.fake_device import standing_for
from parallel3d.optim.precision import Precision, make_precision
from parallel3d.specs import BuildContext, Layer, LayerSpec, LossFunction, TiedLayerSpec, layer_name
from parallel3d.tensor_parallel.fp8 import attach_fp8, fits_fp8, is_linear, patterns_of
from parallel3d.zero.fp8_weights import can_gather_in_fp8, is_in_fp8, let_gather_in_fp8, mark_weights
from parallel3d.zero.policy import ZeroPolicy, make_policy

# Advice of errors, for layers that communicate by themselves.
INSTEAD = "communicate by parallel3d.tensor_parallel alone"


@dataclass(frozen=True)
class TracedModel:
    """A model to trace, in whatever layers: those that are alike in several lists of layers are traced once.

    - loss_fn: as PipelineModule takes it.
    - sample: (inputs, labels) of one micro-batch.
    - device: type of the device on which it trains, "cpu" or "cuda".
    - inner: kinds of layers that are neither the first nor the last of a model: those that may compute in fp8.
    - distinct: layers that were traced, none like another; losses: traces of the loss by all that they depend on, which
      sequence parallelism is no part of.

    If torch.compile runs the layers, a loss with a method `in_one`, which returns the loss computed over all positions at once,
    is traced so, since the engine compiles it in that form.
    """

    loss_fn: LossFunction
    sample: tuple[Any, Any]
    config: Config
    device: str
    distinct: list[Layer] = field(default_factory=list)
    _kinds: dict[int, tuple[int, Layer]] = field(default_factory=dict)
    losses: dict[Any, LayerProfile] = field(default_factory=dict)
    inner: set[int] = field(default_factory=set)

    @cached_property
    def counter(self) -> OperatorCounter:
        """Counts operators and collectives of all traces."""
        compiled = self.config.compile.enabled
        return OperatorCounter(INSTEAD, compiled, compiled and self.config.cuda_graphs is True)

    def kind(self, layer: Layer) -> int:
        """Return the index of the distinct layer that costs the same as this one."""
        if id(layer) not in self._kinds:
            found = next((k for k, other in enumerate(self.distinct) if alike(layer, other)), len(self.distinct))
            self.distinct.extend([layer] if found == len(self.distinct) else [])
            self._kinds[id(layer)] = found, layer  # which keeps the id valid
        return self._kinds[id(layer)][0]

    @cached_property
    def precision(self) -> Precision:
        """Precision of training."""
        return make_precision(self.config)

    @cached_property
    def policy(self) -> ZeroPolicy:
        """Policy that decides the dtypes of gradients' accumulators."""
        return make_policy(self.config, [], torch.device("cpu"), self.precision.weights)


class ModelTraces:
    """Traces a model's layers on the first of `tensor_ranks` tensor-parallel ranks.

    On the meta device, which is faster, until a layer wants to know more of tensors than there is; then on fake tensors. The
    CPU's attention is traced on fake tensors alone, and so is autocast, which the meta device doesn't have.
    """

    def __init__(self, model: TracedModel, tensor_ranks: int, sequence_parallel: bool):
        self._model = model
        groups = ProcessGroups.imagined(tensor_ranks, model.counter.start_collective)
        independent = model.config.rng.layout_independent
        self._context = BuildContext(groups, torch.device("cpu"), sequence_parallel, independent)
        on_meta = model.device == "cuda" and model.precision.autocast is None
        self._fakes = (MetaFakes if on_meta else Fakes)(self._context, INSTEAD)
        given = model.config.fp8
        self._fp8, self._patterns = (Fp8(given) if given.enabled else None), patterns_of(given.filter)
        # Kind of layer, least_work of its backwards -> the layer as it is trained, and its tensors for its profile.
        self._modules: dict[tuple[int, int | None], tuple[TrainedLayer, dict[str, Any]]] = {}
        self._tables: dict[int, int] = {}
        self._known: dict[Any, tuple[LayerProfile, TensorTree]] = {}
        loss = model.loss_fn
        self._loss = loss.build(self._context) if isinstance(loss, LayerSpec) else loss
        in_one = getattr(self._loss, "in_one", None)
        if model.config.compile.enabled and in_one is not None:
            self._loss = in_one()

    def profiles(
        self, layers: Sequence[Layer], policy: SelectivePolicy | None, samples: int
    ) -> tuple[LayerProfile, ...]:
        """Return the profile of each layer. Raises PartitionError, which names the layer, for one that can't be traced.

        policy: that recomputes a part of each layer, as activation_checkpointing.policy; None if nothing is recomputed.
        """
        try:
            return self._profiles(layers, policy, samples)
        except PartitionError:
            if not isinstance(self._fakes, MetaFakes):
                raise
        self._fakes = Fakes(self._context, INSTEAD)
        for known in (self._modules, self._tables, self._known):
            known.clear()
        return self._profiles(layers, policy, samples)

    def _profiles(
        self, layers: Sequence[Layer], policy: SelectivePolicy | None, samples: int
    ) -> tuple[LayerProfile, ...]:
        with self._fakes.mode, self._fakes.device:
            inputs, labels = _resized(self._fakes.place(self._model.sample), samples)
            x = TensorTree.of(self._model.precision.cast(inputs))
        profiles = []
        self._model.inner.update(map(self._model.kind, layers[1:-1]))
        for k, layer in enumerate(layers):
            try:
                profile, x = self._profile(layer, x, policy)
            except PartitionError as error:
                raise PartitionError(f"layer {k} ({layer_name(layer)}): {error}") from error
            profiles.append(profile)
        if self._loss is not None and labels is not None:
            profiles[-1] = self._with_loss(profiles[-1], x, labels)
        return tuple(profiles)

    def _profile(self, layer: Layer, x: TensorTree, policy: SelectivePolicy | None) -> tuple[LayerProfile, TensorTree]:
        kind = self._model.kind(layer)
        tie = layer.key if isinstance(layer, TiedLayerSpec) else None
        key = (kind, x.key, tie, policy)
        if key not in self._known:
            if policy is not None:  # what a layer makes for all later micro-batches is part of its plain trace
                self._profile(layer, x, None)
            whole, split = (self._trace(kind, x, splits, policy) for splits in (False, True))
            tensors = self._modules[kind, 0][1]
            self._tables[kind] = max(self._tables.get(kind, 0), whole.tables, split.tables)
            made = _make_profile(layer_name(layer), whole, split, tie=tie, tables=self._tables[kind], **tensors)
            if isinstance(layer, TiedLayerSpec) and self._model.policy.fused_from is None:
                attributes = layer.tied_weight_attr
                tied = [p for n, p in made.parameters if any(n == a or n.startswith(a + ".") for a in attributes)]
                made = replace(made, tied_gradient=sum(parameter.nbytes for parameter in tied))
            self._known[key] = made, whole.returned
        return self._known[key]

    def _trace(self, kind: int, x: TensorTree, splits: bool, policy: SelectivePolicy | None) -> LayerTrace:
        precision, fakes = self._model.precision, self._fakes
        least_work = 0 if splits else self._model.policy.fused_from
        if (kind, least_work) in self._modules:
            return self._run(self._modules[kind, least_work][0], x, splits, policy)
        layer = self._model.distinct[kind]

        def traced(module: Any) -> LayerTrace:
            tensors = _tensors_of(module, precision.weights)
            with fakes.mode, fakes.device:
                accumulates = self._model.policy.accumulator_dtype
                trains = attach_sink(module, fakes.device, precision.weights, accumulates, least_work)
                if self._fp8 is not None and kind in self._model.inner and isinstance(module, nn.Module):
                    tensors["casts"] = self._use_fp8(module, trains[0])
                    for name, like in (*tensors["parameters"], *tensors["frozen"]):
                        let_gather_in_fp8(like, is_in_fp8(module.get_parameter(name)))
            trained = TrainedLayer(bind_forward(layer, module), precision, *trains)
            result = self._run(trained, x, splits, policy)
            self._modules[kind, least_work] = trained, tensors
            return result

        return fakes.first_that_works(layer, traced)

    def _use_fp8(self, module: nn.Module, sink: GradientSink) -> int:
        """Let the linears of an inner layer compute in fp8; return the bytes of their weights' casts, kept for a step."""
        assert self._fp8 is not None
        self._fp8.keep(self)
        linears = [m for name, m in module.named_modules() if is_linear(m) and fits_fp8(m) and not self._stays(name)]
        mark_weights(module, linears if can_gather_in_fp8(self._model.config) else [])
        nbytes = 0
        for linear in linears:
            attach_fp8(linear, self._fp8, sink)
            weight = linear.get_parameter("weight")
            self._fp8.layers[linear].cast_weight(weight, False)
            nbytes += 2 * weight.numel()
        return nbytes

    def _stays(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self._patterns)

    def _run(
        self, layer: TrainedLayer, x: TensorTree, splits: bool, policy: SelectivePolicy | None = None
    ) -> LayerTrace:
        if policy is not None:
            checkpointer = Checkpointer(ActivationCheckpointingConfig(policy=policy))
            layer = replace(layer, function=partial(checkpointer, layer.function))
        on_cuda = CudaFunctions() if self._model.device == "cuda" else nullcontext()
        # Tensor-parallel layers draw the seed of a rank's own random stream.
        with torch.random.fork_rng(devices=[]), self._fakes.mode, standing_for(self._model.device), on_cuda:
            return LayerTrace(layer, x, splits, self._model.counter)

    def _with_loss(self, last: LayerProfile, x: TensorTree, labels: Any) -> LayerProfile:
        """Return the last layer's profile with the loss added."""

        def loss(pair: Any) -> Any:
            assert self._loss is not None
            result = self._loss(*pair)
            return result[0] if isinstance(result, (tuple, list)) else result

        given = TensorTree.of((x.value(), labels))
        key = (self._context.groups.model.size, type(self._fakes), given.key)
        losses = self._model.losses
        if key not in losses:
            # It has no weights whose gradients could be split off.
            trace = self._run(TrainedLayer(loss, self._model.precision), given, splits=False)
            losses[key] = _make_profile("loss", trace, trace)
        own = losses[key]
        return replace(
            last,
            forward=last.forward + own.forward,
            input_gradient=own.input_gradient + last.input_gradient,
            backward=own.backward + last.backward,
            loss=own,
        )


def _make_profile(name: str, whole: LayerTrace, split: LayerTrace, **fields: Any) -> LayerProfile:
    return LayerProfile(
        name,
        split.forward,
        split.backward,
        split.weight,
        whole.backward + whole.weight,
        split.inputs,
        tuple(split.outputs),
        whole.held,
        split.held,
        early=frozenset(fields["parameters"][k][0] for k in split.early),
        **fields,
    )


def _tensors_of(module: Any, weights: torch.dtype | None) -> dict[str, Any]:
    """Return the parameters, frozen and buffers of a LayerProfile, from a module as built."""
    if not isinstance(module, nn.Module):
        return {}
    named: dict[bool, list[tuple[str, nn.Parameter]]] = {True: [], False: []}
    for name, parameter in module.named_parameters():
        # Without what a fake tensor has: its mode would be kept, and can't be sent to another process.
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        like = nn.Parameter(empty, parameter.requires_grad)
        vars(like).update((k, v) for k, v in vars(parameter).items() if k in ("slicing", "partial_over"))
        named[parameter.requires_grad].append((name, like))
    cast = [weights if weights is not None and b.is_floating_point() else b.dtype for b in module.buffers()]
    nbytes = sum(b.numel() * dtype.itemsize for b, dtype in zip(module.buffers(), cast, strict=True))
    return {"parameters": tuple(named[True]), "frozen": tuple(named[False]), "buffers": nbytes}


def rows_of(sample: tuple[Any, Any]) -> int:
    """Return the number of samples of a micro-batch: the rows of its first tensor."""
    return next((t.shape[0] for t in TensorTree.of(sample).tensors if t.dim()), 0)


def _resized(sample: tuple[Any, Any], samples: int) -> tuple[Any, Any]:
    """Return the micro-batch with `samples` samples: tensors with as many rows as the first one are resized."""
    template = TensorTree.of(sample)
    tensors, rows = template.tensors, rows_of(sample)
    resized = [t.new_empty((samples, *t.shape[1:])) if t.dim() and t.shape[0] == rows else t for t in tensors]
    pair: tuple[Any, Any] = template.with_tensors(resized).value()
    return pair
