"""Fake tensors on the CPU that stand for tensors on CUDA: what a machine without a GPU traces layers with.

Fake tensors can be on CUDA themselves, but autograd refuses those where PyTorch has none.
"""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


class StandIns(FakeTensorMode):
    """A mode whose fake tensors, all on the CPU, stand for tensors on a device of this type, "cpu" or "cuda"."""

    def __init__(self, device_type: str):
        super().__init__(allow_non_fake_inputs=True)
        self.stands_for = device_type


def on_cuda(tensor: Tensor) -> bool:
    """Whether a tensor is on CUDA, or stands for one that is: what code asks that chooses a way of its own for CUDA."""
    return tensor.is_cuda or (isinstance(tensor, FakeTensor) and _stands_for_cuda(tensor))


def _stands_for_cuda(tensor: FakeTensor) -> bool:
    return isinstance(tensor.fake_mode, StandIns) and tensor.fake_mode.stands_for == "cuda"
