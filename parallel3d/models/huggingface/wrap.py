"""Hugging Face models that the native decoder doesn't know: their own layers, split by their pipeline and tensor plans.

What a model computes around its layers (masks, rotary embeddings, scaled embeddings, capped logits) remains its own code:
its forward runs once before the layers, with recorders in their place, and once after them, with their result.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from parallel3d.checkpoint.export import Stored, all_of
from parallel3d.errors import ConfigError, DataError
from parallel3d.models.huggingface.adapters import unwrapped
from parallel3d.models.huggingface.tp_plan import TensorPlan
from parallel3d.models.sliced import SlicedLogits
from parallel3d.parameters import whole_shape
from parallel3d.specs import BuildContext, LayerSpec, TiedLayerSpec
from parallel3d.tensor_parallel.linear import ColumnParallelLinear


@dataclass(frozen=True)
class _Shared:
    """Stands for a tensor in the arguments of a layer: its index among the tensors that all layers share."""

    index: int


@dataclass(frozen=True)
class _Past:
    """Stands for the model's keys and values in the arguments of a layer, which keeps its own."""


@dataclass(frozen=True, eq=False)
class Origin:
    """The model that parts are wrapped from: its config and, where it has adapters, its PeftModel without weights."""

    config: Any
    peft: Any = None


class WrappedPart(nn.Module):
    """A part of a wrapped model. Its parameters are the model's; their names there are `prefix` and the name in the part."""

    def __init__(self, origin: Origin, prefix: str):
        super().__init__()
        self.origin, self._prefix = origin, prefix
        self._past: Any = None

    def stored(self) -> dict[str, Stored]:
        """Return how each parameter is stored: under its own name in the model."""
        return {
            name: all_of(self.name_in_model(name), *whole_shape(parameter))
            for name, parameter in self.named_parameters()
        }

    def name_in_model(self, name: str) -> str:
        """Return the model's name of a parameter of this part."""
        return self._prefix + name.partition(".")[2]

    def config_json(self) -> dict[str, Any]:
        """Return the model's config.json. Raises ConfigError with adapters, for whose names no architecture has a place."""
        if self.origin.peft is not None:
            raise ConfigError(
                "a model with adapters has no config.json of its own; use save_hf(..., merge_adapters=True)"
            )
        return dict(self.origin.config.to_dict())

    @property
    def max_positions(self) -> int | None:
        """Number of positions that the model is made for, if its config says so."""
        found: int | None = getattr(self.origin.config, "max_position_embeddings", None)
        return found

    def keep_past(self, length: int | None) -> None:
        """Keep keys and values from the next call on, of any number of positions; None: drop them, and keep no more."""
        from transformers import DynamicCache

        self._past = None if length is None else DynamicCache(config=self.origin.config)


class _Recorder(nn.Module):
    """Replacement of a layer that records its arguments and returns the hidden states."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        # A model may ask its layers what kind of attention each has.
        for name, value in vars(layer).items():
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)
        self.call: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.call = (args, kwargs)
        return hidden_states


class _Output:
    """Output of a base model. All fields but the last hidden state are None: their names depend on transformers' version."""

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, k: int) -> Tensor:
        return (self.last_hidden_state,)[k]


class _Result(nn.Module):
    """Replacement of the base model that returns the hidden states it was given last."""

    hidden: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> _Output:
        hidden, self.hidden = self.hidden, None
        assert hidden is not None
        return _Output(hidden)


