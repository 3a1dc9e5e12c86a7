"""The reduction of gradients over data parallelism by a kernel of this package, over NVLink, where every rank can have it."""

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
from parallel3d.kernels.peers import DTYPES, register
from parallel3d.kernels.reduce_scatter import BESIDE_BLOCKS, HALF_BYTES, MAX_BLOCKS, pieces, reduce_scatter_ref

_TRIAL_SIZES = (3, 2**16 + 3)


class ReduceScatter:
    """Sums gradients over one group by csrc/reduce_scatter.cu, in fp32 and in rank order, whatever they travel in.

    Every rank makes the same calls in the same order. A peer that comes later than the calls' limit ends the wait: the result
    is NaN, and the next call raises. number: for the operator parallel3d::reduce_scatter_. Made by open_reduce_scatter.
    """

    def __init__(self, calls: PeerCalls):
        self.calls = calls
        self.number = register(self)
        self._beside = torch.cuda.Stream(calls.device, priority=-1)
        threads = int(calls.compiled.p3d_all_reduce_threads())
        self._pieces = lru_cache(1024)(partial(pieces, world_size=calls.group.size, threads=threads))

    def takes(self, whole: Tensor, output: Tensor, wire: torch.dtype) -> bool:
        """Whether the kernel reduces such tensors; the same on every rank, where they are alike."""
        known = whole.dtype in (torch.float32, wire) and wire in DTYPES
        return whole.is_cuda and whole.dtype == output.dtype and known

    def squares_size(self, numel: int, wire: torch.dtype) -> int:
        """Of the tensor that gets a shard's sums of squares."""
        return len(self._pieces(numel, wire.itemsize)) * MAX_BLOCKS

    def start(self, output: Tensor, whole: Tensor, wire: torch.dtype, accumulate: bool, squares: Tensor | None) -> Work:
        """See kernels.reduce_scatter.Reductions; beside the current stream."""
        self._beside.wait_stream(torch.cuda.current_stream(self.calls.device))
        with torch.cuda.stream(self._beside):
            self._reduce(output, whole, wire, accumulate, squares, BESIDE_BLOCKS)
        # It is reduced even if a failure has made everyone here forget the memory.
        whole.record_stream(self._beside)
        output.record_stream(self._beside)
        return Copied(self._beside.record_event(), whole)

    def reduce_into(
        self, output: Tensor, whole: Tensor, wire: torch.dtype, accumulate: bool, squares: Tensor | None
    ) -> None:
        """See kernels.reduce_scatter.Reductions. Raises CommunicationError after a peer was late, KernelError."""
        self._reduce(output, whole, wire, accumulate, squares, MAX_BLOCKS)

    def _reduce(
        self,
        output: Tensor,
        whole: Tensor,
        wire: torch.dtype,
        accumulate: bool,
        squares: Tensor | None,
        most_blocks: int,
    ) -> None:
        calls, size = self.calls, output.numel()
        stream = calls.follow()
        if squares is not None:
            squares.zero_()  # a short piece has fewer blocks
        source, target, width = whole.data_ptr(), output.data_ptr(), whole.itemsize
        for k, piece in enumerate(self._pieces(size, wire.itemsize, most_blocks=most_blocks)):
            status = calls.compiled.p3d_reduce_scatter(
                DTYPES[wire],
                whole.dtype != wire,
                calls.group.size,
                calls.group.index,
                source + piece.start * width,
                target + piece.start * width,
                None if squares is None else squares.data_ptr() + k * MAX_BLOCKS * 8,
                size,
                piece.size,
                accumulate,
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
            calls.check("p3d_reduce_scatter", status)

    def works(self) -> bool:
        """See peer_calls.Kernel."""
        good, group, device = True, self.calls.group, self.calls.device
        try:
            for wire, dtype, size in itertools.product(DTYPES, DTYPES, _TRIAL_SIZES):
                whole = torch.full((group.size * size,), 1 + group.index, dtype=dtype, device=device)
                output = torch.ones(size, dtype=dtype, device=device)
                if not self.takes(whole, output, wire):
                    continue
                squares = torch.empty(self.squares_size(size, wire), dtype=torch.float64, device=device)
                self.reduce_into(output, whole, wire, True, squares)
                total = 1 + group.size * (group.size + 1) // 2
                good = good and bool((output == total).all()) and float(squares.sum()) == size * total**2
        except (CommunicationError, KernelError):
            return False
        return good


class GatheredReductions:
    """The same numbers by all-gather and the kernel's reference, on any device: what the kernel is compared with."""

    def __init__(self, group: Group):
        self._group = group
        self.number = register(self)

    def reduce_into(
        self, output: Tensor, whole: Tensor, wire: torch.dtype, accumulate: bool, squares: Tensor | None
    ) -> None:
        """See kernels.reduce_scatter.Reductions."""
        parts = whole.new_empty(self._group.size, self._group.size, output.numel())
        all_gather_into(parts.view(-1), whole.view(-1), self._group).wait()
        total = reduce_scatter_ref(parts[:, self._group.index].unbind(), wire)
        output.copy_(total + output.float() if accumulate else total)
        if squares is not None:
            squares.zero_()
            squares[0] = output.double().square().sum()


def open_reduce_scatter(
    groups: ProcessGroups, device: torch.device, limit_s: float = DEFAULT_TIMEOUT.total_seconds()
) -> ReduceScatter | None:
    """Open the kernel for this rank's group; None unless every group of the world can have it.

    One warning says why it is not available. Collective over the world. limit_s: how long a kernel waits for
    a peer.
    """
    if groups.data.size == 1:
        return None
    found = open_kernel(groups, "data", device, "reduce_scatter", 2 * HALF_BYTES, ReduceScatter, limit_s, "replicas")
    if not isinstance(found, Obstacle):
        return found
    if groups.rank == 0:
        warnings.warn(f"kernels.reduce_scatter: {found}; {groups.backend} reduces gradients instead", stacklevel=2)
    return None
