"""AdamW in one pass over memory (csrc/adamw.cu): how parameters are laid out for it, and the reference in torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel3d.kernels.workspace import VECTOR_BYTES

MAX_BLOCKS = 128
MAX_GROUPS = 32  # of parameters; csrc/adamw.cuh


@dataclass(frozen=True)
class Settings:
    """Of a parameter group, as torch.optim.AdamW has them."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool

    def numbers(self) -> tuple[float, ...]:
        """As the launcher takes them."""
        return self.lr, *self.betas, self.eps, self.weight_decay, self.decoupled


@dataclass(frozen=True)
class Part:
    """What is updated of one parameter: tensors of its size, fp32 but for the gradient, which may be as the weights.

    step: fp32, on the device, which step it is. place: of the first element in the bucket's weights; group: the number of its
    parameter group.
    """

    master: Tensor
    gradient: Tensor
    average: Tensor
    square_average: Tensor
    step: Tensor
    place: int
    group: int


def adamw_ref(part: Part, settings: Settings, divisor: Tensor | None, weight_dtype: torch.dtype) -> Tensor:
    """Update a part's master and moments; returns the weights. divisor: of the gradient, a scalar. (arXiv:1711.05101)"""
    beta1, beta2 = settings.betas
    step = part.step.item()
    gradient = part.gradient.float()
    gradient = gradient if divisor is None else gradient / divisor.float()
    if settings.decoupled:
        part.master.mul_(1 - settings.lr * settings.weight_decay)
    else:
        gradient = gradient + settings.weight_decay * part.master
    part.average.mul_(beta1).add_(gradient, alpha=1 - beta1)
    part.square_average.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (part.square_average.sqrt() / (1 - beta2**step) ** 0.5).add_(settings.eps)
    part.master.addcdiv_(part.average, root, value=-settings.lr / (1 - beta1**step))
    return part.master.to(weight_dtype)


def table(parts: Sequence[Part], weight_bytes: int) -> tuple[Tensor, int]:
    """The parts as the kernel reads them, in the order of their places, int64 [parts, 9] on the CPU; and their vectors.

    A vector has 16 bytes of weights.
    """
    rows, end = [], 0
    for part in parts:
        tensors = (part.master, part.gradient, part.average, part.square_average, part.step)
        numel = part.master.numel()
        end += -(-numel * weight_bytes // VECTOR_BYTES)
        rows.append([*(tensor.data_ptr() for tensor in tensors), numel, part.place, end, part.group])
    return torch.tensor(rows, dtype=torch.int64), end


def numbers(groups: Sequence[Settings]) -> Any:
    """The settings of all groups as C takes them."""
    flat = [number for settings in groups for number in settings.numbers()]
    return (ctypes.c_double * len(flat))(*flat)
