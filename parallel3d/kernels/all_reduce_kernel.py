"""The all-reduce of tensor slices by a kernel of this package, over NVLink, where every rank of a group can have it."""

from __future__ import annotations

import itertools
import warnings
from functools import lru_cache, partial

import torch
from torch import Tensor

from parallel3d.comm.collectives import Group, Work, all_gather_into
from parallel3d.comm.environment import DEFAULT_TIMEOUT
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.obstacles import Obstacle
from parallel3d.comm.peer.peer_calls import PeerCalls, open_kernel
from parallel3d.comm.peer.streams import Copied
from parallel3d.errors import CommunicationError, KernelError
from parallel3d.kernels.all_reduce import HALF_BYTES, MOST_BYTES, all_reduce_ref, pieces
from parallel3d.kernels.peers import DTYPES, register

_TRIAL_SIZES = (3, 2**18 + 3)  # summed in one shot and, by 4 ranks or more, in two


class AllReduce:
    """Sums tensors over one group by csrc/all_reduce.cu, in rank order in fp32: bitwise the same on all ranks and every time.

    Every rank makes the same calls in the same order. A peer that comes later than `limit_s` ends the wait: the result is
    NaN, and the next call here, or `raise_if_failed`, raises; nothing of this group's is summed any more. number: for the
    operators parallel3d::all_reduce and all_reduce_. Made by open_all_reduce.
    """

    def __init__(self, calls: PeerCalls):
        self.calls = calls
        self.number = register(self)
        self._beside = torch.cuda.Stream(calls.device, priority=-1)
        self._pieces = lru_cache(1024)(
            partial(pieces, world_size=calls.group.size, threads=int(calls.compiled.p3d_all_reduce_threads()))
        )

    def takes(self, x: Tensor) -> bool:
        """Whether the kernel sums such tensors; the same on every rank, where they are alike."""
        return x.is_cuda and x.dtype in DTYPES and x.nbytes <= MOST_BYTES

    def start(self, x: Tensor) -> Work:
        """See collectives.ReduceKernel."""
        self._beside.wait_stream(torch.cuda.current_stream(self.calls.device))
        with torch.cuda.stream(self._beside):
            self.sum_into(x, x)
        # It is summed even if a failure has made everyone here forget the memory.
        x.record_stream(self._beside)
        return Copied(self._beside.record_event(), x)

    def sum_into(self, out: Tensor, x: Tensor) -> None:
        """See kernels.all_reduce.Sums. Raises CommunicationError after a peer was late, KernelError."""
        calls = self.calls
        stream = calls.follow()
        width, source, target = x.element_size(), x.data_ptr(), out.data_ptr()
        for piece in self._pieces(x.numel(), width):
            status = calls.compiled.p3d_all_reduce(
                piece.two_shot,
                DTYPES[x.dtype],
                calls.group.size,
                calls.group.index,
                source + piece.start * width,
                target + piece.start * width,
                piece.size,
                calls.staging,
                calls.pads,
                calls.state,
                calls.report,
                HALF_BYTES,
                calls.limit_ns,
                piece.blocks,
                calls.device.index,
                stream,
            )
            calls.check("p3d_all_reduce", status)

    def works(self) -> bool:
        """See peer_calls.Kernel."""
        good, group = True, self.calls.group
        try:
            for dtype, size in itertools.product(DTYPES, _TRIAL_SIZES):
                x = torch.full((size,), 1 + group.index, dtype=dtype, device=self.calls.device)
                self.sum_into(x, x)
                good = good and bool((x == group.size * (group.size + 1) // 2).all())
        except (CommunicationError, KernelError):
            return False
        return good


class GatheredSums:
    """The same numbers by all-gather and the kernel's reference, on any device: what the kernel is compared with."""

    def __init__(self, group: Group):
        self._group = group
        self.number = register(self)

    def sum_into(self, out: Tensor, x: Tensor) -> None:
        """See kernels.all_reduce.Sums."""
        parts = x.new_empty(self._group.size, x.numel())
        all_gather_into(parts.view(-1), x.view(-1), self._group).wait()
        out.copy_(all_reduce_ref(parts.unbind()).view(x.shape))


def open_all_reduce(
    groups: ProcessGroups,
    device: torch.device,
    limit_s: float = DEFAULT_TIMEOUT.total_seconds(),
) -> AllReduce | None:
    """Open the kernel for this rank's group; None unless every group of the world can have it.

    One warning says why it is not available. Collective over the world. limit_s: how long a kernel waits for
    a peer.
    """
    if groups.model.size == 1:
        return None
    found = open_kernel(groups, "model", device, "all_reduce", 2 * HALF_BYTES, AllReduce, limit_s, "tensor slices")
    if not isinstance(found, Obstacle):
        return found
    if groups.rank == 0:
        warnings.warn(f"kernels.all_reduce: {found}; {groups.backend} sums tensor slices instead", stacklevel=2)
    return None
