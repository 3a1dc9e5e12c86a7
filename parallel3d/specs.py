"""Layer specs: descriptions of layers, which are built later by the rank that holds them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from parallel3d.comm.groups import ProcessGroups
from parallel3d.errors import Parallel3DError, PartitionError, execution_error, first_line_of


@dataclass(frozen=True)
class BuildContext:
    """Process groups, device and options of the place where a layer is built; passed as `context=` to classes that declare it.

    - groups: `groups.model` is the tensor-parallel group, over which a layer may shard itself.
    - sequence_parallel: whether activations between tensor-parallel layers are sharded along the sequence.
    - layout_independent: whether a rank's random numbers are its part of those that the whole layer would draw.
    - reads_later: whether weights in a file may stay there for now, because the rank will keep only shards of them.
    """

    groups: ProcessGroups
    device: torch.device
    sequence_parallel: bool = False
    layout_independent: bool = False
    reads_later: bool = False


class LayerSpec:
    """Layer to be built as typename(*module_args, **module_kwargs), on the ranks that hold it.

    Raises PartitionError when typename is not an nn.Module class.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any):
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            remedy = "and after it the arguments of its constructor"
            if isinstance(typename, nn.Module):
                remedy += (
                    f", LayerSpec({type(typename).__name__}, ...); or put the module itself into the list of layers"
                )
            raise PartitionError(
                f"LayerSpec needs a class derived from torch.nn.Module, not {typename!r}; give the class, {remedy}"
            )
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def __repr__(self) -> str:
        return f"LayerSpec({self.typename.__name__})"

    def build(self, context: BuildContext | None = None) -> nn.Module:
        """Build the layer, with new weights."""
        extra = {"context": context} if context is not None and self._wants_context() else {}
        return self.typename(*self.module_args, **self.module_kwargs, **extra)

    def map_arguments(self, function: Callable[[Any], Any]) -> LayerSpec:
        """Return a spec of the same layer with function(argument) in place of each argument."""
        spec = copy.copy(self)
        spec.module_args = tuple(map(function, self.module_args))
        spec.module_kwargs = {key: function(value) for key, value in self.module_kwargs.items()}
        return spec

    def _wants_context(self) -> bool:
        """Return whether the constructor has a `context` parameter to which neither this spec nor a default gives a value."""
        signature = inspect.signature(self.typename)
        declared = signature.parameters.get("context")
        if declared is None or declared.default not in (inspect.Parameter.empty, None):
            return False  # with another default, as in context=1024, it means something else
        try:
            return "context" not in signature.bind_partial(*self.module_args, **self.module_kwargs).arguments
        except TypeError:
            return False  # wrong arguments: the constructor raises the clearer error

    def builds_like(self, other: LayerSpec) -> bool:
        """Return whether both build the same layer, so that one module can serve for both."""
        return (
            self.typename is other.typename
            and _same(self.module_args, other.module_args)
            and _same(self.module_kwargs, other.module_kwargs)
        )

    def costs_like(self, other: LayerSpec) -> bool:
        """Return whether both cost the same on the same inputs.

        They do if they build the same layer, or have equal cost keys: a class some of whose arguments don't change the cost,
        such as the layer's index, has a static method cost_key(*module_args, **module_kwargs).
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
        # Comparing tensors or arrays gives no single truth value: they count as equal only if they are the same object.
        return a is b


class TiedLayerSpec(LayerSpec):
    """Layer that shares weights with all others of the same key, on any stage.

    Specs that build the same layer share the whole module. Specs that build different layers share the parameters that
    `tied_weight_attr` names. forward_fn(module, x) replaces module(x), as to compute logits with an embedding's weight.
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


def place_of(k: int, layer: Layer, error: Exception) -> str:
    """Return the name of layer k, in which an exception arose; with the rule that it breaks if it takes several arguments."""
    several = isinstance(error, TypeError) and "required positional argument" in str(error)
    rule = (
        ": a layer takes one argument, the output of the layer before it; a tuple may hold several" if several else ""
    )
    return f"layer {k} ({layer_name(layer)}){rule}"


Layer = LayerSpec | nn.Module | Callable[[Any], Any]
# Function of a model's outputs and labels; None if the last layer returns the loss.
LossFunction = Callable[[Any, Any], Any] | LayerSpec | None


def layer_name(layer: Layer) -> str:
    """Return the class or function name, which partition_method 'type:REGEX' matches."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", type(layer).__name__)


def function_of(layer: Layer, module: Any) -> Callable[[Any], Any]:
    """Return the function that runs a layer, built as `module`: for a function None or itself."""
    if isinstance(layer, TiedLayerSpec) and layer.forward_fn is not None:
        return partial(layer.forward_fn, module)
    function: Any = layer if module is None else module
    return function


def check_layers(layers: Sequence[Layer], loss_fn: LossFunction = None) -> None:
    """Raise PartitionError unless the list has an entry, every entry can be a layer, and loss_fn, if given, be called."""
    if isinstance(loss_fn, type) or not (loss_fn is None or isinstance(loss_fn, LayerSpec) or callable(loss_fn)):
        shown = f"the class {loss_fn.__name__}" if isinstance(loss_fn, type) else repr(loss_fn)
        raise PartitionError(f"loss_fn is {shown}; give a function of (outputs, labels), such as torch.nn.MSELoss()")
    if not layers:
        raise PartitionError("PipelineModule got an empty list of layers; give it at least one")
    for k, layer in enumerate(layers):
        if isinstance(layer, type):
            raise PartitionError(f"layer {k} is the class {layer.__name__}; write LayerSpec({layer.__name__}, ...)")
        if not isinstance(layer, LayerSpec) and not callable(layer):
            raise PartitionError(f"layer {k} is {layer!r}; give a LayerSpec, a module or a function of one argument")


def blueprint(layer: Layer, context: BuildContext, k: int | None = None) -> nn.Module:
    """Build a layer to inspect it, on the meta device where its constructor allows that; an empty module for a function.

    An exception of its constructor becomes an ExecutionError that names the layer, k.
    """
    if not isinstance(layer, LayerSpec):
        return layer if isinstance(layer, nn.Module) else nn.Module()
    with suppress(RuntimeError, TypeError), torch.device("meta"):
        return layer.build(context)
    try:
        # A constructor that reads its weights' values (.item(), .numpy()) can't run on meta tensors.
        return layer.build(context)
    except Parallel3DError:
        raise
    except Exception as error:
        place = repr(layer) if k is None else f"layer {k}, {layer!r},"
        raise execution_error(f"{place} can't be built: {first_line_of(error)}", error) from error
