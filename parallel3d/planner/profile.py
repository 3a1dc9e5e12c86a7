"""What each layer of a model asks of a device and holds in its memory, found without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from parallel3d.comm.groups import ProcessGroups
from parallel3d.config import Config
from parallel3d.errors import PartitionError
from parallel3d.gradient_sink import GradientSink
from parallel3d.layer_choice import choice_rule
from parallel3d.models import CausalLMLoss
from parallel3d.pipe.costs import alike, bound, made_ready
from parallel3d.pipe.fakes import Fakes, MetaFakes
from parallel3d.pipe.specs import BuildContext, Layer, LayerSpec, TiedLayerSpec, layer_name
from parallel3d.planner.cuda_functions import cuda_functions
from parallel3d.planner.tracing import Boundary, LayerBytes, LayerTrace, Template, Traced
from parallel3d.planner.watch import INSTEAD, Watch
from parallel3d.planner.work import Work
from parallel3d.precision import make_precision
from parallel3d.split_backward import make_splittable
from parallel3d.standing import standing_for
from parallel3d.zero.policy import ZeroPolicy, make_policy

LossFunction = Callable[[Any, Any], Any] | LayerSpec | None
DeviceType = Literal["cpu", "cuda"]
# Numbers of more samples follow from those of these: with a single one, what is copied otherwise is but seen in another shape.
_FEW = (2, 3)


@dataclass(frozen=True)
class LayerProfile:
    """A layer at one number of samples, on the first of its slices, whose share is the largest.

    input_gradient and weight_gradient are what BACKWARD_INPUT and BACKWARD_WEIGHT do, together a BACKWARD; where it is
    recomputed, input_gradient begins with another forward. inputs: bytes of the memory of each tensor that comes in; whole,
    split: what it holds under schedules with whole backwards, and with split ones; parameters, frozen: by name, as built,
    without memory; early: the parameters whose gradients come with BACKWARD_INPUT, as norms' do; buffers: bytes, as they are
    cast; tables: bytes that its first forward makes for good, once for all alike; tie: key of a TiedLayerSpec; loss: the loss
    function behind the last layer, whose work counts in this one.
    """

    name: str
    forward: Work
    input_gradient: Work
    weight_gradient: Work
    inputs: tuple[int, ...]
    outputs: tuple[Boundary, ...]
    whole: LayerBytes
    split: LayerBytes
    parameters: tuple[tuple[str, nn.Parameter], ...] = ()
    frozen: tuple[tuple[str, nn.Parameter], ...] = ()
    early: frozenset[str] = frozenset()
    buffers: int = 0
    tables: int = 0
    tie: str | None = None
    recomputed: bool = False
    loss: LayerProfile | None = None

    @property
    def output_bytes(self) -> int:
        """Of the message to the next stage."""
        return sum(boundary.nbytes for boundary in self.outputs)

    @property
    def gradient_bytes(self) -> int:
        """Of the message back from the next stage."""
        return sum(boundary.nbytes for boundary in self.outputs if boundary.requires_grad)

    def held(self, splits: bool) -> LayerBytes:
        """By the kind of backward."""
        return self.split if splits else self.whole


class _Layout(NamedTuple):
    slices: int
    sequence_parallel: bool


class _Numbers(NamedTuple):
    """Of one layer and number of samples, by the kind of backward."""

    whole: Traced
    split: Traced


class ModelProfile:
    """Profiles of a model's layers for any slicing and micro-batch, each traced when it is first asked for.

    layers, loss_fn: as PipelineModule takes them; inputs, labels: of one micro-batch, whose samples lie along dim 0 of its
    tensors; config: with precision, compilation and which layers may be recomputed. device: on whose behalf, "cuda" or
    "cpu". Tensors are without memory, on the meta device or fake ones on the CPU, so that no device is needed; with "cuda"
    attention, dropout and this project's kernels are those of CUDA (cuda_functions.py, standing.py). compiled: torch.compile
    fuses element-wise work, see Watch; the configuration says by default.
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
        self.precision = make_precision(config)
        self._sample, self._loss_fn = (inputs, labels), loss_fn
        self._compiled = config.compile.enabled if compiled is None else compiled
        self._kinds = _kinds(self.specs)
        chosen = choice_rule(config.pipeline.checkpointable_layers, self.names, "checkpointable_layers")
        self._recomputes = [chosen(k, layer) for k, layer in enumerate(self.specs)]
        # Attention of the CPU's is found on fake tensors alone; the meta device has no autocast.
        self._on_meta = device == "cuda" and self.precision.autocast is None
        self._slicings: dict[_Layout, _Slicing] = {}
        self._profiles: dict[tuple[_Layout, int], tuple[LayerProfile, ...]] = {}

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
        inputs, labels = self._sample
        rows = next((t.shape[0] for t in Template.of(self._sample).tensors if t.dim()), 0)

        def nbytes(tensor: Tensor, cast: bool) -> int:
            weights = self.precision.weights if cast and self.precision.casts_inputs else None
            dtype = weights if weights is not None and tensor.is_floating_point() else tensor.dtype
            if self.device == "cpu" and dtype == tensor.dtype:
                return 0
            samples = micro_batch / rows if tensor.dim() and tensor.shape[0] == rows else 1
            return round(samples * tensor.numel()) * dtype.itemsize

        return (
            tuple(nbytes(t, True) for t in Template.of(inputs).tensors),
            tuple(nbytes(t, False) for t in Template.of(labels).tensors),
        )

    def layers(
        self, slices: int = 1, sequence_parallel: bool = False, micro_batch: int = 1, recompute: int = 0
    ) -> tuple[LayerProfile, ...]:
        """One a layer; equal layers share what they are made of. recompute: as activation_checkpoint_interval.

        Raises PartitionError, that names the layer and the remedy, for one that can't be traced.
        """
        layout = _Layout(slices, sequence_parallel and slices > 1)
        if (layout, micro_batch) not in self._profiles:
            self._profiles[layout, micro_batch] = self._make(layout, micro_batch)
        profiles = self._profiles[layout, micro_batch]
        if not recompute:
            return profiles
        known: dict[int, LayerProfile] = {}
        return tuple(
            known.setdefault(id(p), _recomputed(p)) if again else p
            for p, again in zip(profiles, self._recomputes, strict=True)
        )

    def _make(self, layout: _Layout, micro_batch: int) -> tuple[LayerProfile, ...]:
        if self._on_meta:
            try:
                return self._made(layout, micro_batch)
            except PartitionError:
                # A layer that wants devices, or values, other than of the meta device: fake ones know more.
                self._on_meta = False
                self._slicings.clear()
        return self._made(layout, micro_batch)

    def _made(self, layout: _Layout, micro_batch: int) -> tuple[LayerProfile, ...]:
        if layout not in self._slicings:
            self._slicings[layout] = _Slicing(self, layout)
        slicing = self._slicings[layout]
        if micro_batch <= max(_FEW):
            return slicing.profiles(micro_batch)
        few = [slicing.profiles(n) for n in _FEW]
        pairs = list(zip(*few, strict=True))
        known: dict[tuple[int, int], LayerProfile | None] = {}
        for one, two in pairs:
            if (id(one), id(two)) not in known:
                known[id(one), id(two)] = _extrapolated(one, two, micro_batch)
        found = [known[id(one), id(two)] for one, two in pairs]
        whole = tuple(profile for profile in found if profile is not None)
        return whole if len(whole) == len(found) else slicing.profiles(micro_batch)


