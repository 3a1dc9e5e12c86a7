"""Tensor parallelism of a module that is not written for it, by a plan of the layers to replace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from parallel3d.autograd.split_backward import has_hooks
from parallel3d.comm.collectives import Group
from parallel3d.errors import PartitionError, nearest
from parallel3d.parameters import slicing_of
from parallel3d.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, SlicedLayer, from_linear
from parallel3d.tensor_parallel.regions import sum_gradients_over
from parallel3d.tensor_parallel.slicing import Segments
from parallel3d.tensor_parallel.vocabulary import VocabParallelEmbedding


@dataclass(frozen=True)
class Column:
    """A linear layer becomes a ColumnParallelLinear. fused: number of equal segments; or the segments themselves.

    in_region: its input enters the sharded region by other code, once for several layers.
    """

    gather_output: bool = False
    segments: Segments | None = None
    fused: int = 1
    in_region: bool = False


@dataclass(frozen=True)
class Row:
    """A linear layer becomes a RowParallelLinear; an embedding is sharded by its rows, the vocabulary."""

    input_is_parallel: bool = True
    segments: Segments | None = None


@dataclass(frozen=True)
class Vocabulary:
    """An embedding becomes a VocabParallelEmbedding."""


@dataclass(frozen=True)
class Whole:
    """A module stays as it is. partial: it works inside a sharded region, so that its gradients are summed over ranks."""

    partial: bool = False


Style = Column | Row | Vocabulary | Whole

# The words for each style: this package's first, then those of base_model_tp_plan in Hugging Face configurations.
_WORDS: dict[Style, str] = {
    Column(): "column colwise local_colwise",
    Column(gather_output=True): "column_gather_output colwise_rep colwise_gather_output",
    Column(fused=2): "packed_colwise local_packed_colwise",
    Row(): "row rowwise local_rowwise",
    Row(input_is_parallel=False): "row_split_input rowwise_rep rowwise_split_input",
    Vocabulary(): "vocab embedding_rowwise",
    Whole(partial=True): "partial replicated_with_grad_allreduce",
    # In those plans "local" and "isolated" give each rank a part of a mixture's sum, which "gather" adds up; here a row layer
    # adds up its own. "sequence_parallel" is of a single norm there; here parallelize(..., sequence_parallel=True) is of all.
    Whole(): "whole local isolated gather sequence_parallel replicate",
}
STYLES: dict[str, Style] = {word: style for style, words in _WORDS.items() for word in words.split()}


def parallelize(
    module: nn.Module, plan: Mapping[str, str | Style], group: Group, *, sequence_parallel: bool = False
) -> nn.Module:
    """Replace the layers inside `module` that the plan names by sharded ones with this rank's part of the same weights.

    plan: pattern of dotted names ("*.q_proj", "layers.*.mlp.up_proj") -> a word of STYLES, or a Column, Row... Every pattern
    must match; what none matches stays whole. Layers are nn.Linear and nn.Embedding, or subclasses with their forward.
    Weights that were one object (tied embeddings) still are. Every rank must begin with the same weights.

    The module's code must take the sizes of what a column layer returns from the tensor, as in view(*shape, -1, head_dim);
    where a head must not be cut, the plan says Column(segments=[AttentionHeads(...).query]). sequence_parallel: what the
    module gets and passes on between row and column layers are shards of sequences that the group's size divides; all
    parameters not sharded are then partial. Returns the module, changed in place (a lone layer: its replacement).
    Raises PartitionError, with the names, before anything is changed.
    """
    styles = _match(module, plan)
    replacements = {
        layer: _replace(name, layer, style, group, sequence_parallel)
        for layer, (name, style) in styles.items()
        if not isinstance(style, Whole)
    }
    _keep_ties(module, replacements)
    if module in replacements:
        return replacements[module]
    for name, layer in list(module.named_modules(remove_duplicate=False)):
        if layer in replacements:
            parent, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(parent), attribute, replacements[layer])
    for layer, (_, style) in styles.items():
        if isinstance(style, Whole) and style.partial:
            # Layers inside it that the plan shards declare themselves which of their gradients are partial.
            own = {p for new in replacements.values() for p in new.parameters()}
            sum_gradients_over((p for p in layer.parameters() if p not in own), group)
    if sequence_parallel:
        sum_gradients_over((p for p in module.parameters() if slicing_of(p) is None), group)
    return module


def _match(module: nn.Module, plan: Mapping[str, str | Style]) -> dict[nn.Module, tuple[str, Style]]:
    """Return the name and style of each module that the plan names."""
    found: dict[nn.Module, tuple[str, Style]] = {}
    modules = list(module.named_modules(remove_duplicate=False))
    for pattern, word in plan.items():
        style = _style(pattern, word)
        # "*.q_proj" is meant for a q_proj at the top, too.
        matching = [(name, m) for name, m in modules if fnmatchcase(name, pattern) or fnmatchcase(f".{name}", pattern)]
        if not matching:
            leaves = sorted({name.rpartition(".")[2] for name, _ in modules} - {""})
            raise PartitionError(
                f"plan pattern {pattern!r} matches no module of {type(module).__name__}."
                f"{nearest(pattern.rpartition('.')[2], leaves)} Its modules are called {', '.join(leaves)}"
            )
        for name, layer in matching:
            other, before = found.setdefault(layer, (name, style))
            if before != style:
                raise PartitionError(
                    f"{other} is {before} and, by plan pattern {pattern!r}, {style}; leave one pattern"
                )
    return found


def _style(pattern: str, word: str | Style) -> Style:
    if not isinstance(word, str):
        return word
    if word not in STYLES:
        raise PartitionError(
            f"plan pattern {pattern!r}: {word!r} is not a way to shard a layer.{nearest(word, STYLES)} There are "
            f"{', '.join(STYLES)}"
        )
    return STYLES[word]


def _replace(name: str, layer: nn.Module, style: Style, group: Group, sequence_parallel: bool) -> SlicedLayer:
    """Return the tensor-parallel layer. Raises PartitionError if there is none for this layer and style."""
    forward = type(layer).forward
    why = _unsuitable(layer)
    options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "group": group}
    if why is None and isinstance(layer, nn.Linear) and forward is nn.Linear.forward:
        if isinstance(style, Column):
            fused = [layer.out_features // style.fused] * style.fused if style.fused > 1 else None
            options |= {"gather_output": style.gather_output, "segments": style.segments or fused}
            options["in_region"] = style.in_region
            return from_linear(ColumnParallelLinear, layer, **options)
        if isinstance(style, Row):
            options |= {"input_is_parallel": style.input_is_parallel, "segments": style.segments}
            return from_linear(RowParallelLinear, layer, **options)
        why = "is a linear layer"
    elif why is None and isinstance(layer, nn.Embedding) and forward is nn.Embedding.forward:
        if isinstance(style, (Row, Vocabulary)):
            return VocabParallelEmbedding.from_embedding(layer, **options)
        why = "is an embedding"
    raise PartitionError(
        f"{name or type(layer).__name__} can't be sharded as {style}: it {why or 'is a ' + type(layer).__name__}; columns and "
        "rows are of layers with nn.Linear's forward, vocabularies of those with nn.Embedding's"
    )


def _unsuitable(layer: nn.Module) -> str | None:
    """Return why a linear layer or embedding can't be replaced by a tensor-parallel one, or None."""
    if type(layer._parameters.get("weight")) is not nn.Parameter:
        return "has no weight of its own (parametrized?)"
    if "forward" in vars(layer) or has_hooks(layer):
        return "has a forward or hooks of its own, set after it was made; set them after parallelize"
    if isinstance(layer, nn.Embedding) and (layer.sparse or layer.max_norm is not None or layer.scale_grad_by_freq):
        return "has sparse, max_norm or scale_grad_by_freq"
    return None


def _keep_ties(module: nn.Module, replacements: Mapping[nn.Module, SlicedLayer]) -> None:
    """Share the parts of a parameter that layers share. Raises PartitionError if those layers are not sharded alike."""
    uses: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
    for path, layer in module.named_modules():
        for name, parameter in layer._parameters.items():
            if parameter is not None:
                uses.setdefault(parameter, []).append((f"{path}.{name}".lstrip("."), layer, name))
    for parameter, places in uses.items():
        parts = [replacements[m]._parameters[name] if m in replacements else parameter for _, m, name in places]
        if len({None if part is None else slicing_of(part) for part in parts}) > 1:
            names = " and ".join(name for name, _, _ in places)
            raise PartitionError(
                f"{names} are one parameter, which the plan shards in different ways; shard all by the vocabulary (an "
                "embedding as 'vocab', its output layer as 'column') or none"
            )
        for _, layer, name in places:
            if layer in replacements:
                replacements[layer]._parameters[name] = parts[0]
