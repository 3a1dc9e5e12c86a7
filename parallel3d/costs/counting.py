"""What one operator of torch's costs: FLOPs of matrix products and of fused attention, bytes that others move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.flop_counter import flop_registry

_SCALED = "_scaled_dot_product_"
# They read as much as they write, however large the table is.
_LOOKUPS = {"embedding", "index_select", "index", "gather"}
_WRITE_NOTHING = ("empty", "new_empty", "detach", "alias", "lift")
# [..., m, k] x [..., k, n]: behind how many other operands these come. Torch's formulas don't know that a dtype may follow,
# nor the products that add in place.
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1, "baddbmm_": 1}


class OpCost(NamedTuple):
    """gemm_flops: of products of matrices; attention_flops: of fused attention; moved: bytes that another reads and writes."""

    gemm_flops: float = 0.0
    attention_flops: float = 0.0
    moved: int = 0


class _Kind(NamedTuple):
    """Of an operator. writes: whether it is no mere view, and writes what it returns."""

    name: str
    packet: Any
    writes: bool
    is_mutable: bool


@cache
def _kind_of(func: Any) -> _Kind:
    packet = getattr(func, "_overloadpacket", func)
    name = str(getattr(packet, "__name__", ""))
    schema = func._schema
    return _Kind(name, packet, not (name.startswith(_WRITE_NOTHING) or func.is_view), schema.is_mutable)


def cost_of(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    read: Sequence[Tensor],
    written: Sequence[Tensor],
    out: Any,
) -> OpCost:
    """Of one call of an operator, by shapes; at most one of the three is not 0. read, written: tensors_of its arguments and of
    its result `out`.
    """
    kind = _kind_of(func)
    if kind.name in _PRODUCTS:
        left, right = args[_PRODUCTS[kind.name] : _PRODUCTS[kind.name] + 2]
        return OpCost(gemm_flops=2.0 * left.numel() * right.shape[-1])
    if kind.name.startswith(_SCALED):
        return OpCost(attention_flops=_attention_flops(func, args, kwargs))
    if kind.packet in flop_registry:
        return OpCost(gemm_flops=float(flop_registry[kind.packet](*args, **kwargs, out_val=out)))
    return OpCost(moved=_bytes_moved(kind, read, written))


def _attention_flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Of fused attention, on whatever device: two products of matrices forward, five backward; half of each where causal.

    torch's own formulas know neither the kernel for the CPU, nor causal masks, nor heads that share keys and values.
    """
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, value = given["query"], given["key"], given["value"]
    batch_heads, (rows, dim) = query.shape[:-2].numel(), query.shape[-2:]
    columns, width = value.shape[-2:]
    scores = 2 * batch_heads * rows * columns
    assert key.shape[-2] == columns
    # Backward: the scores once more, the gradients of probabilities and values, of queries and keys.
    matmuls = (3 * dim + 2 * width) if "backward" in func._schema.name else dim + width
    return scores * matmuls / (2 if given.get("is_causal") else 1)


def _bytes_moved(kind: _Kind, read: Sequence[Tensor], written: Sequence[Tensor]) -> int:
    """Bytes that an operator reads and writes; of views and of memory that isn't written none."""
    if not written:
        return sum(map(bytes_of, read)) if kind.is_mutable else 0  # in place alone
    if not kind.writes:
        return 0
    if not kind.is_mutable:
        given = set(map(storage_of, read))
        if all(storage_of(tensor) in given for tensor in written):
            return 0  # a view that goes by another name
    result = sum(map(bytes_of, written))
    return 2 * result if kind.name in _LOOKUPS else result + sum(map(bytes_of, read))


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of an operator's arguments or result: lists, tuples and mappings of them are all that those nest."""
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Tensor]) -> None:
    if isinstance(tree, Tensor):
        found.append(tree)
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            _collect(item, found)
    elif isinstance(tree, dict):
        for item in tree.values():
            _collect(item, found)


def storage_of(tensor: Tensor) -> int:
    """What tells the memory behind a tensor from that of others, while it lives."""
    return int(tensor.untyped_storage()._cdata)


def bytes_of(tensor: Tensor) -> int:
    """Bytes behind a tensor: of an expanded one those that are there."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