def _kinds(layers: Sequence[Layer]) -> list[int]:
    """Of each layer the first one that costs what it does."""
    first: list[int] = []
    kinds = []
    for k, layer in enumerate(layers):
        kind = next((j for j in first if alike(layer, layers[j])), k)
        if kind == k:
            first.append(k)
        kinds.append(kind)
    return kinds


@dataclass(frozen=True)
class _Parts:
    """A module's tensors as built."""

    parameters: tuple[tuple[str, nn.Parameter], ...]
    frozen: tuple[tuple[str, nn.Parameter], ...]
    buffers: int


class _Slicing:
    """Traces of a model's layers in one slicing."""

    def __init__(self, model: ModelProfile, layout: _Layout):
        self._model = model
        self._watch = Watch(model._compiled)
        groups = ProcessGroups.imagined(layout.slices, self._watch.note)
        independent = model.config.rng.layout_independent
        self._context = BuildContext(groups, torch.device("cpu"), layout.sequence_parallel, independent)
        self._fakes = (MetaFakes if model._on_meta else Fakes)(self._context, INSTEAD)
        self._modules: dict[tuple[int, bool], tuple[LayerTrace, _Parts]] = {}
        self._tables: dict[int, int] = {}
        self._known: dict[Any, tuple[LayerProfile, Template]] = {}
        loss = model._loss_fn
        self._loss = loss.build(self._context) if isinstance(loss, LayerSpec) else loss
        if model._compiled and isinstance(loss, CausalLMLoss):
            self._loss = loss.in_one()

    def profiles(self, micro_batch: int) -> tuple[LayerProfile, ...]:
        """One a layer."""
        with self._fakes.mode, self._fakes.device:
            inputs, labels = _resized(self._fakes.place(self._model._sample), micro_batch)
            x = Template.of(self._model.precision.cast(inputs))
        found = []
        for k in range(len(self._model.specs)):
            profile, x = self._profile(k, x)
            found.append(profile)
        if self._loss is not None and labels is not None:
            found[-1] = self._with_loss(found[-1], x, labels)
        return tuple(found)

    def _profile(self, k: int, x: Template) -> tuple[LayerProfile, Template]:
        layer, kind = self._model.specs[k], self._model._kinds[k]
        tie = layer.key if isinstance(layer, TiedLayerSpec) else None
        key = (kind, x.key, tie)
        if key not in self._known:
            try:
                (whole, returned), (split, _) = (self._trace(kind, x, splits) for splits in (False, True))
            except PartitionError as error:
                raise PartitionError(f"layer {k} ({self._model.names[k]}): {error}") from error
            _, parts = self._modules[kind, True]
            self._tables[kind] = max(self._tables.get(kind, 0), whole.tables, split.tables)
            self._known[key] = _made(self._model.names[k], whole, split, parts, tie, self._tables[kind]), returned
        return self._known[key]

    def _trace(self, kind: int, x: Template, splits: bool) -> tuple[Traced, Template]:
        # Whole backwards of half-precision weights go past autograd too.
        splittable = splits or self._model.precision.weights is not None
        layer = self._model.specs[kind]
        if (kind, splittable) in self._modules:
            return self._run(self._modules[kind, splittable][0], x, splits)

        def traced(module: Any) -> tuple[Traced, Template]:
            trace, parts = self._ready(layer, module, splittable)
            found = self._run(trace, x, splits)
            self._modules[kind, splittable] = trace, parts
            return found

        found: tuple[Traced, Template] = self._fakes.first_that_works(layer, traced)
        return found

    def _run(self, trace: LayerTrace, x: Template, splits: bool) -> tuple[Traced, Template]:
        functions = cuda_functions() if self._model.device == "cuda" else nullcontext()
        with self._fakes.mode, standing_for(self._model.device), functions:
            return trace.run(x, splits)

    def _ready(self, layer: Layer, module: Any, splittable: bool) -> tuple[LayerTrace, _Parts]:
        """A layer as it is trained: with gradients that a sink adds to accumulators."""
        precision, sink = self._model.precision, GradientSink()
        parts = _parts_of(module, precision.weights)
        with self._fakes.mode, self._fakes.device:
            parameters = [p for p in made_ready(module, self._fakes.device, precision.weights) if p.requires_grad]
            self._attach(sink, parameters, parts)
        if splittable and isinstance(module, nn.Module):
            make_splittable(module, sink)
        return LayerTrace(bound(layer, module, None, None), parameters, sink, precision, self._watch), parts

    def _attach(self, sink: GradientSink, parameters: Sequence[nn.Parameter], parts: _Parts) -> None:
        policy = self._model.policy(0)
        for parameter, (_, built) in zip(parameters, parts.parameters, strict=True):
            dtype = policy.accumulator_dtype(built.dtype)
            accumulator = torch.empty(parameter.shape, dtype=dtype)
            # Where autograd itself can't add, as in GradientReducer.
            sink.attach(parameter, accumulator if dtype == parameter.dtype else partial(_to_add_to, accumulator))

    def _with_loss(self, last: LayerProfile, x: Template, labels: Any) -> LayerProfile:
        """The last layer's profile with the loss behind it."""

        def loss(pair: Any) -> Any:
            assert self._loss is not None
            found = self._loss(*pair)
            return found[0] if isinstance(found, (tuple, list)) else found

        sink, precision = GradientSink(), self._model.precision
        trace = LayerTrace(loss, (), sink, precision, self._watch)
        given = Template.of((x.value(), labels))
        found, _ = self._run(trace, given, splits=False)  # it has no weights whose gradients could be split off
        own = _made("loss", found, found, _Parts((), (), 0))
        return replace(
            last,
            forward=last.forward + own.forward,
            input_gradient=own.input_gradient + last.input_gradient,
            loss=own,
        )


