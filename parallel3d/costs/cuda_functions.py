"""CUDA's way through functions of torch's that go another way on the CPU, for fake tensors that stand for CUDA's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel3d.fake_device import on_cuda
from parallel3d.kernels.rms_norm import rms_norm

_HALF = (torch.bfloat16, torch.float16)


@contextmanager
def cuda_functions() -> Iterator[None]:
    """Inside, attention, dropout and norms of tensors that stand for CUDA's are the operators that run there.

    Of user code, that which calls them as torch.nn.functional.NAME, F.NAME or by torch's modules.
    """
    with ExitStack() as stack:
        for name, function in _REPLACED.items():
            stack.enter_context(patch.object(F, name, partial(function, getattr(F, name))))
        yield


def _attention(
    original: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """F.scaled_dot_product_attention as CUDA has it: fused, which keeps queries, keys, values, result and a number a row.

    Of kernels that keep the same, cuDNN's for half precision, the memory-efficient one for others. (With shared key and value
    heads that one needs copies of them.)
    """
    if not on_cuda(query) or query.dim() != 4:
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return original(query, key, value, attn_mask, dropout_p, is_causal, **options)
    keeps = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    aten: Any = torch.ops.aten
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # PyTorch turns it into what is added to the scores.
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
    if query.dtype in _HALF:
        cudnn = aten._scaled_dot_product_cudnn_attention
        found = cudnn(query, key, value, attn_mask, keeps, dropout_p, is_causal, False, scale=scale)
    else:
        if key.shape[1] != query.shape[1]:
            key, value = (heads.repeat_interleave(query.shape[1] // heads.shape[1], 1) for heads in (key, value))
        efficient = aten._scaled_dot_product_efficient_attention
        found = efficient(query, key, value, attn_mask, keeps, dropout_p, is_causal, scale=scale)
    result: Tensor = found[0]
    return result


def _dropout(
    original: Callable[..., Tensor], input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """F.dropout as CUDA has it, whose mask takes a byte a number."""
    if not on_cuda(input) or not training or inplace or not 0 < p < 1:
        return original(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _rms_norm(
    original: Callable[..., Tensor],
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """F.rms_norm as CUDA has it, one kernel that keeps its input and a number a row."""
    if not on_cuda(input) or weight is None or len(normalized_shape) != 1:
        return original(input, normalized_shape, weight, eps)
    return rms_norm(input, weight, torch.finfo(input.dtype).eps if eps is None else eps)[0]


_REPLACED: dict[str, Callable[..., Tensor]] = {
    "scaled_dot_product_attention": _attention,
    "dropout": _dropout,
    "rms_norm": _rms_norm,
}
