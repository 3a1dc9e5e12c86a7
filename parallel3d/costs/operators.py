"""Costs of one PyTorch operator: FLOPs of matrix products and of fused attention, bytes moved by all other operators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

_ATTENTION = "_scaled_dot_product_"
# Operators that read as many bytes as they write, however large the table is.
_LOOKUPS = {"embedding", "index_select", "index", "gather"}
_WRITE_NOTHING = ("empty", "new_empty", "lift")
# GEMMs, [..., m, k] x [..., k, n], with the number of operands that precede the two matrices. PyTorch's own formulas fail
# with an `out_dtype` argument and know no in-place GEMMs.
_GEMMS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1, "baddbmm_": 1}
# Products of experts with their tokens, the rows or columns of one matrix, and the field of Work that they count for.
_GROUPED = {"_grouped_mm": "gemm_flops", "_scaled_grouped_mm": "fp8_flops"}


def cost_of(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    read: Sequence[Tensor],
    written: Sequence[Tensor],
    out: Any,
) -> tuple[str, float]:
    """Return the cost of a call of an operator that makes no view: the field of Work that it counts for, and the number.

    It depends only on shapes. The field is `gemm_flops` for a matrix product, `attention_flops` for fused attention,
    `moved` for any other operator.
    read: tensors of its arguments; written: tensors of its result `out`; both from tensors_of.
    """
    packet = getattr(func, "_overloadpacket", func)
    name = str(getattr(packet, "__name__", ""))
    if name in _GEMMS:
        left, right = args[_GEMMS[name] : _GEMMS[name] + 2]
        return "gemm_flops", 2.0 * left.numel() * right.shape[-1]
    if name in _GROUPED:
        left, right = args[:2]
        # With a matrix for each expert and tokens along the result's columns, each expert multiplies only its own tokens.
        experts = left.shape[0] if left.dim() > right.dim() else 1
        return _GROUPED[name], 2.0 * left.numel() * right.shape[-1] / experts
    if name.startswith(_ATTENTION):
        return "attention_flops", _attention_flops(func, args, kwargs)
    if packet in flop_registry:
        return "fp8_flops" if name == "_scaled_mm" else "gemm_flops", float(
            flop_registry[packet](*args, **kwargs, out_val=out)
        )
    return "moved", _bytes_moved(func, name, read, written)


def step_flops(forward: float, parameters: Iterable[nn.Parameter]) -> float:
    """Return the FLOPs of a step from those of its forwards. parameters: of the layers; some may be frozen.

    A backward has each product of the forward once more for the gradient of an activation, and again for that of a weight.
    """
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    frozen = sum(parameter.numel() for parameter in matrices if not parameter.requires_grad)
    return forward * (3 - frozen / max(1, sum(parameter.numel() for parameter in matrices)))


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


def _bytes_moved(func: Any, name: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> int:
    """Return the bytes that an operator, no view, reads and writes: none for uninitialized memory."""
    is_mutable = func._schema.is_mutable
    if not written:
        return sum(map(bytes_of, read)) if is_mutable else 0  # works in place and returns nothing
    if name.startswith(_WRITE_NOTHING):
        return 0
    if not is_mutable and {storage_of(tensor) for tensor in written} <= {storage_of(tensor) for tensor in read}:
        return 0  # a view, though the operator isn't marked as one
    result = sum(map(bytes_of, written))
    return 2 * result if name in _LOOKUPS else result + sum(map(bytes_of, read))


class MetaResults:
    """Results of operators on meta tensors: a call like an earlier one, by shapes, strides and dtypes, doesn't run again.

    PyTorch computes the shapes of most results in Python, which takes longer than all that is counted of an operator.
    """

    def __init__(self) -> None:
        # Call -> shape, stride and dtype of the new tensor; None for the argument in which the operator works.
        self._known: dict[Any, tuple[torch.Size, tuple[int, ...], torch.dtype] | None] = {}

    def call(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], read: Sequence[Tensor]) -> Any:
        """Return function(*args, **kwargs). read: the tensors of the arguments."""
        call = self._key(function, args, kwargs)
        given = kwargs.get("out", args[0] if args else None)
        if call in self._known:
            known = self._known[call]
            return given if known is None else _empty(*known)
        result = function(*args, **kwargs)
        if type(result) is not Tensor or not result.is_meta:
            return result
        if storage_of(result) not in map(storage_of, read):
            new = result.shape, result.stride(), result.dtype
            if _empty(*new).untyped_storage().nbytes() == result.untyped_storage().nbytes():
                self._known[call] = new
        elif result is given and call == self._key(function, args, kwargs):  # it has the same shape as before
            self._known[call] = None
        return result

    @staticmethod
    def _key(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        return function, torch.get_default_dtype(), _described(args), _described(tuple(kwargs.items()))


def _empty(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _described(value: Any) -> Any:
    """Return a key of arguments of an operator without their memory."""
    if isinstance(value, Tensor):
        return type(value), value.device, value.dtype, value.shape, value.stride()
    if isinstance(value, (tuple, list)):
        return tuple([_described(each) for each in value])
    return (type(value), value)


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors of an operator's arguments or result."""
    if isinstance(tree, Tensor):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else ()
    return [tensor for value in values for tensor in tensors_of(value)]


def storage_of(tensor: Tensor) -> int:
    """Return a key that identifies a tensor's storage for as long as the storage lives."""
    return int(tensor.untyped_storage()._cdata)


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor in memory; an expanded tensor counts the bytes that exist."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