def _to_add_to(accumulator: Tensor) -> tuple[Tensor, bool]:
    return accumulator, True


def _made(
    name: str, whole: Traced, split: Traced, parts: _Parts, tie: str | None = None, tables: int = 0
) -> LayerProfile:
    return LayerProfile(
        name,
        split.forward,
        split.backward,
        split.weight,
        split.inputs,
        split.outputs,
        whole.held,
        split.held,
        parts.parameters,
        parts.frozen,
        frozenset(parts.parameters[k][0] for k in split.early),
        parts.buffers,
        tables,
        tie,
    )


def _recomputed(profile: LayerProfile) -> LayerProfile:
    again = profile.forward
    if profile.loss is not None:  # is behind all regions, and runs once
        loss = profile.loss.forward
        again = replace(
            again,
            gemm_flops=again.gemm_flops - loss.gemm_flops,
            attention_flops=again.attention_flops - loss.attention_flops,
            moved=again.moved - loss.moved,
            kernels=again.kernels - loss.kernels,
            collectives=again.collectives[: len(again.collectives) - len(loss.collectives)],
        )
    return replace(profile, input_gradient=again + profile.input_gradient, recomputed=True)


def _parts_of(module: Any, weights: torch.dtype | None) -> _Parts:
    if not isinstance(module, nn.Module):
        return _Parts((), (), 0)

    def described(parameter: nn.Parameter) -> nn.Parameter:
        like = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        vars(like).update(vars(parameter))
        return like

    everything = [(name, described(parameter)) for name, parameter in module.named_parameters()]
    return _Parts(
        tuple((n, p) for n, p in everything if p.requires_grad),
        tuple((n, p) for n, p in everything if not p.requires_grad),
        sum(
            b.numel() * (weights if weights is not None and b.is_floating_point() else b.dtype).itemsize
            for b in module.buffers()
        ),
    )


