"""A model's layers in one slicing, each distinct one traced once for a number of samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from parallel3d import rng
from parallel3d.autograd.sink import GradientSink
from parallel3d.autograd.split_backward import make_splittable
from parallel3d.comm.groups import ProcessGroups
from parallel3d.config import Config
from parallel3d.costs.cuda_functions import cuda_functions
from parallel3d.costs.fakes import Fakes, MetaFakes
from parallel3d.costs.layer_costs import alike, bound, made_ready
from parallel3d.costs.layer_profile import LayerProfile
from parallel3d.costs.tracing import LayerTrace, Template, Traced
from parallel3d.costs.watch import INSTEAD, Watch
from parallel3d.errors import PartitionError
from parallel3d.fake_device import standing_for
from parallel3d.models import CausalLMLoss
from parallel3d.optim.precision import Precision, make_precision
from parallel3d.specs import BuildContext, Layer, LayerSpec, TiedLayerSpec, layer_name
from parallel3d.zero.policy import ZeroPolicy, make_policy

LossFunction = Callable[[Any, Any], Any] | LayerSpec | None


@dataclass(frozen=True)
class Traceable:
    """A model to trace. layers, loss_fn: as PipelineModule takes them; sample: (inputs, labels) of one micro-batch; on_meta:
    whether on the meta device, not on fake tensors; fuses: as Watch's.
    """

    layers: Sequence[Layer]
    loss_fn: LossFunction
    sample: tuple[Any, Any]
    config: Config
    device: str
    fuses: bool

    @cached_property
    def kinds(self) -> list[int]:
        """Of each layer the first one that costs what it does."""
        first: list[int] = []
        kinds = []
        for k, layer in enumerate(self.layers):
            kind = next((j for j in first if alike(layer, self.layers[j])), k)
            if kind == k:
                first.append(k)
            kinds.append(kind)
        return kinds

    @cached_property
    def precision(self) -> Precision:
        """Of training."""
        return make_precision(self.config)

    @cached_property
    def accumulators(self) -> ZeroPolicy:
        """For the dtypes of gradients."""
        return make_policy(self.config, [], torch.device("cpu"), self.precision.weights)


@dataclass(frozen=True)
class _Parts:
    """A module's tensors as built."""

    parameters: tuple[tuple[str, nn.Parameter], ...]
    frozen: tuple[tuple[str, nn.Parameter], ...]
    buffers: int


