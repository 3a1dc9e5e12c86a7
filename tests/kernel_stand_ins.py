"""Stand-ins for the kernels of csrc/ that work on any device: all-gathers, and the kernels' references in torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel3d.comm.collectives import Group, all_gather_into


def all_reduce_ref(parts: Sequence[Tensor]) -> Tensor:
    """Sum equal tensors in their order, at least in fp32, and return the sum in their dtype."""
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)


def reduce_scatter_ref(parts: Sequence[Tensor], wire: torch.dtype) -> Tensor:
    """Round equal tensors to the dtype in which they travel and return their sum in fp32, in their order."""
    total = parts[0].to(wire).float()
    for part in parts[1:]:
        total = total + part.to(wire).float()
    return total


class GatheredSums:
    """Computes what AllReduce does."""

    def __init__(self, group: Group):
        self._group = group

    def sum_into(self, out: Tensor, x: Tensor) -> None:
        parts = x.new_empty(self._group.size, x.numel())
        all_gather_into(parts.view(-1), x.view(-1), self._group).wait()
        out.copy_(all_reduce_ref(parts.unbind()).view(x.shape))

    def raise_if_failed(self) -> None:
        """No peer is late."""


class GatheredReductions:
    """Computes what ReduceScatter does."""

    def __init__(self, group: Group):
        self._group = group

    def reduce_into(
        self, output: Tensor, whole: Tensor, wire: torch.dtype, accumulate: bool, squares: Tensor | None
    ) -> None:
        parts = whole.new_empty(self._group.size, self._group.size, output.numel())
        all_gather_into(parts.view(-1), whole.view(-1), self._group).wait()
        total = reduce_scatter_ref(parts[:, self._group.index].unbind(), wire)
        output.copy_(total + output.float() if accumulate else total)
        if squares is not None:
            squares.zero_()
            squares[0] = output.double().square().sum()


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
