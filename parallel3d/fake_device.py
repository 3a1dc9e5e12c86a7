"""Tensors without memory that stand for tensors on CUDA: what a machine without a GPU traces layers with.

They are on the meta device, or fake ones on the CPU. Fake ones can be on CUDA themselves, but autograd refuses those where
PyTorch has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_STANDS_FOR: ContextVar[str] = ContextVar("stands_for", default="")


@contextmanager
def standing_for(device_type: str) -> Iterator[None]:
    """Inside, tensors without memory stand for tensors on a device of this type."""
    token = _STANDS_FOR.set(device_type)
    try:
        yield
    finally:
        _STANDS_FOR.reset(token)


def has_memory(tensor: Tensor) -> bool:
    """Whether there are values, for a kernel to work on."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def on_cuda(tensor: Tensor) -> bool:
    """Whether a tensor is on CUDA, or stands for one that is: what code asks that chooses a way of its own for CUDA."""
    return tensor.is_cuda or (_STANDS_FOR.get() == "cuda" and not has_memory(tensor))
