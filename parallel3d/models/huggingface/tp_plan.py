"""Tensor parallelism of a wrapped Hugging Face model by its own plan, base_model_tp_plan of its config, or by usual names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, NoReturn

from torch import Tensor, nn

from parallel3d.autograd.split_backward import has_hooks
from parallel3d.comm import differentiable
from parallel3d.comm.collectives import Group
from parallel3d.errors import ConfigError
from parallel3d.models.huggingface.adapters import UnknownRegion, adapted_by, styles_inside
from parallel3d.models.huggingface.tp_regions import regions_of, shard_experts
from parallel3d.parameters import copy_of, sliced
from parallel3d.specs import BuildContext
from parallel3d.tensor_parallel.parallelize import STYLES, Column, Row, Style, Vocabulary, Whole, parallelize
from parallel3d.tensor_parallel.regions import slicing_group
from parallel3d.tensor_parallel.slicing import cut
from parallel3d.tensor_parallel.vocabulary import own_padding, own_rows

EXPERTS = "moe_tp_experts"
# Styles of linear layers by their usual names, for a model without a plan. A layer that can't be sharded so is still an error.
_USUAL = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1"), "colwise") | dict.fromkeys(
    ("o_proj", "out_proj", "down_proj", "fc2"), "rowwise"
)


@dataclass(frozen=True)
class TensorPlan:
    """Plan by which a model is sharded over tensor-parallel ranks.

    - model: name of its class, for errors.
    - base: the prefix of its base model.
    - words: name in the model, with * for a number -> a word of base_model_tp_plan.
    - names_layers: whether the plan names any of the layers.
    """

    model: str
    base: str
    words: Mapping[str, str]
    names_layers: bool

    @classmethod
    def of(cls, model: nn.Module, layers: str) -> TensorPlan:
        """Return the plan of the layers, which the configuration gives, and of the rest, for which the model may add to it.

        layers: the prefix of their names.
        """
        hf: Any = model
        prefix, given = hf.base_model_prefix, getattr(hf.config, "base_model_tp_plan", None)
        words = {key: word for key, word in (getattr(hf, "tp_plan", None) or {}).items() if not key.startswith(layers)}
        words |= {f"{prefix}.{k}": word for k, word in (given or {}).items()}
        if given is None:
            linears = [n for n, module in model.named_modules() if isinstance(adapted_by(module) or module, nn.Linear)]
            leaves = {_generic(name): name.rpartition(".")[2] for name in linears if name.startswith(layers)}
            words |= {key: _USUAL[leaf] for key, leaf in leaves.items() if leaf in _USUAL}
        known = {_generic(name) for name, _ in (*model.named_modules(), *model.named_parameters())}
        words = {key: word for key, word in words.items() if key in known}
        return cls(type(model).__name__, f"{prefix}.", words, any(key.startswith(layers) for key in words))

    def whole_where_tied(self, ties: Iterable[tuple[str, str]]) -> TensorPlan:
        """Return the plan that shards tied weights alike or not at all. ties: names of both in the model."""
        whole = set()
        for tied in ties:
            below, above = (name.rpartition(".")[0].removesuffix(".base_layer") for name in tied)
            styles = [STYLES.get(self.words.get(name, "whole")) for name in (below, above)]
            if not (isinstance(styles[0], (Row, Vocabulary)) and isinstance(styles[1], Column)):
                whole |= {below, above}
        return replace(self, words={key: word for key, word in self.words.items() if key not in whole})

    def layer(self, layer: nn.Module, prefix: str, context: BuildContext | None) -> nn.Module:
        """Return a copy of a layer with this rank's part of its weights; on a single rank, the layer itself.

        prefix: the layer's name in the model. Raises ConfigError for modules that can't be sharded.
        """
        group = self._group(context)
        if group.size == 1:
            return layer
        styles = self._styles(layer, prefix)
        result = copy_of(layer)
        for name, experts in result.named_modules():
            if self.words.get(_generic(prefix + name)) == EXPERTS:
                own = {key: styles.pop(f"{name}.{key}", None) for key, _ in experts.named_parameters()}
                try:
                    shard_experts(experts, own, group)
                except UnknownRegion as error:
                    self._refuse(prefix + name, str(error))
        regions = regions_of(result, styles)
        for region in regions:
            if region.drops and context is not None and context.layout_independent:
                raise ConfigError(
                    f"{self.model} drops inside {prefix + region.name}, by its own code, which can't draw whole masks; set "
                    "rng.layout_independent to false, or its dropout to 0"
                )
            try:
                styles |= region.prepare(group)
            except UnknownRegion as error:
                self._refuse(prefix + region.name, str(error))
        result = parallelize(result, self._with_adapters(result, prefix, styles, context), group)
        for region in regions:
            region.connect(group)
        return result

    def around(self, part: nn.Module, prefix: str, context: BuildContext | None) -> nn.Module:
        """Parallelize a part before or after the layers: embeddings over the vocabulary, a head over its outputs."""
        group = self._group(context)
        styles = {} if group.size == 1 else self._styles(part, prefix)
        sharded_styles = {name: style for name, style in styles.items() if not isinstance(style, Whole)}
        if not sharded_styles:
            return part
        result = copy_of(part)
        for name, style in list(sharded_styles.items()):
            module = result.get_submodule(name)
            is_plain = type(module).forward is nn.Embedding.forward and not has_hooks(module)
            if isinstance(module, nn.Embedding) and not is_plain:
                if [n for n, _ in module.named_parameters()] != ["weight"] or module.max_norm is not None:
                    self._refuse(prefix + name, "is an embedding with more than the rows it looks up")
                _slice_lookup(module, group)
                del sharded_styles[name]
            elif (
                isinstance(adapted_by(module) or module, nn.Linear)
                and isinstance(style, Row)
                and style.input_is_parallel
            ):
                self._refuse(prefix + name, "would be sharded by inputs that nothing has sharded")
        return parallelize(result, self._with_adapters(result, prefix, sharded_styles, context), group)

    def _with_adapters(
        self, part: nn.Module, prefix: str, styles: Mapping[str, Style], context: BuildContext | None
    ) -> dict[str, Style]:
        """Return the styles with those of the layers inside adapted ones in their place."""
        found: dict[str, Style] = {}
        for name, style in styles.items():
            try:
                found |= styles_inside(name, part.get_submodule(name), style, context)
            except UnknownRegion as error:
                self._refuse(prefix + name, str(error))
        return found

    def _group(self, context: BuildContext | None) -> Group:
        group = slicing_group(None, context)
        if group.size > 1 and not self.names_layers:
            raise ConfigError(
                f"{self.model} has no plan for tensor parallelism: nothing in the base_model_tp_plan of its config names its "
                "layers; set tensor_parallel.size to 1, or give a plan as model.config.base_model_tp_plan = "
                '{"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise", ...}'
            )
        if group.size > 1 and context is not None and context.sequence_parallel:
            raise ConfigError(
                f"{self.model} keeps its own layers, whose code takes the length of a sequence from hidden states and can't "
                "work on a shard of it; set tensor_parallel.sequence_parallel to false (its layers are sharded all the same)"
            )
        return group

    def _styles(self, part: nn.Module, prefix: str) -> dict[str, Style]:
        """Return the styles that the plan gives to modules of a part and, for experts, to their parameters."""
        modules = {name: self.words.get(_generic(prefix + name)) for name, _ in part.named_modules() if name}
        parameters = {name: self.words.get(_generic(prefix + name)) for name, _ in part.named_parameters()}
        experts = {name for name, word in modules.items() if word == EXPERTS}
        for name, word in (*modules.items(), *parameters.items()):
            if word is None or name in experts:
                continue
            if word not in STYLES or (name in parameters and name.rpartition(".")[0] not in experts):
                self._refuse(prefix + name, f"is {word!r} in its plan, which is not supported here")
        named = {**modules, **parameters}
        return {name: STYLES[word] for name, word in named.items() if word is not None and name not in experts}

    def _refuse(self, where: str, why: str) -> NoReturn:
        where = where.rstrip(".")
        key = _generic(where)
        of_base = key.startswith(self.base)
        plan = f"model.{'config.base_model_tp_plan' if of_base else 'tp_plan'}"
        raise ConfigError(
            f"{self.model} can't be sharded: {where} {why}; set tensor_parallel.size to 1, or take "
            f"{key.removeprefix(self.base)!r} and what is inside it out of {plan}, which keeps it whole on every rank"
        )


def _slice_lookup(embedding: nn.Embedding, group: Group) -> None:
    """Shard an embedding by the vocabulary; its own forward still computes with the rows that it looks up.

    In place, because the arguments that its class is constructed with aren't known.
    """
    look_up = type(embedding).forward
    whole = cut(embedding.num_embeddings, None, group.size)
    ((start, stop),) = whole.ranges[group.index]
    embedding.padding_idx = own_padding(embedding.padding_idx, start, stop)
    embedding.weight = sliced(embedding.weight, whole.slicing(0, group.index))

    def forward(self: nn.Embedding, input: Tensor) -> Tensor:
        here, own = own_rows(input, self.num_embeddings, start, stop)
        rows: Tensor = look_up(self, own)
        return differentiable.reduce_from_region(rows.masked_fill(~here.unsqueeze(-1), 0), group)

    vars(embedding)["forward"] = MethodType(forward, embedding)  # a copy of the module has a bound copy


def _generic(name: str) -> str:
    """Return a dotted name with * for each number."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