class Entry(WrappedPart):
    """Token ids [batch, seq], or a dict of the base model's arguments -> what its first layer is called with, and the others.

    Between layers travels a dict: hidden [batch, seq, hidden], the tensors that layers share, and each layer's arguments.
    """

    def __init__(
        self,
        origin: Origin,
        prefix: str,
        base: nn.Module,
        layers: str,
        after: Sequence[str],
        plan: TensorPlan,
        context: BuildContext | None = None,
    ):
        super().__init__(origin, prefix)
        before = _with_modules(base, {name: nn.Identity() for name in (layers, *after)})
        self._recorders = [_Recorder(layer) for layer in base.get_submodule(layers).children()]
        self.model = _with_modules(plan.around(before, prefix, context), {layers: nn.ModuleList(self._recorders)})

    def forward(self, inputs: Tensor | Mapping[str, Any]) -> dict[str, Any]:
        """Run the model up to its layers. Raises DataError for inputs that are neither token ids nor a dict."""
        if not isinstance(inputs, (Tensor, Mapping)):
            raise DataError(f"the inputs of a model are token ids or a dict, not {type(inputs).__name__}")
        given = {"input_ids": inputs} if isinstance(inputs, Tensor) else dict(inputs)
        if self._past is not None:
            known = inspect.signature(self.model.forward).parameters
            given["cache" if "cache" in known else "past_key_values"] = self._past
        hidden = self.model(**given, use_cache=False).last_hidden_state
        shared: list[Tensor] = []

        def share(leaf: Any) -> Any:
            if self._past is not None and leaf is self._past:
                return _Past()
            if not isinstance(leaf, Tensor):
                return leaf
            known = next((k for k, tensor in enumerate(shared) if tensor is leaf), len(shared))
            if known == len(shared):
                shared.append(leaf)
            return _Shared(known)

        calls = [tree_map(share, recorder.call) for recorder in self._recorders]
        for recorder in self._recorders:
            recorder.call = None
        # No layer is here; the next call's masks depend on the number of positions that each would have kept.
        for kept in () if self._past is None else self._past.layers:
            kept.update(*[hidden.new_zeros(1, 1, hidden.shape[1], 1)] * 2)
        return {"hidden": hidden, "shared": shared, "calls": calls}


class Layer(WrappedPart):
    """Layer `place` of the model, called as its own model calls it."""

    def __init__(
        self,
        origin: Origin,
        prefix: str,
        plan: TensorPlan,
        layer: nn.Module,
        place: int,
        context: BuildContext | None = None,
    ):
        super().__init__(origin, prefix)
        self.layer = plan.layer(layer, prefix, context)
        self._place = place

    def forward(self, x: dict[str, Any]) -> dict[str, Any]:
        """Run the layer with the arguments that the model would pass."""

        def unshare(leaf: Any) -> Any:
            if isinstance(leaf, _Past):
                return self._past
            return x["shared"][leaf.index] if isinstance(leaf, _Shared) else leaf

        args, kwargs = tree_map(unshare, x["calls"][self._place])
        output = self.layer(x["hidden"], *args, **kwargs)
        return {**x, "hidden": output if isinstance(output, Tensor) else output[0]}


class Behind(WrappedPart):
    """Modules that the plan names after the layers, such as a last norm. After them only hidden states travel."""

    def __init__(self, origin: Origin, prefix: str, modules: Mapping[str, nn.Module]):
        super().__init__(origin, prefix)
        self.modules_behind = nn.ModuleDict(modules)

    def forward(self, x: dict[str, Any]) -> Tensor:
        """Apply the modules to the hidden states [batch, seq, hidden]; in a generation, to the last position's."""
        hidden = x["hidden"] if self._past is None else x["hidden"][:, -1:]
        for module in self.modules_behind.values():
            hidden = module(hidden)
        return hidden


class Exit(WrappedPart):
    """Head of the causal language model: hidden states [batch, seq, hidden] -> logits [batch, seq, vocab].

    The logits are SlicedLogits if the plan shards the head without gathering its output.
    """

    def __init__(
        self, origin: Origin, model: nn.Module, base: str, plan: TensorPlan, context: BuildContext | None = None
    ):
        super().__init__(origin, "")
        self._result = _Result()
        above = plan.around(_with_modules(model, {base: nn.Identity()}), "", context)
        self.model = _with_modules(above, {base: self._result})
        heads = [m for m in above.modules() if isinstance(m, ColumnParallelLinear) and not m.gather_output]
        self._sliced = [(head.group, head.out_features) for head in heads]

    def forward(self, hidden: Tensor) -> Tensor | SlicedLogits:
        """Run the part of the model after its layers."""
        self._result.hidden = hidden
        logits: Tensor = self.model(inputs_embeds=hidden, use_cache=False).logits
        return SlicedLogits(logits, *self._sliced[0]) if self._sliced else logits


