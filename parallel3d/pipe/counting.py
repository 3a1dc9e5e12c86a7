"""What one operator of torch's costs: FLOPs of matrix products and of fused attention, bytes that others move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_SCALED = "_scaled_dot_product_"
# They read as much as they write, however large the table is.
_LOOKUPS = {"embedding", "index_select", "index", "gather"}

# Torch's formulas don't know the result's dtype, which may follow the operands.
_OPERANDS = {"mm": 2, "addmm": 3}
# Which torch's formulas know by another name.
_IN_PLACE = {"addmm_", "baddbmm_"}


class OpCost(NamedTuple):
    """gemm_flops: of products of matrices; attention_flops: of fused attention; moved: bytes that another reads and writes."""

    gemm_flops: float = 0.0
    attention_flops: float = 0.0
    moved: int = 0


def cost_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> OpCost:
    """Of one call of an operator, by its arguments' and its result's shapes; one of the three is not 0, or none."""
    packet = getattr(func, "_overloadpacket", func)
    name = getattr(packet, "__name__", "")
    if name.startswith(_SCALED):
        return OpCost(attention_flops=_attention_flops(func, args, kwargs))
    if name in _IN_PLACE:
        packet, name = getattr(torch.ops.aten, name[:-1]), name[:-1]
    if packet in flop_registry:
        if name in _OPERANDS:
            args, kwargs = args[: _OPERANDS[name]], {}
        return OpCost(gemm_flops=float(flop_registry[packet](*args, **kwargs, out_val=out)))
    return OpCost(moved=_bytes_moved(func, name, (args, kwargs), out))


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


def _bytes_moved(func: Any, name: str, given: Any, out: Any) -> int:
    """Bytes that an operator reads and writes; of views and of memory that isn't written none."""
    written = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
    if not written and func._schema.is_mutable:  # only in place
        return sum(_size(t) for t in tree_leaves(given) if isinstance(t, Tensor))
    if not written or name.startswith(("empty", "new_empty", "detach", "alias", "lift")) or func.is_view:
        return 0
    read = [t for t in tree_leaves(given) if isinstance(t, Tensor)]
    if not func._schema.is_mutable and all(storage_of(w) in set(map(storage_of, read)) for w in written):
        return 0  # a view that goes by another name
    result = sum(map(_size, written))
    return 2 * result if name in _LOOKUPS else result + sum(map(_size, read))


def storage_of(tensor: Tensor) -> int:
    """What tells the memory behind a tensor from that of others, while it lives."""
    return int(tensor.untyped_storage()._cdata)


def _size(tensor: Tensor) -> int:
    """Bytes behind a tensor: of an expanded one those that are there."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
