"""Tensor-parallel regions inside a layer not written for them: from column layers to the row layer that adds up.

In between, the layer's own code runs on this rank's part. That is correct for a feed-forward network, which works on each
feature by itself, and for attention by whole heads, once the module has the number of its heads. Others are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from parallel3d.comm import differentiable
from parallel3d.comm.collectives import Group
from parallel3d.errors import PartitionError
from parallel3d.models.huggingface.adapters import UnknownRegion, adapted_by
from parallel3d.parameters import sliced
from parallel3d.rng import OwnStream
from parallel3d.tensor_parallel.parallelize import Column, Row, Style, Whole
from parallel3d.tensor_parallel.regions import enter_region
from parallel3d.tensor_parallel.slicing import AttentionHeads, cut

# Attributes by which an attention module knows its heads.
_QUERY_COUNTS = ("num_heads", "num_attention_heads")
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads")
_HEAD_SIZES = ("head_dim", "head_size")
_OF_HEADS = (*_HEAD_SIZES, *_QUERY_COUNTS, *_KEY_COUNTS, "num_key_value_groups")


@dataclass(frozen=True)
class Region:
    """A module with layers whose outputs or inputs stay sharded.

    name: of the module, in its layer; columns: style of each column layer, by its name in the module; rows: names.
    nested: names in the module of other regions inside it.
    """

    name: str
    module: nn.Module
    columns: Mapping[str, Column]
    rows: tuple[str, ...]
    nested: tuple[str, ...] = ()

    def prepare(self, group: Group) -> dict[str, Style]:
        """Return the styles of all modules with weights inside, by names in the layer; set an attention module's heads.

        Raises UnknownRegion, or PartitionError for fewer heads than ranks.
        """
        layers = {name: self.module.get_submodule(name) for name in (*self.columns, *self.rows)}
        for name, layer in layers.items():
            if not isinstance(adapted_by(layer) or layer, nn.Linear):
                raise UnknownRegion(f"has {name}, a {type(layer).__name__} and no nn.Linear")
        if len(self.rows) != 1 or not self.columns:
            counts = f"{len(self.columns)} column and {len(self.rows)} row layers"
            raise UnknownRegion(f"has {counts} ({', '.join(layers)}), where columns must lead to one row layer")
        row: Any = layers.pop(self.rows[0])
        if any(hasattr(self.module, name) for name in _OF_HEADS):
            styles: dict[str, Any] = self._by_heads(layers, row, group)
        else:
            styles = self._by_numbers(layers, row)
        if len(self.columns) > 1:  # they enter the region together, see `connect`
            styles |= {k: replace(styles.get(k, column), in_region=True) for k, column in self.columns.items()}
        inside = f"{self.name}." if self.name else ""
        return {inside + name: style for name, style in styles.items()}

    def connect(self, group: Group) -> None:
        """Let column layers with the same input enter the region together, and give each rank its own dropout masks.

        Call it once the layers are sharded. Dropout of an adapter before a column layer has the same mask on every rank.
        """
        columns: list[Any] = [self.module.get_submodule(name) for name in self.columns]
        row = self.module.get_submodule(self.rows[0])
        if len(columns) > 1:
            entry = _Entry(group)
            for column in columns:
                column.register_forward_pre_hook(entry.enter)
            row.register_forward_pre_hook(entry.leave)
        if self.drops:
            stream = OwnStream(group.own_streams, group.index)
            for column in columns:
                column.register_forward_pre_hook(stream.end)
                column.register_forward_hook(stream.begin)
            row.register_forward_pre_hook(stream.end)

    @property
    def drops(self) -> bool:
        """Whether there is dropout inside, that of adapters aside. In a whole layer the other dropouts are of hidden states."""
        if not self.name:
            return bool(getattr(self.module, "activation_dropout", 0))
        rates = [v for name, v in vars(self.module).items() if "drop" in name and isinstance(v, (int, float))]
        inside = ((n, m) for n, m in self.module.named_modules() if not self._is_adapter(n))
        rates += [m.p for _, m in inside if isinstance(m, nn.modules.dropout._DropoutNd)]
        return any(rates)

    def _by_numbers(self, columns: Mapping[str, Any], row: Any) -> dict[str, Style]:
        """Return the styles of a feed-forward network: each row input comes from one output of each column layer."""
        for name, column in columns.items():
            if column.out_features != self.columns[name].fused * row.in_features:
                raise UnknownRegion(f"has {name} of {column.out_features} outputs before {row.in_features} inputs")
        if self.name:
            return self._others(None)
        # A whole layer has modules outside the region, too: those whose size is that of hidden states work on these.
        for name, module in self._with_weights():
            sizes = {size for parameter in module.parameters(recurse=False) for size in parameter.shape}
            if row.in_features in sizes or row.out_features not in sizes:
                raise UnknownRegion(f"has {name or 'weights of its own'} that may work on what is sharded")
        return {}

    def _with_weights(self) -> list[tuple[str, nn.Module]]:
        """Return the modules with weights of their own besides columns, rows and other regions, by name."""
        known = (*self.columns, *self.rows)
        return [
            (name, module)
            for name, module in self.module.named_modules()
            if name not in known
            and not self._is_adapter(name)
            and not any(f"{name}.".startswith(f"{other}.") for other in self.nested)
            and any(True for _ in module.parameters(recurse=False))
        ]

    def _by_heads(self, columns: Mapping[str, Any], row: Any, group: Group) -> dict[str, Style]:
        """Return the styles of attention: separate projections, or one that has query, key and value of each head in turn."""
        attention: Any = self.module
        size = next((getattr(attention, name) for name in _HEAD_SIZES if hasattr(attention, name)), 0)
        groups = getattr(attention, "num_key_value_groups", 1)
        fused = set(columns) == {"query_key_value"} and groups == 1
        if not size or not (fused or set(columns) == {"q_proj", "k_proj", "v_proj"}):
            raise UnknownRegion(f"has {', '.join(columns)}: no attention whose heads are known here")
        num_kv = (row.in_features if fused else columns["k_proj"].out_features) // size
        heads = AttentionHeads(num_kv * groups, num_kv, 1)

        def of_width(name: str, features: int, num: int) -> AttentionHeads:
            width, rest = divmod(features, num)
            if rest or (fused and name in columns and width != 3 * size):
                raise UnknownRegion(f"has {name} of {features} numbers for {num} heads of {size}")
            return replace(heads, head_dim=width)

        styles = self._others(size)
        for name, column in columns.items():
            if name in ("k_proj", "v_proj"):
                styles[name] = Column(segments=[of_width(name, column.out_features, num_kv).key_value])
            else:
                styles[name] = Column(segments=[of_width(name, column.out_features, heads.num_heads).query])
        name = self.rows[0]
        styles[name] = Row(segments=[of_width(name, row.in_features, heads.num_heads).query])
        _tell_heads(attention, heads, group)
        return styles

    def _others(self, size_of_head: int | None) -> dict[str, Style]:
        """Return the styles of other modules with weights: norms of single heads, whose gradients are partial on each rank."""
        partial: dict[str, Style] = {}
        for name, module in self._with_weights():
            shapes = [list(parameter.shape) for parameter in module.parameters(recurse=False)]
            if not name or any(shape != [size_of_head] for shape in shapes):
                raise UnknownRegion(f"has {name or 'weights of its own'}, which would compute with sharded inputs")
            partial[name] = Whole(partial=True)
        return partial

    def _is_adapter(self, name: str) -> bool:
        """Return whether a module is a part of an adapted column or row layer."""
        return name.startswith(tuple(f"{layer}." for layer in (*self.columns, *self.rows)))


class _Entry:
    """Forward pre-hooks by which layers that are called with one tensor share its way into the region: one all-reduce."""

    def __init__(self, group: Group):
        self._group = group
        self._outside: Tensor | None = None
        self._inside: Tensor | None = None

    def enter(self, column: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments with which a column layer is called instead."""
        if args[0] is not self._outside:
            self._outside, self._inside = args[0], enter_region(args[0], self._group)
        return (self._inside, *args[1:])

    def leave(self, row: nn.Module, args: tuple[Any, ...]) -> None:
        """Forget the input: the next call has another."""
        self._outside = self._inside = None


