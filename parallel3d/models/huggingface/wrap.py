"""Hugging Face models that the native decoder doesn't know: their own layers, as a list for a pipeline.

What a model computes around its layers (masks, rotary embeddings, scaled embeddings, capped logits) remains its own code:
its forward runs once before the layers, with recorders in their place, and once after them, with their result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from parallel3d.autograd.first_shapes import FirstShapes
from parallel3d.checkpoint.export import Stored, all_of
from parallel3d.errors import ConfigError, DataError
from parallel3d.models.huggingface.adapters import unwrapped
from parallel3d.models.huggingface.config import generation_of
from parallel3d.models.huggingface.outline import Outline, Recorder, with_modules
from parallel3d.models.huggingface.tp_plan import TensorPlan
from parallel3d.models.huggingface.weights import Weights, load_layer, load_layer_later
from parallel3d.models.layers import check_tokens
from parallel3d.models.loss import SlicedLogits
from parallel3d.parameters import copy_of, persistent_buffers, replace_tensors, whole_shape
from parallel3d.specs import BuildContext, LayerSpec, TiedLayerSpec
from parallel3d.tensor_parallel.linear import ColumnParallelLinear


@dataclass(frozen=True)
class _Shared:
    """Stands for a tensor in the arguments of a layer: its index among the tensors that all layers share."""

    index: int


# End of error messages about layers that don't keep keys and values.
_REMEDY = "keys and values of each layer's positions; save it by save_hf, and generate by transformers"


@dataclass(frozen=True)
class _Past:
    """Stands for the model's keys and values in the arguments of a layer, which keeps its own."""


@dataclass(frozen=True, eq=False)
class WrappedModel:
    """A model whose parts are wrapped.

    - plan: of its tensor parallelism.
    - peft: where it has adapters, its PeftModel without weights.
    - weights: what the parts of a model on the meta device read; None to draw them.
    - draw: initializes one module; None for a model with weights, whose own modules the parts have.
    - generation: see generation_of.
    """

    config: Any
    plan: TensorPlan
    peft: Any = None
    weights: Weights | None = None
    draw: Callable[[nn.Module], None] | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)

    def config_json(self) -> dict[str, Any]:
        """Return the content of config.json, see HuggingFaceLayer."""
        return {**self.config.to_dict(), **self.generation}

    @property
    def text_config(self) -> Any:
        """The section of the config that describes the language model; mostly the config itself."""
        return self.config.get_text_config()

    def __deepcopy__(self, memo: object) -> WrappedModel:
        return self  # it is not changed, and `draw` knows the whole model


class WrappedPart(nn.Module):
    """A part of a wrapped model. Its parameters are the model's; their names there are `prefix` and the name in the part."""

    def __init__(self, whole: WrappedModel, prefix: str):
        super().__init__()
        self.whole, self._prefix = whole, prefix
        self._past: Any = None

    def stored(self) -> dict[str, Stored]:
        """Return how each parameter and each persistent buffer is stored: under its own name in the model."""
        return {
            name: all_of(self.name_in_model(name), *whole_shape(tensor))
            for name, tensor in (*self.named_parameters(), *persistent_buffers(self))
        }

    def name_in_model(self, name: str) -> str:
        """Return the model's name of a parameter of this part."""
        return self._prefix + name.partition(".")[2]

    def config_json(self) -> dict[str, Any]:
        """Return the model's config.json. Raises ConfigError with adapters, for whose names no architecture has a place."""
        if self.whole.peft is not None:
            raise ConfigError(
                "a model with adapters has no config.json of its own; use save_hf(..., merge_adapters=True)"
            )
        return self.whole.config_json()

    @property
    def max_positions(self) -> int | None:
        """Number of positions that the model is made for, if its config says so."""
        found: int | None = getattr(self.whole.text_config, "max_position_embeddings", None)
        return found

    def keep_past(self, length: int | None) -> None:
        """Keep keys and values from the next call on, of any number of positions; None: drop them, and keep no more.

        Raises ConfigError for layers that keep something else.
        """
        from transformers import DynamicCache

        past: Any = None if length is None else DynamicCache(config=self.whole.config)
        if past is not None and not all(hasattr(kept, "update") for kept in past.layers):
            raise ConfigError(f"a model of type {self.whole.config.model_type!r} keeps other states than {_REMEDY}")
        self._past = past

    @torch.no_grad()
    def _own(self, module: nn.Module) -> nn.Module:
        """Return a module of the model; of one on the meta device a copy, with new weights if there are none to read."""
        weights, draw = self.whole.weights, self.whole.draw
        if draw is None:
            return module
        own = copy_of(module)
        if weights is None and not _on_meta():
            _give_memory(own)
            own.apply(draw)
        return own

    def _read(self, context: BuildContext | None) -> None:
        """Read the weights of a model on the meta device, whole or sharded; later, where the context says so."""
        if self.whole.weights is None or _on_meta():
            return
        if context is not None and context.reads_later:
            load_layer_later(self, self.stored(), self.whole.weights, context.device)
        else:
            _give_memory(self)
            load_layer(self, self.stored(), self.whole.weights)


