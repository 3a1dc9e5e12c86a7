"""The place of a kernel taken by its reference, which also works on the CPU."""

from __future__ import annotations

from torch import Tensor

from parallel3d.comm.collectives import DONE, Group, Work
from parallel3d.kernels.all_reduce_norm import Normed
from parallel3d.kernels.all_reduce_norm_kernel import GatheredNorms


class NormsStandIn(GatheredNorms):
    """Of the all-reduce with a norm behind it; notes the rows of its calls, and how they are made."""

    def __init__(self, group: Group):
        super().__init__(group)
        self.calls: list[tuple[int, str]] = []

    def takes(self, residual: Tensor, weight: Tensor) -> bool:
        return residual.dtype == weight.dtype

    def start(self, out: Normed, x: Tensor, residual: Tensor, weight: Tensor, eps: float, hidden: bool) -> Work:
        self.calls.append((len(out.scale), "hidden" if hidden else "beside"))
        super().norm_into(out, x, residual, weight, eps)
        return DONE

    def norm_into(self, out: Normed, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        self.calls.append((len(out.scale), "at once"))
        super().norm_into(out, x, residual, weight, eps)
