"""Tensors without memory that stand for CUDA tensors, so that layers can be traced on a machine without a GPU.

They are meta tensors, or fake tensors on the CPU. Fake tensors could have a CUDA device, but autograd refuses them if
PyTorch is built without CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_STANDS_FOR: ContextVar[str] = ContextVar("stands_for", default="")


@contextmanager
def standing_for(device_type: str) -> Iterator[None]:
    """Let tensors without memory stand for tensors on a device of this type in the block."""
    token = _STANDS_FOR.set(device_type)
    try:
        yield
    finally:
        _STANDS_FOR.reset(token)


def has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has values for a kernel to work on."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def on_cuda(tensor: Tensor) -> bool:
    """Return whether a tensor is on CUDA or stands for one that is: asked by code that differs on CUDA."""
    if tensor.is_cuda or torch.compiler.is_compiling():  # torch.compile can't read the context
        return tensor.is_cuda
    return _STANDS_FOR.get() == "cuda" and not has_memory(tensor)