def _give_memory(module: nn.Module) -> None:
    """Replace the parameters, which are on the meta device, by such with memory."""
    replace_tensors(module, lambda t: torch.empty_like(t, device=_device()) if isinstance(t, nn.Parameter) else t)


def _device() -> torch.device:
    return torch.get_default_device()


def _on_meta() -> bool:
    return _device().type == "meta"


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
        self, whole: WrappedModel, prefix: str, base: nn.Module, outline: Outline, context: BuildContext | None = None
    ):
        super().__init__(whole, prefix)
        layers = outline.layers
        before = self._own(with_modules(base, {name: nn.Identity() for name in (layers, *outline.after)}))
        self._recorders = [Recorder(layer, outline.in_tuples) for layer in base.get_submodule(layers).children()]
        self.model = with_modules(whole.plan.around(before, prefix, context), {layers: nn.ModuleList(self._recorders)})
        self._read(context)

    def check_inputs(self, inputs: Any) -> None:
        """Raise DataError for token ids outside of the vocabulary; called before a step."""
        check_tokens(inputs, self.whole.text_config.vocab_size)

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
        if self._past is not None and not any(isinstance(leaf, _Past) for leaf in tree_leaves(calls)):
            raise ConfigError(f"a model of type {self.whole.config.model_type!r} does not give its layers {_REMEDY}")
        for recorder in self._recorders:
            recorder.forget()
        # This part has no layers, but the next call's masks depend on the number of positions that each would have kept.
        for kept in () if self._past is None else self._past.layers:
            kept.update(*[hidden.new_zeros(1, 1, hidden.shape[1], 1)] * 2)
        return {"hidden": hidden, "shared": shared, "calls": calls}


class Layer(WrappedPart):
    """Layer `place` of the model, called as its own model calls it."""

    def __init__(
        self, whole: WrappedModel, prefix: str, layer: nn.Module, place: int, context: BuildContext | None = None
    ):
        super().__init__(whole, prefix)
        self.layer = whole.plan.layer(self._own(layer), prefix, context)
        self._place = place
        self._read(context)

    @staticmethod
    def cost_key(whole: WrappedModel, prefix: str, layer: nn.Module, place: int) -> object:
        """Return a key that layers of equal cost share, see LayerSpec.costs_like: all plain attributes of their modules."""
        attributes = (vars(module).items() for module in layer.modules())
        return repr(layer), [
            (name, value)
            for items in attributes
            for name, value in items
            if isinstance(value, (bool, int, float, str)) and not name.endswith("idx")
        ]

    def compile(self, **options: Any) -> None:
        """Compile only the model's own layer: the code around it depends on `place`, so each layer would have its own graph."""
        self.layer._compiled_call_impl = FirstShapes(self.layer._call_impl, type(self.layer).__name__, **options)

    def forward(self, x: dict[str, Any]) -> dict[str, Any]:
        """Run the layer with the arguments that the model would pass."""

        def unshare(leaf: Any) -> Any:
            if isinstance(leaf, _Past):
                return self._past
            return x["shared"][leaf.index] if isinstance(leaf, _Shared) else leaf

        args, kwargs = tree_map(unshare, x["calls"][self._place])
        output = self.layer(x["hidden"], *args, **kwargs)
        return {**x, "hidden": output if isinstance(output, Tensor) else output[0]}


class AfterLayers(WrappedPart):
    """Modules that the model calls after the layers, such as a last norm. After them only hidden states travel."""

    def __init__(
        self, whole: WrappedModel, prefix: str, modules: Mapping[str, nn.Module], context: BuildContext | None = None
    ):
        super().__init__(whole, prefix)
        self.modules_after = nn.ModuleDict({name: self._own(module) for name, module in modules.items()})
        self._read(context)

    def forward(self, x: dict[str, Any]) -> Tensor:
        """Apply the modules to the hidden states [batch, seq, hidden]; in a generation, to the last position's."""
        hidden = x["hidden"] if self._past is None else x["hidden"][:, -1:]
        for module in self.modules_after.values():
            hidden = module(hidden)
        return hidden


