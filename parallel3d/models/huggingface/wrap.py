"""A Hugging Face model that the native decoder doesn't know: its own layers, along its pipeline plan, by its tensor plan.

What the model computes around its layers (masks, rotary embeddings, scaled embeddings, capped logits) is not written down
again: its own forward runs, before the layers with recorders in their place, behind them with their result.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from parallel3d.checkpoint.export import Stored, all_of
from parallel3d.errors import ConfigError, DataError
from parallel3d.models.huggingface.tp_plan import TensorPlan
from parallel3d.models.sliced import SlicedLogits
from parallel3d.parameters import whole_shape
from parallel3d.specs import BuildContext, LayerSpec, TiedLayerSpec
from parallel3d.tensor_parallel.linear import ColumnParallelLinear


class _Shared(int):
    """In the arguments of a layer, the place of a tensor among those that all layers share."""


class WrappedPart(nn.Module):
    """A part of a wrapped model. Its parameters are those of the model, by their names there behind `prefix`."""

    def __init__(self, config: Any, prefix: str):
        super().__init__()
        self._config, self._prefix = config, prefix

    def stored(self) -> dict[str, Stored]:
        """How each parameter is stored: under its own name in the model."""
        return {
            name: all_of(self.name_in_model(name), *whole_shape(parameter))
            for name, parameter in self.named_parameters()
        }

    def name_in_model(self, name: str) -> str:
        """Return the model's name of a parameter of this part."""
        return self._prefix + name.partition(".")[2]

    def config_json(self) -> dict[str, Any]:
        """The model's config.json."""
        return dict(self._config.to_dict())


class _Recorder(nn.Module):
    """Stands in for a layer: notes what it is called with, and hands the hidden states on."""

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
    """The output of a base model, as far as a head reads it."""

    past_key_values = hidden_states = attentions = router_logits = None

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getitem__(self, k: int) -> Tensor:
        return (self.last_hidden_state,)[k]


