"""Costs of one PyTorch operator: FLOPs of matrix products and of fused attention, bytes moved by all other operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.flop_counter import flop_registry

_ATTENTION = "_scaled_dot_product_"
# They read as many bytes as they write, however large the table is.
_LOOKUPS = {"embedding", "index_select", "index", "gather"}
_WRITE_NOTHING = ("empty", "new_empty", "detach", "alias", "lift")
# GEMMs, [..., m, k] x [..., k, n], with the number of operands that precede the two matrices. PyTorch's own formulas fail
# with an `out_dtype` argument and know no in-place GEMMs.
_GEMMS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1, "baddbmm_": 1}


class OpCost(NamedTuple):
    """Cost of one call of an operator; at most one of the three is not 0.

    - gemm_flops: FLOPs of a matrix product.
    - attention_flops: FLOPs of fused attention.
    - moved: bytes that any other operator reads and writes.
    """

    gemm_flops: float = 0.0
    attention_flops: float = 0.0
    moved: int = 0


class _Kind(NamedTuple):
    """Properties of an operator. writes: whether it writes its result to memory, unlike a view."""

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
    """Return the cost of one call of an operator, from shapes alone.

    read: tensors of its arguments; written: tensors of its result `out`; both from tensors_of.
    """
    kind = _kind_of(func)
    if kind.name in _GEMMS:
        left, right = args[_GEMMS[kind.name] : _GEMMS[kind.name] + 2]
        return OpCost(gemm_flops=2.0 * left.numel() * right.shape[-1])
    if kind.name.startswith(_ATTENTION):
        return OpCost(attention_flops=_attention_flops(func, args, kwargs))
    if kind.packet in flop_registry:
        return OpCost(gemm_flops=float(flop_registry[kind.packet](*args, **kwargs, out_val=out)))
    return OpCost(moved=_bytes_moved(kind, read, written))


def _attention_flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Return the FLOPs of fused attention: two matrix products forward, five backward; half of each if causal.

    PyTorch's own formulas know neither the CPU's kernel, nor causal masks, nor shared key and value heads.
    """
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, value = given["query"], given["key"], given["value"]
    batch_heads, (rows, dim) = query.shape[:-2].numel(), query.shape[-2:]
    columns, width = value.shape[-2:]
    scores = 2 * batch_heads * rows * columns
    assert key.shape[-2] == columns
    # The backward recomputes the scores and computes gradients of probabilities, values, queries and keys.
    matmuls = (3 * dim + 2 * width) if "backward" in func._schema.name else dim + width
    return scores * matmuls / (2 if given.get("is_causal") else 1)


def _bytes_moved(kind: _Kind, read: Sequence[Tensor], written: Sequence[Tensor]) -> int:
    """Return the bytes that an operator reads and writes: none for views and for uninitialized memory."""
    if not written:
        return sum(map(bytes_of, read)) if kind.is_mutable else 0  # works in place and returns nothing
    if not kind.writes:
        return 0
    if not kind.is_mutable:
        given = set(map(storage_of, read))
        if all(storage_of(tensor) in given for tensor in written):
            return 0  # a view, though the operator isn't marked as one
    result = sum(map(bytes_of, written))
    return 2 * result if kind.name in _LOOKUPS else result + sum(map(bytes_of, read))


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors of an operator's arguments or result, which nest lists, tuples and dicts only."""
    tensors: list[Tensor] = []
    _collect(tree, tensors)
    return tensors


def _collect(tree: Any, tensors: list[Tensor]) -> None:
    if isinstance(tree, Tensor):
        tensors.append(tree)
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            _collect(item, tensors)
    elif isinstance(tree, dict):
        for item in tree.values():
            _collect(item, tensors)


def storage_of(tensor: Tensor) -> int:
    """Return a key that identifies a tensor's storage for as long as the storage lives."""
    return int(tensor.untyped_storage()._cdata)


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor in memory; an expanded tensor counts the bytes that exist."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