class Exit(WrappedPart):
    """Head of the causal language model: hidden states [batch, seq, hidden] -> logits [batch, seq, vocab].

    The logits are SlicedLogits if the plan shards the head without gathering its output.
    """

    def __init__(self, whole: WrappedModel, model: nn.Module, base: str, context: BuildContext | None = None):
        super().__init__(whole, "")
        self._result = _Result()
        above = whole.plan.around(self._own(with_modules(model, {base: nn.Identity()})), "", context)
        self.model = with_modules(above, {base: self._result})
        heads = [m for m in above.modules() if isinstance(m, ColumnParallelLinear) and not m.gather_output]
        self._sliced = [(head.group, head.out_features) for head in heads]
        self._read(context)

    def forward(self, hidden: Tensor) -> Tensor | SlicedLogits:
        """Run the part of the model after its layers."""
        self._result.hidden = hidden
        logits: Tensor = self.model(inputs_embeds=hidden, use_cache=False).logits
        if logits.shape[:-1] != hidden.shape[:-1]:  # one per sequence, which needs the token ids to find its end
            raise ConfigError(
                f"{type(self.model).__name__} returns {list(logits.shape)} for hidden states {list(hidden.shape)}, and no "
                "logits of each position; train it without stages (parallel3d.initialize takes the model as it is)"
            )
        return SlicedLogits(logits, *self._sliced[0]) if self._sliced else logits


def wrap(model: nn.Module, weights: Weights | None = None, directory: Path | None = None) -> list[LayerSpec]:
    """Return a Hugging Face causal language model as layers for a PipelineModule: its own layers, not copies of them.

    Token ids, or a dict of the base model's arguments, -> logits. Of a model on the meta device each layer is a copy, with
    weights that it reads when it is built, or new ones without `weights`. With several tensor-parallel ranks, layers are
    built from copies and sharded as TensorPlan says, a PeftModel's adapters with the layers that they adapt.

    directory: the directory from which the model was loaded, if any.

    Raises ConfigError for a model that isn't one list of layers through which hidden states pass (Outline), with weights
    shared other than by embedding and head, with a router's loss, with layers that are left out by chance, or with adapters
    other than LoRA. The build raises it for modules that can't be sharded, and for sequence parallelism.
    """
    model, peft = unwrapped(model)
    hf: Any = model
    for name, off in {"output_router_logits": "false", "layerdrop": "0"}.items():
        if getattr(hf.config.get_text_config(), name, None):
            raise ConfigError(
                f"a pipeline doesn't compute what {name} asks for; set it to {off} in the config of which the model is made, "
                "or train the model without stages (parallel3d.initialize takes it as it is)"
            )
    outline = Outline.of(model)
    base, inside = model.get_submodule(outline.base), f"{outline.base}."
    plan = TensorPlan.of(model, f"{inside}{outline.layers}.")

    def specs(whole: WrappedModel) -> list[LayerSpec]:
        """Return the specs of all parts."""
        layers = base.get_submodule(outline.layers).children()
        return [
            LayerSpec(Entry, whole, inside, base, outline),
            *(LayerSpec(Layer, whole, f"{inside}{outline.layers}.{k}.", layer, k) for k, layer in enumerate(layers)),
            LayerSpec(AfterLayers, whole, inside, {key: base.get_submodule(key) for key in outline.after}),
            LayerSpec(Exit, whole, model, outline.base),
        ]

    whole = WrappedModel(hf.config, plan, peft, generation=generation_of(hf, directory))
    entry, *parts, exit = (cast(WrappedPart, spec.build()) for spec in specs(whole))
    ties = _ties(entry, parts, exit, type(model).__name__)
    names = [(entry.name_in_model(below), exit.name_in_model(above)) for below, above in ties]
    if any(parameter.is_meta for parameter in model.parameters()):
        whole = replace(whole, weights=weights, draw=hf._init_weights)
    first, *middle, last = specs(replace(whole, plan=plan.whole_where_tied(names)))
    if ties:
        below, above = zip(*ties, strict=True)
        first = TiedLayerSpec("embedding", Entry, *first.module_args, tied_weight_attr=below)
        last = TiedLayerSpec("embedding", Exit, *last.module_args, tied_weight_attr=above)
    return [first, *middle, last]


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