def _resized(sample: tuple[Any, Any], samples: int) -> tuple[Any, Any]:
    """A micro-batch of so many samples, of tensors with as many rows as the first one has, from one of any number."""
    template = Template.of(sample)
    tensors = template.tensors
    rows = next((t.shape[0] for t in tensors if t.dim()), 0)
    resized = [t.new_empty((samples, *t.shape[1:])) if t.dim() and t.shape[0] == rows else t for t in tensors]
    pair: tuple[Any, Any] = template.with_tensors(resized).value()
    return pair


class _Bends(Exception):
    """Two profiles differ in more than in numbers that grow with the samples."""


def _extrapolated(one: LayerProfile, two: LayerProfile, samples: int) -> LayerProfile | None:
    """A layer at more samples, from those of _FEW; None where it changes by more than numbers."""

    def line(a: Any, b: Any) -> Any:
        if type(a) in (int, float) and type(b) in (int, float):
            return a + (b - a) * (samples - _FEW[0])
        if isinstance(a, LayerProfile):
            return moved(a, b)
        if isinstance(a, tuple) and len(a) == len(b):
            parts = [line(x, y) for x, y in zip(a, b, strict=True)]
            return type(a)(*parts) if hasattr(a, "_fields") else tuple(parts)
        if is_dataclass(a) and not isinstance(a, type):
            return replace(a, **{f.name: line(getattr(a, f.name), getattr(b, f.name)) for f in fields(a)})
        if a != b:
            raise _Bends
        return a

    def moved(a: LayerProfile, b: LayerProfile) -> LayerProfile:
        return replace(a, **{name: line(getattr(a, name), getattr(b, name)) for name in _GROW})

    try:
        return moved(one, two)
    except _Bends:
        return None


_GROW = ("forward", "input_gradient", "weight_gradient", "inputs", "outputs", "whole", "split", "loss")
