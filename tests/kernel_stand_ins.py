"""Stand-ins for the kernels of csrc/ that work on any device: all-gathers, and the kernels' references in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel3d.comm.collectives import Group, all_gather_into
from parallel3d.kernels.all_reduce import all_reduce_ref, register
from parallel3d.kernels.reduce_scatter import reduce_scatter_ref


class GatheredSums:
    """Computes what AllReduce does."""

    def __init__(self, group: Group):
        self._group = group
        self.number = register(self)

    def sum_into(self, out: Tensor, x: Tensor) -> None:
        parts = x.new_empty(self._group.size, x.numel())
        all_gather_into(parts.view(-1), x.view(-1), self._group).wait()
        out.copy_(all_reduce_ref(parts.unbind()).view(x.shape))


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
