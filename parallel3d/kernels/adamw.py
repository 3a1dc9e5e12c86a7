"""AdamW in one pass over memory (csrc/adamw.cu): the layout of its parameters, and its reference in torch."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel3d.kernels.workspace import VECTOR_BYTES

MAX_BLOCKS = 128
MAX_GROUPS = 32  # of parameters; csrc/adamw.cuh


@dataclass(frozen=True)
class Part:
    """Updated part of one parameter: tensors of equal size in fp32, the gradient in fp32 or the weights' dtype.

    - step: number of the step, fp32, on the device.
    - place: index of the first element in the bucket's weights.
    - group: index of its parameter group.
    """

    master: Tensor
    gradient: Tensor
    average: Tensor
    square_average: Tensor
    step: Tensor
    place: int
    group: int


def adamw_ref(part: Part, settings: Mapping[str, Any], divisor: Tensor | None, weight_dtype: torch.dtype) -> Tensor:
    """Update a part's master and moments and return the weights. arXiv:1711.05101.

    - settings: the parameter group of torch's optimizer.
    - divisor: of the gradient, a scalar.
    """
    (beta1, beta2), rate, decay = settings["betas"], settings["lr"], settings["weight_decay"]
    step = part.step.item()
    gradient = part.gradient.float()
    gradient = gradient if divisor is None else gradient / divisor.float()
    if settings["decoupled_weight_decay"]:
        part.master.mul_(1 - rate * decay)
    else:
        gradient = gradient + decay * part.master
    part.average.mul_(beta1).add_(gradient, alpha=1 - beta1)
    part.square_average.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (part.square_average.sqrt() / (1 - beta2**step) ** 0.5).add_(settings["eps"])
    part.master.addcdiv_(part.average, root, value=-rate / (1 - beta1**step))
    return part.master.to(weight_dtype)


def table(parts: Sequence[Part], weight_bytes: int) -> tuple[Tensor, int]:
    """Return the parts as the kernel reads them, int64 [parts, 9] on the CPU, and their number of vectors.

    parts: in the order of their places. A vector has 16 bytes of weights.
    """
    rows, end = [], 0
    for part in parts:
        tensors = (part.master, part.gradient, part.average, part.square_average, part.step)
        numel = part.master.numel()
        end += -(-numel * weight_bytes // VECTOR_BYTES)
        rows.append([*(tensor.data_ptr() for tensor in tensors), numel, part.place, end, part.group])
    return torch.tensor(rows, dtype=torch.int64), end


def settings_array(groups: Sequence[Mapping[str, Any]]) -> Any:
    """Return the settings of torch's parameter groups as an array for C, in the order of csrc/adamw.cuh."""
    flat: list[float] = []
    for group in groups:
        flat += [group["lr"], *group["betas"], group["eps"], group["weight_decay"], group["decoupled_weight_decay"]]
    return (ctypes.c_double * len(flat))(*flat)