def _with_modules(module: nn.Module, replaced: Mapping[str, nn.Module]) -> nn.Module:
    """Return the module with other children of these names, which shares everything else with it."""
    clone = copy.copy(module)
    clone._modules = {**module._modules, **replaced}
    return clone


def wrap(model: nn.Module) -> list[LayerSpec]:
    """Return a Hugging Face causal language model as layers for a PipelineModule: its own layers, not copies of them.

    Token ids, or a dict of the base model's arguments, -> logits. Raises ConfigError for a model without a pipeline plan
    (base_model_pp_plan of its config), with persistent buffers, or with weights shared other than by embedding and head.
    With several tensor-parallel ranks, layers are built from copies and sharded by the config's base_model_tp_plan; the
    build then raises ConfigError for modules that can't be sharded, and for sequence parallelism. A PeftModel's adapters
    are sharded with the layers that they adapt; those other than LoRA raise ConfigError.
    """
    model, peft = unwrapped(model)
    hf: Any = model
    name, config = type(model).__name__, hf.config
    origin = Origin(config, peft)
    prefix, stages = hf.base_model_prefix, getattr(config, "base_model_pp_plan", None)
    base = model.get_submodule(prefix)
    lists = [key for key in stages or {} if isinstance(getattr(base, key, None), nn.ModuleList)]
    if stages is None or len(lists) != 1:
        raise ConfigError(
            f"{name} is not known to the native decoder, or has adapters, and its config has no base_model_pp_plan with one "
            "list of layers to wrap it by; write its layers as LayerSpecs"
        )
    order = list(stages)
    after = order[order.index(lists[0]) + 1 :]
    parameters = {key for key, _ in model.named_parameters(remove_duplicate=False)}
    if buffers := sorted(set(model.state_dict()) - parameters):
        raise ConfigError(f"{name} has persistent buffers, which no export would hold: {', '.join(buffers[:5])}")
    inside = f"{prefix}."
    plan = TensorPlan.of(model, prefix, lists[0])
    middle = [
        LayerSpec(Layer, origin, f"{inside}{lists[0]}.{k}.", plan, layer, k)
        for k, layer in enumerate(base.get_submodule(lists[0]).children())
    ]
    middle.append(LayerSpec(Behind, origin, inside, {key: base.get_submodule(key) for key in after}))
    entry_args, exit_args = (origin, inside, base, lists[0], after), (origin, model, prefix)
    entry, exit = Entry(*entry_args, plan), Exit(*exit_args, plan)
    ties = _ties(entry, [spec.build() for spec in middle], exit, name)
    if not ties:
        return [LayerSpec(Entry, *entry_args, plan), *middle, LayerSpec(Exit, *exit_args, plan)]
    plan = plan.whole_where_tied([(entry.name_in_model(below), exit.name_in_model(above)) for below, above in ties])
    below, above = zip(*ties, strict=True)
    return [
        TiedLayerSpec("embedding", Entry, *entry_args, plan, tied_weight_attr=below),
        *middle,
        TiedLayerSpec("embedding", Exit, *exit_args, plan, tied_weight_attr=above),
    ]


def _ties(entry: nn.Module, middle: Sequence[nn.Module], exit: nn.Module, name: str) -> list[tuple[str, str]]:
    """Return (name in the entry, name in the exit) of each shared weight. Raises ConfigError for other shared weights."""
    holder: dict[nn.Parameter, str] = {p: n for n, p in entry.named_parameters()}
    ties = [(holder[p], n) for n, p in exit.named_parameters() if p in holder]
    seen = set(holder) | set(exit.parameters())
    for part in middle:
        for n, parameter in part.named_parameters():
            if parameter in seen:
                raise ConfigError(f"{name} shares its weight {n} between layers, which its pipeline plan can't express")
            seen.add(parameter)
    return ties
