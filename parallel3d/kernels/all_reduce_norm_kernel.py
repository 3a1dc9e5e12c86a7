"""The all-reduce of tensor slices with residual and RMSNorm behind it, by one kernel, which shares the all-reduce's memory."""

from __future__ import annotations

import itertools
import warnings
from functools import lru_cache, partial

import torch
from torch import Tensor

from parallel3d.comm.collectives import Group, Work, all_gather_into
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.obstacles import Obstacle
from parallel3d.comm.peer.peer_calls import WRONG, works_everywhere
from parallel3d.errors import CommunicationError, KernelError
from parallel3d.kernels.all_reduce import HALF_BYTES, MAX_BLOCKS, most_blocks
from parallel3d.kernels.all_reduce_kernel import AllReduce
from parallel3d.kernels.all_reduce_norm import LONGEST, Normed, all_reduce_norm_ref, empty_normed, rows_pieces
from parallel3d.kernels.peers import DTYPES, register

_TRIAL_SHAPES = ((3, 5), (300, 1024))  # in one shot and in two
_TRIAL_EPS = 1e-5

SHARES = Obstacle(
    "it shares the memory of the kernel that sums tensor slices, which is off", "set kernels.all_reduce to true"
)


class AllReduceNorm:
    """hidden = residual + the sum of x over one group, and RMSNorm of that, by csrc/all_reduce_norm.cu.

    hidden is bit by bit what `sums` and torch's addition give, and all results are the same on all ranks and every time. Calls
    are made as those of `sums`, and fail with them. number: for the operator parallel3d::all_reduce_rms_norm.
    """

    def __init__(self, sums: AllReduce):
        self.calls, self._sums = sums.calls, sums
        self.number = register(self)
        threads = int(self.calls.compiled.p3d_all_reduce_threads())
        self._pieces = lru_cache(1024)(partial(rows_pieces, world_size=self.calls.group.size, threads=threads))

    def takes(self, residual: Tensor, weight: Tensor) -> bool:
        """See collectives.ReduceNormKernel."""
        fits = residual.dtype == weight.dtype and residual.numel() > 0 and residual.shape[-1] <= LONGEST
        return fits and self._sums.takes(residual)

    def start(self, out: Normed, x: Tensor, residual: Tensor, weight: Tensor, eps: float, hidden: bool) -> Work:
        """See collectives.ReduceNormKernel."""
        return self._sums.beside(partial(self._norm, out, x, residual, weight, eps, most_blocks(hidden)), x)

    def norm_into(self, out: Normed, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        """See kernels.all_reduce_norm.NormedSums. Raises CommunicationError after a peer was late, KernelError."""
        self._norm(out, x, residual, weight, eps, MAX_BLOCKS)

    def _norm(self, out: Normed, x: Tensor, residual: Tensor, weight: Tensor, eps: float, most: int) -> None:
        calls = self.calls
        stream = calls.follow()
        columns, width = weight.numel(), x.element_size()
        for piece in self._pieces(out.scale.numel(), columns, width):
            first = piece.start * columns * width
            status = calls.compiled.p3d_all_reduce_norm(
                piece.two_shot,
                DTYPES[x.dtype],
                calls.group.size,
                calls.group.index,
                x.data_ptr() + first,
                residual.data_ptr() + first,
                weight.data_ptr(),
                out.hidden.data_ptr() + first,
                out.normed.data_ptr() + first,
                out.scale.data_ptr() + piece.start * out.scale.element_size(),
                piece.rows,
                columns,
                eps,
                piece.team,
                calls.staging,
                calls.pads,
                calls.state,
                calls.report,
                HALF_BYTES,
                calls.limit_ns,
                min(piece.blocks, most),
                calls.device.index,
                stream,
            )
            calls.check("p3d_all_reduce_norm", status)

    def works(self) -> bool:
        """See peer_calls.Kernel."""
        good, group = True, self.calls.group
        try:
            for dtype, shape in itertools.product(DTYPES, _TRIAL_SHAPES):
                x = torch.full(shape, 1 + group.index, dtype=dtype, device=self.calls.device)
                residual, weight = torch.ones_like(x), torch.ones_like(x[0])
                parts = [torch.full_like(x, 1 + rank) for rank in range(group.size)]
                right = all_reduce_norm_ref(parts, residual, weight, _TRIAL_EPS)
                out = empty_normed(x)
                self.norm_into(out, x, residual, weight, _TRIAL_EPS)
                close = (torch.allclose(a.float(), b.float(), rtol=1e-2) for a, b in zip(out, right, strict=True))
                good = good and torch.equal(out.hidden, right.hidden) and all(close)
        except (CommunicationError, KernelError):
            return False
        return good


class GatheredNorms:
    """The same numbers by all-gather and the kernel's reference, on any device: what the kernel is compared with."""

    def __init__(self, group: Group):
        self._group = group
        self.number = register(self)

    def norm_into(self, out: Normed, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        """See kernels.all_reduce_norm.NormedSums."""
        parts = x.new_empty(self._group.size, *x.shape)
        all_gather_into(parts.view(-1), x.view(-1), self._group).wait()
        for target, result in zip(out, all_reduce_norm_ref(parts.unbind(), residual, weight, eps), strict=True):
            target.copy_(result)


def open_all_reduce_norm(groups: ProcessGroups, asked: bool) -> None:
    """Let the group of tensor slices sum and normalize by one kernel, if that is asked for and it has the all-reduce's.

    One warning says why what was asked for is not to be had. Collective over the world.
    """
    groups.model.kernels.all_reduce_norm = None
    if not asked or groups.model.size == 1:
        return
    found = _opened(groups)
    if not isinstance(found, Obstacle):
        groups.model.kernels.all_reduce_norm = found
    elif groups.rank == 0:
        instead = "sums, residuals and norms are computed one after the other instead"
        warnings.warn(f"kernels.all_reduce_norm: {found}; {instead}", stacklevel=2)


def _opened(groups: ProcessGroups) -> AllReduceNorm | Obstacle:
    sums = groups.model.kernels.all_reduce
    if not isinstance(sums, AllReduce):
        return SHARES
    made = AllReduceNorm(sums)
    return made if works_everywhere(made, groups.control) else WRONG
