"""Layers that are described first and built later, by the rank that holds them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallel3d.comm.groups import ProcessGroups
from parallel3d.errors import PartitionError


@dataclass(frozen=True)
class BuildContext:
    """What a layer may want to know of where it is built; passed as `context=` to classes that declare it.

    groups: `groups.model` are the ranks over which it may slice itself; sequence_parallel: whether what lies between sliced
    layers is shared along the sequence; layout_independent: whether what a slice draws is part of what the whole would draw.
    """

    groups: ProcessGroups
    device: torch.device
    sequence_parallel: bool = False
    layout_independent: bool = False


class LayerSpec:
    """A layer to be built as typename(*module_args, **module_kwargs), on the ranks that hold it.

    Raises PartitionError when typename is not an nn.Module class.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any):
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise PartitionError(f"LayerSpec needs a class derived from torch.nn.Module, not {typename!r}")
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def __repr__(self) -> str:
        return f"LayerSpec({self.typename.__name__})"

    def build(self, context: BuildContext | None = None) -> nn.Module:
        """The layer, with fresh weights."""
        extra = {"context": context} if context is not None and self._wants_context() else {}
        return self.typename(*self.module_args, **self.module_kwargs, **extra)

    def _wants_context(self) -> bool:
        """Whether the constructor has a `context` that neither this spec's own arguments fill nor a default of its own."""
        signature = inspect.signature(self.typename)
        declared = signature.parameters.get("context")
        if declared is None or declared.default not in (inspect.Parameter.empty, None):
            return False  # with another default, as in context=1024, it is the layer's own affair
        try:
            return "context" not in signature.bind_partial(*self.module_args, **self.module_kwargs).arguments
        except TypeError:
            return False  # wrong arguments: the constructor's own error says it best

    def builds_like(self, other: LayerSpec) -> bool:
        """Whether both build the same layer, so that one module can serve both places."""
        return (
            self.typename is other.typename
            and _same(self.module_args, other.module_args)
            and _same(self.module_kwargs, other.module_kwargs)
        )

    def costs_like(self, other: LayerSpec) -> bool:
        """Whether both cost the same on the same inputs: they build the same, or their class's `cost_key` says so.

        cost_key(*module_args, **module_kwargs): a static method of a class whose arguments don't all matter for that, as the
        place in the model.
        """
        key = getattr(self.typename, "cost_key", None)
        if key is None or self.typename is not other.typename:
            return self.builds_like(other)
        return _same(
            key(*self.module_args, **self.module_kwargs),
            key(*other.module_args, **other.module_kwargs),
        )


def _same(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except (RuntimeError, ValueError):
        # Tensors and arrays among the arguments have no single truth value: only the very same objects are the same.
        return a is b


class TiedLayerSpec(LayerSpec):
    """A layer that shares weights with every other of the same key, on whatever stages they lie.

    Specs that build the same layer share the whole module; of different ones, the parameters that `tied_weight_attr`
    names are shared. forward_fn(module, x) replaces module(x), as for logits from an embedding's weight.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ):
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = (tied_weight_attr,) if isinstance(tied_weight_attr, str) else tuple(tied_weight_attr)

    def __repr__(self) -> str:
        return f"TiedLayerSpec({self.key!r}, {self.typename.__name__})"


Layer = LayerSpec | nn.Module | Callable[[Any], Any]


def layer_name(layer: Layer) -> str:
    """The class or function name, as partition_method 'type:REGEX' sees it."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", type(layer).__name__)


def check_layers(layers: Sequence[Layer]) -> None:
    """Raise PartitionError unless every entry is something that can be a layer."""
    if not layers:
        raise PartitionError("PipelineModule got an empty list of layers; give it at least one")
    for k, layer in enumerate(layers):
        if isinstance(layer, type):
            raise PartitionError(f"layer {k} is the class {layer.__name__}; write LayerSpec({layer.__name__}, ...)")
        if not isinstance(layer, LayerSpec) and not callable(layer):
            raise PartitionError(f"layer {k} is {layer!r}; give a LayerSpec, a module or a function of one argument")


def blueprint(layer: Layer, context: BuildContext) -> nn.Module:
    """A layer to look at, built without memory where its constructor allows that; an empty module for a function."""
    if not isinstance(layer, LayerSpec):
        return layer if isinstance(layer, nn.Module) else nn.Module()
    try:
        with torch.device("meta"):
            return layer.build(context)
    except (RuntimeError, TypeError):
        # A constructor that looks at its weights' values (.item(), .numpy()) can't run on meta tensors.
        return layer.build(context)