def regions_of(layer: nn.Module, styles: Mapping[str, Style]) -> list[Region]:
    """Return the modules of a layer inside which these styles leave activations sharded."""
    columns: dict[str, dict[str, Column]] = {}
    rows: dict[str, list[str]] = {}
    for path, style in styles.items():
        parent, _, name = path.rpartition(".")
        if isinstance(style, Column) and not style.gather_output:
            columns.setdefault(parent, {})[name] = style
        elif isinstance(style, Row) and style.input_is_parallel:
            rows.setdefault(parent, []).append(name)
    parents = list(dict.fromkeys((*columns, *rows)))
    nested = tuple(filter(None, parents))  # in the layer itself; others hold no regions
    return [
        Region(
            parent,
            layer.get_submodule(parent),
            columns.get(parent, {}),
            tuple(rows.get(parent, ())),
            () if parent else nested,
        )
        for parent in parents
    ]


def shard_experts(experts: Any, styles: Mapping[str, Style | None], group: Group) -> None:
    """Shard a mixture's experts by the features inside each of them; what enters and leaves them is whole on every rank.

    styles: of each parameter [expert, out, in]. Changed in place. Raises UnknownRegion, and PartitionError, also when
    they are called, for too few features on a rank.
    """
    weights = {name: parameter for name, parameter in experts.named_parameters() if parameter.dim() == 3}
    inside = set()
    for name, style in styles.items():
        if name not in weights or not isinstance(style, (Column, Row)):
            raise UnknownRegion(f"has {name}, which its plan doesn't shard")
        dim, fused = (1, style.fused) if isinstance(style, Column) else (2, 1)
        size, rest = divmod(weights[name].shape[dim], fused)
        inside.add((size, rest))
        whole = cut(size * fused, [size] * fused, group.size)
        setattr(experts, name, sliced(weights[name], whole.slicing(dim, group.index)))
    if len(inside) != 1 or getattr(experts, "is_transposed", False) or not getattr(experts, "is_concatenated", True):
        raise UnknownRegion(
            "stores its weights otherwise than as gate and up [expert, 2 * ffn, hidden], down [expert, hidden, ffn]"
        )

    def check(module: Any) -> None:
        """Raise PartitionError if the operator for all experts at once refuses a rank's features."""
        weight = next(module.parameters())
        aligned = 16 // weight.element_size()  # rows begin at multiples of 16 bytes
        grouped = getattr(getattr(module, "config", None), "_experts_implementation", None) == "grouped_mm"
        if grouped and size % (group.size * aligned):
            raise PartitionError(
                f"experts of {size} features can't be split over {group.size} ranks: in {weight.dtype} torch's grouped_mm "
                f"takes multiples of {aligned} features on each; use fewer tensor-parallel ranks, or load the model with "
                "experts_implementation='eager'"
            )

    def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        check(module)  # the dtype may be another one than when the layer was built
        # Hidden states, and the weights of the experts in the sum, whose gradients are partial too.
        return tuple(
            enter_region(arg, group) if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args
        )

    check(experts)
    experts.register_forward_pre_hook(enter)
    experts.register_forward_hook(lambda _module, _args, output: differentiable.reduce_from_region(output, group))


def _tell_heads(attention: Any, heads: AttentionHeads, group: Group) -> None:
    """Set the attributes of an attention module that count heads to this rank's numbers."""
    (first, last), (start, stop) = (part(group.size, group.index) for part in (heads.query_heads, heads.kv_heads))
    here = {
        **dict.fromkeys(_QUERY_COUNTS, last - first),
        **dict.fromkeys(_KEY_COUNTS, stop - start),
        "num_key_value_groups": (last - first) // (stop - start),
    }
    for name, number in here.items():
        if hasattr(attention, name):
            setattr(attention, name, number)
