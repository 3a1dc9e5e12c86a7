"""Traces of a model's layers at one tensor-parallel degree; each distinct layer is traced once per number of samples."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any
from weakref import proxy

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
from parallel3d.costs.forked import ForkedCalls
from parallel3d.costs.layer_profile import LayerProfile
from parallel3d.costs.tracing import LayerTrace
from parallel3d.costs.trained_layer import Sample, TrainedLayer, alike
from parallel3d.errors import PartitionError
from parallel3d.fake_device import standing_for
from parallel3d.optim.precision import Precision, make_precision
from parallel3d.specs import BuildContext, Layer, LayerSpec, LossFunction, TiedLayerSpec, layer_name
from parallel3d.tensor_parallel.fp8 import attach_fp8, fits_fp8, is_linear, patterns_of
from parallel3d.zero.fp8_weights import can_gather_in_fp8, is_in_fp8, let_gather_in_fp8, mark_weights
from parallel3d.zero.policy import ZeroPolicy, make_policy

Slicing = tuple[int, bool]  # tensor-parallel ranks, and whether sequences are split among them
# What a trace depends on: number of the list of layers, slicing, policy that recomputes a part of each layer, and samples.
TraceKey = tuple[int, Slicing, SelectivePolicy | None, int]


@dataclass
class TracedModel:
    """A model to trace, divided into layers in one or several ways. Layers that are alike are traced once.

    - loss_fn: as PipelineModule takes it.
    - sample: (inputs, labels) of one micro-batch.
    - device: type of the device on which it trains, "cpu" or "cuda".
    - instead: advice of errors, for layers that can't be traced.
    - inner: kinds of layers that are neither the first nor the last of a model: those that may compute in fp8.
    - distinct: layers that were traced, none like another; losses: traces of the loss, by all that they depend on (not on
      sequence parallelism).

    If torch.compile runs the layers, a loss with a method `in_one`, which returns the loss computed over all positions at once,
    is traced so, since the engine compiles it in that form.
    """

    loss_fn: LossFunction
    sample: tuple[Any, Any]
    config: Config
    device: str
    instead: str = "communicate by parallel3d.tensor_parallel alone"
    distinct: list[Layer] = field(default_factory=list)
    _kinds: dict[int, tuple[int, Layer]] = field(default_factory=dict)
    losses: dict[Any, LayerProfile] = field(default_factory=dict)
    inner: set[int] = field(default_factory=set)
    _lists: list[Sequence[Layer]] = field(default_factory=list)
    _slicings: dict[Slicing, ModelTraces] = field(default_factory=dict)
    _profiles: dict[TraceKey, tuple[LayerProfile, ...]] = field(default_factory=dict)
    _elsewhere: ForkedCalls | None = None
    _num_sent: int = 0  # lists that the other processes have

    def add(self, layers: Sequence[Layer]) -> int:
        """Return the number of a further list of layers."""
        self._lists.append(layers)
        return len(self._lists) - 1

    def profiles(self, *key: *TraceKey) -> tuple[LayerProfile, ...]:
        """Return the profile of each layer. Raises PartitionError, which names the layer, for one that can't be traced."""
        if key not in self._profiles:
            found = self._elsewhere(key) if self._elsewhere is not None and key[0] < self._num_sent else None
            self._profiles[key] = found or self(key)
        return self._profiles[key]

    def trace_in(self, process: ForkedCalls, ahead: Sequence[TraceKey]) -> None:
        """Trace in other processes from now on, if layers can be sent there, and `ahead` before these are needed.

        Nothing may have been traced before: what a module makes for all later micro-batches is part of its first trace.
        """
        if process.begin(self, ahead):
            self._elsewhere, self._num_sent = process, len(self._lists)

    def __call__(self, key: TraceKey) -> tuple[LayerProfile, ...]:
        """Trace, for the first time."""
        number, slicing, policy, samples = key
        if slicing not in self._slicings:
            weak: Any = proxy(self)  # what was traced is freed with this object, not when garbage is collected
            self._slicings[slicing] = ModelTraces(weak, *slicing)
        return self._slicings[slicing].profiles(self._lists[number], policy, samples)

    def following(self, key: TraceKey) -> list[TraceKey]:
        """Return the corresponding keys of the other lists, if `key` is of the first list with partial recomputation."""
        return [(n, *key[1:]) for n in range(1, len(self._lists)) if key[0] == 0 and key[2] is not None]

    def process(self, key: TraceKey) -> int:
        """Return which of two processes traces a key: one process for each tensor-parallel degree, whose keys share losses."""
        return key[1][0].bit_length() % 2

    @cached_property
    def counter(self) -> OperatorCounter:
        """Counter of the operators and collectives of all traces."""
        compiled = self.config.compile.enabled
        return OperatorCounter(self.instead, compiled, compiled and self.config.cuda_graphs is True)

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

    Layers are traced on the meta device, which is faster, until one needs more than meta tensors have; then on fake tensors.
    The CPU's attention is traced only on fake tensors, and so is autocast, which the meta device doesn't have.
    """

    def __init__(self, model: TracedModel, tensor_ranks: int, sequence_parallel: bool):
        self._model = model
        groups = ProcessGroups.imagined(tensor_ranks, model.counter.start_collective)
        independent = model.config.rng.layout_independent
        self._context = BuildContext(groups, torch.device("cpu"), sequence_parallel, independent)
        on_meta = model.device == "cuda" and model.precision.autocast is None
        self._fakes = (MetaFakes if on_meta else Fakes)(self._context, model.instead)
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
        """Return the profile of each layer, see TracedModel.

        policy: activation_checkpointing.policy, if it recomputes a part of each layer; None if nothing is recomputed.
        """
        try:
            return self._profiles(layers, policy, samples)
        except PartitionError:
            if not isinstance(self._fakes, MetaFakes):
                raise
        self._fakes = Fakes(self._context, self._model.instead)
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
                trained = TrainedLayer.of(layer, module, fakes.device, precision, accumulates, least_work)
                if self._fp8 is not None and kind in self._model.inner and isinstance(module, nn.Module):
                    tensors["casts"] = self._use_fp8(module, trained.sink)
                    for name, like in (*tensors["parameters"], *tensors["frozen"]):
                        let_gather_in_fp8(like, is_in_fp8(module.get_parameter(name)))
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


def trace_layers(
    layers: Sequence[Layer], sample: Sample, config: Config, context: BuildContext, instead: str
) -> tuple[LayerProfile, ...]:
    """Return the profiles of the layers of a rank, nothing recomputed. instead: see TracedModel.

    Raises PartitionError, which names the layer, for one that can't be traced.
    """
    model = TracedModel(sample.loss_fn, (sample.inputs, sample.labels), config, context.device.type, instead)
    slicing = context.groups.model.size, context.sequence_parallel
    return model.profiles(model.add(layers), slicing, None, rows_of(model.sample))


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