class _Result(nn.Module):
    """Stands in for the base model: returns the hidden states it was last given."""

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
        config: Any,
        prefix: str,
        plan: TensorPlan,
        base: nn.Module,
        layers: str,
        behind: Sequence[str],
        context: BuildContext | None = None,
    ):
        super().__init__(config, prefix)
        before = _with_modules(base, {name: nn.Identity() for name in (layers, *behind)})
        self._recorders = [_Recorder(layer) for layer in base.get_submodule(layers).children()]
        self.model = _with_modules(plan.around(before, prefix, context), {layers: nn.ModuleList(self._recorders)})

    def forward(self, inputs: Tensor | Mapping[str, Any]) -> dict[str, Any]:
        """Run the model up to its layers. Raises DataError for inputs that are neither token ids nor a dict."""
        if not isinstance(inputs, (Tensor, Mapping)):
            raise DataError(f"the inputs of a model are token ids or a dict, not {type(inputs).__name__}")
        given = {"input_ids": inputs} if isinstance(inputs, Tensor) else dict(inputs)
        hidden = self.model(**given, use_cache=False).last_hidden_state
        shared: list[Tensor] = []

        def share(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            known = next((k for k, tensor in enumerate(shared) if tensor is leaf), len(shared))
            if known == len(shared):
                shared.append(leaf)
            return _Shared(known)

        calls = [tree_map(share, recorder.call) for recorder in self._recorders]
        for recorder in self._recorders:
            recorder.call = None
        return {"hidden": hidden, "shared": shared, "calls": calls}


class Layer(WrappedPart):
    """One layer of the model, the `place`-th, called as its own model calls it."""

    def __init__(
        self,
        config: Any,
        prefix: str,
        plan: TensorPlan,
        layer: nn.Module,
        place: int,
        context: BuildContext | None = None,
    ):
        super().__init__(config, prefix)
        self.layer = plan.layer(layer, prefix, context)
        self._place = place

    def forward(self, x: dict[str, Any]) -> dict[str, Any]:
        """Run the layer with the arguments that the model would pass."""

        def unshare(leaf: Any) -> Any:
            return x["shared"][leaf] if isinstance(leaf, _Shared) else leaf

        args, kwargs = tree_map(unshare, x["calls"][self._place])
        output = self.layer(x["hidden"], *args, **kwargs)
        return {**x, "hidden": output if isinstance(output, Tensor) else output[0]}


class Behind(WrappedPart):
    """The modules that the plan names after the layers, such as a last norm. From here on only hidden states travel."""

    def __init__(self, config: Any, prefix: str, modules: Mapping[str, nn.Module]):
        super().__init__(config, prefix)
        self.modules_behind = nn.ModuleDict(modules)

    def forward(self, x: dict[str, Any]) -> Tensor:
        """[batch, seq, hidden] -> the same."""
        hidden = x["hidden"]
        for module in self.modules_behind.values():
            hidden = module(hidden)
        return hidden


class Exit(WrappedPart):
    """The causal language model above its base: hidden states [batch, seq, hidden] -> logits [batch, seq, vocab].

    SlicedLogits where the plan slices the head without gathering what it gives.
    """

    def __init__(self, config: Any, plan: TensorPlan, model: nn.Module, base: str, context: BuildContext | None = None):
        super().__init__(config, "")
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
    """The module with other children by these names; all else is shared with it."""
    clone = copy.copy(module)
    clone._modules = {**module._modules, **replaced}
    return clone


def wrap(model: nn.Module) -> list[LayerSpec]:
    """Layers for a PipelineModule from a Hugging Face causal language model: its own, which become the pipeline's.

    Token ids, or a dict of what the base model takes, -> logits. Raises ConfigError for a model without a pipeline plan
    (base_model_pp_plan of its config), with persistent buffers, or with weights shared other than by embedding and head.
    Where the context has a group to slice over, layers are built from copies, sliced by the config's base_model_tp_plan;
    the build then raises ConfigError for what can't be sliced, and for sequence parallelism.
    """
    hf: Any = model
    name, config = type(model).__name__, hf.config
    prefix, stages = hf.base_model_prefix, getattr(config, "base_model_pp_plan", None)
    base = model.get_submodule(prefix)
    lists = [key for key in stages or {} if isinstance(getattr(base, key, None), nn.ModuleList)]
    if stages is None or len(lists) != 1:
        raise ConfigError(
            f"{name} is not known to the native decoder, and its config has no base_model_pp_plan with one list of layers to "
            "wrap it by; write its layers as LayerSpecs"
        )
    order = list(stages)
    behind = order[order.index(lists[0]) + 1 :]
    layers = base.get_submodule(lists[0])
    _check_model(model, name)
    inside = f"{prefix}."
    plan = TensorPlan.of(model, prefix, lists[0])
    middle = [
        LayerSpec(Layer, config, f"{inside}{lists[0]}.{k}.", plan, layer, k)
        for k, layer in enumerate(layers.children())
    ]
    tail = LayerSpec(Behind, config, inside, {key: base.get_submodule(key) for key in behind})
    entry, exit = Entry(config, inside, plan, base, lists[0], behind), Exit(config, plan, model, prefix)
    ties = _ties(entry, [spec.build() for spec in (*middle, tail)], exit, name)
    plan = plan.whole_where_tied([(entry.name_in_model(below), exit.name_in_model(above)) for below, above in ties])
    entry_args = (config, inside, plan, base, lists[0], behind)
    exit_args = (config, plan, model, prefix)
    if not ties:
        return [LayerSpec(Entry, *entry_args), *middle, tail, LayerSpec(Exit, *exit_args)]
    below, above = zip(*ties, strict=True)
    return [
        TiedLayerSpec("embedding", Entry, *entry_args, tied_weight_attr=below),
        *middle,
        tail,
        TiedLayerSpec("embedding", Exit, *exit_args, tied_weight_attr=above),
    ]


def _check_model(model: nn.Module, name: str) -> None:
    parameters = {key for key, _ in model.named_parameters(remove_duplicate=False)}
    buffers = sorted(set(model.state_dict()) - parameters)
    if buffers:
        raise ConfigError(f"{name} has persistent buffers, which no export would hold: {', '.join(buffers[:5])}")


def _ties(entry: nn.Module, middle: Sequence[nn.Module], exit: nn.Module, name: str) -> list[tuple[str, str]]:
    """(name in the entry, name in the exit) of what both share; ConfigError for other shared weights."""
    holder: dict[nn.Parameter, str] = {p: n for n, p in entry.named_parameters()}
    ties = [(holder[p], n) for n, p in exit.named_parameters() if p in holder]
    seen = set(holder) | set(exit.parameters())
    for part in middle:
        for n, parameter in part.named_parameters():
            if parameter in seen:
                raise ConfigError(f"{name} shares its weight {n} between layers, which its pipeline plan can't express")
            seen.add(parameter)
    return ties