class SlicedTraces:
    """Traces of a model's layers on the first of so many slices, by tensors on the meta device or by fake ones.

    losses: of traces of the loss, which sequence parallelism doesn't change; the Watch counts for all of them.
    """

    def __init__(
        self,
        model: Traceable,
        slices: int,
        sequence_parallel: bool,
        on_meta: bool,
        watch: Watch,
        losses: dict[Any, LayerProfile],
    ):
        self._model, self._watch, self._losses = model, watch, losses
        groups = ProcessGroups.imagined(slices, watch.note)
        independent = model.config.rng.layout_independent
        self._context = BuildContext(groups, torch.device("cpu"), sequence_parallel, independent)
        self._fakes = (MetaFakes if on_meta else Fakes)(self._context, INSTEAD)
        self._modules: dict[tuple[int, bool], tuple[LayerTrace, _Parts]] = {}
        self._tables: dict[int, int] = {}
        self._known: dict[Any, tuple[LayerProfile, Template]] = {}
        self._profiles: dict[int, tuple[LayerProfile, ...]] = {}
        loss = model.loss_fn
        self._loss = loss.build(self._context) if isinstance(loss, LayerSpec) else loss
        if model.fuses and isinstance(loss, CausalLMLoss):
            self._loss = loss.in_one()

    def profiles(self, samples: int) -> tuple[LayerProfile, ...]:
        """One a layer. Raises PartitionError, that names the layer, for one that can't be traced."""
        if samples not in self._profiles:
            self._profiles[samples] = self._trace_all(samples)
        return self._profiles[samples]

    def _trace_all(self, samples: int) -> tuple[LayerProfile, ...]:
        with self._fakes.mode, self._fakes.device:
            inputs, labels = _resized(self._fakes.place(self._model.sample), samples)
            x = Template.of(self._model.precision.cast(inputs))
        found = []
        for k in range(len(self._model.layers)):
            profile, x = self._profile(k, x)
            found.append(profile)
        if self._loss is not None and labels is not None:
            found[-1] = self._with_loss(found[-1], x, labels)
        return tuple(found)

    def _profile(self, k: int, x: Template) -> tuple[LayerProfile, Template]:
        layer, kind = self._model.layers[k], self._model.kinds[k]
        tie = layer.key if isinstance(layer, TiedLayerSpec) else None
        key = (kind, x.key, tie)
        if key not in self._known:
            try:
                (whole, returned), (split, _) = (self._trace(kind, x, splits) for splits in (False, True))
            except PartitionError as error:
                raise PartitionError(f"layer {k} ({layer_name(layer)}): {error}") from error
            _, parts = self._modules[kind, True]
            self._tables[kind] = max(self._tables.get(kind, 0), whole.tables, split.tables)
            made = _made(layer_name(layer), whole, split, parts, tie, self._tables[kind])
            if isinstance(layer, TiedLayerSpec) and self._model.precision.weights is None:
                made = replace(made, tied_gradient=_tied_bytes(layer, parts))
            self._known[key] = made, returned
        return self._known[key]

    def _trace(self, kind: int, x: Template, splits: bool) -> tuple[Traced, Template]:
        # Whole backwards of half-precision weights go past autograd too.
        splittable = splits or self._model.precision.weights is not None
        layer = self._model.layers[kind]
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
        # What a slice's own stream is seeded with is drawn, and such tensors' numbers can't be looked at.
        seeds = patch.object(rng, "_own_seed", lambda index: index)
        with self._fakes.mode, standing_for(self._model.device), functions, seeds:
            return trace.run(x, splits)

    def _ready(self, layer: Layer, module: Any, splittable: bool) -> tuple[LayerTrace, _Parts]:
        """A layer as it is trained: with gradients that a sink adds to accumulators."""
        precision, sink = self._model.precision, GradientSink()
        parts = _parts_of(module, precision.weights)
        with self._fakes.mode, self._fakes.device:
            parameters = [p for p in made_ready(module, self._fakes.device, precision.weights) if p.requires_grad]
            accumulators = self._attach(sink, parameters, parts)
        if splittable and isinstance(module, nn.Module):
            make_splittable(module, sink)
        function = bound(layer, module, None, None)
        return LayerTrace(function, parameters, sink, precision, self._watch, accumulators), parts

    def _attach(self, sink: GradientSink, parameters: Sequence[nn.Parameter], parts: _Parts) -> list[Tensor]:
        """The accumulators."""
        policy = self._model.accumulators
        found = []
        for parameter, (_, built) in zip(parameters, parts.parameters, strict=True):
            dtype = policy.accumulator_dtype(built.dtype)
            accumulator = torch.empty(parameter.shape, dtype=dtype)
            sink.attach(parameter, accumulator)
            found.append(accumulator)
        return found

    def _with_loss(self, last: LayerProfile, x: Template, labels: Any) -> LayerProfile:
        """The last layer's profile with the loss behind it."""

        def loss(pair: Any) -> Any:
            assert self._loss is not None
            found = self._loss(*pair)
            return found[0] if isinstance(found, (tuple, list)) else found

        trace = LayerTrace(loss, (), GradientSink(), self._model.precision, self._watch)
        given = Template.of((x.value(), labels))
        key = (self._context.groups.model.size, type(self._fakes), given.key)
        if key not in self._losses:
            found, _ = self._run(trace, given, splits=False)  # it has no weights whose gradients could be split off
            self._losses[key] = _made("loss", found, found, _Parts((), (), 0))
        own = self._losses[key]
        return replace(
            last,
            forward=last.forward + own.forward,
            input_gradient=own.input_gradient + last.input_gradient,
            backward=own.backward + last.backward,
            loss=own,
        )


def _tied_bytes(layer: TiedLayerSpec, parts: _Parts) -> int:
    tied = [p for n, p in parts.parameters for a in layer.tied_weight_attr if n == a or n.startswith(a + ".")]
    return sum(parameter.nbytes for parameter in tied)


def _made(
    name: str, whole: Traced, split: Traced, parts: _Parts, tie: str | None = None, tables: int = 0
) -> LayerProfile:
    return LayerProfile(
        name,
        split.forward,
        split.backward,
        split.weight,
        whole.backward + whole.weight,
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


def rows_of(sample: tuple[Any, Any]) -> int:
    """Samples of a micro-batch: rows of its first tensor."""
    return next((t.shape[0] for t in Template.of(sample).tensors if t.dim()), 0)


def _resized(sample: tuple[Any, Any], samples: int) -> tuple[Any, Any]:
    """A micro-batch of so many samples, of tensors with as many rows as the first one has, from one of any number."""
    template = Template.of(sample)
    tensors, rows = template.tensors, rows_of(sample)
    resized = [t.new_empty((samples, *t.shape[1:])) if t.dim() and t.shape[0] == rows else t for t in tensors]
    pair: tuple[Any, Any] = template.with_tensors(resized).value()
    return pair
