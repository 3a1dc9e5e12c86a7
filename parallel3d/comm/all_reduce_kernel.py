"""The all-reduce of tensor slices by a kernel of this package, over NVLink, where every rank of a group can have it."""

from __future__ import annotations

import ctypes
import itertools
import socket
import warnings
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from parallel3d.comm.collectives import Group, Work, all_gather_integers, all_gather_into, all_gather_object
from parallel3d.comm.environment import DEFAULT_TIMEOUT
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.obstacles import Obstacle, group_obstacle, local_obstacle, peer_obstacle
from parallel3d.comm.rings import Copied
from parallel3d.comm.symmetric import Mapped, map_memory, pad_bytes
from parallel3d.errors import CommunicationError, KernelError
from parallel3d.kernels.all_reduce import (
    DTYPES,
    HALF_BYTES,
    all_reduce_ref,
    pieces,
    register,
    signal_bytes,
    staging_bytes,
)
from parallel3d.kernels.loader import addresses, check, load_library

_STATE_BYTES = 16  # csrc/all_reduce.cuh: State
_TRIAL_SIZES = (3, 2**18 + 3)  # summed in one shot and, by 4 ranks or more, in two
_TRIAL_LIMIT_S = 60.0


class AllReduce:
    """Sums tensors over one group by csrc/all_reduce.cu, in rank order in fp32: bitwise the same on all ranks and every time.

    Every rank makes the same calls in the same order. A peer that comes later than `limit_s` ends the wait: the result is
    NaN, and the next call here, or `raise_if_failed`, raises; nothing of this group's is summed any more. number: for the
    operators parallel3d::all_reduce and all_reduce_. Made by open_all_reduce.
    """

    def __init__(self, shared: Mapped, group: Group, device: torch.device, limit_s: float):
        self.limit_s = limit_s
        library = load_library()
        assert library is not None, "checked before by local_obstacle"
        self.number = register(self)
        self._library, self._shared, self._group, self._device = library, shared, group, device
        self._index = group.index
        self._staging, self._pads = addresses(shared.buffers()), addresses(shared.pads())
        self._state = torch.zeros(_STATE_BYTES, dtype=torch.uint8, device=device)
        # Where the kernel tells the host of a failure: reading it waits for nothing.
        self._pinned = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._report = ctypes.c_int32.from_address(self._pinned.data_ptr())
        self._beside = torch.cuda.Stream(device, priority=-1)
        # Calls share the staging buffer, so they run one after the other, whatever streams they are on.
        self._last: torch.cuda.Stream | None = None
        self._pieces = lru_cache(1024)(
            partial(pieces, world_size=group.size, threads=int(library.p3d_all_reduce_threads()))
        )

    def takes(self, x: Tensor) -> bool:
        """Whether the kernel sums such tensors; the same on every rank, where they are alike."""
        return x.is_cuda and x.dtype in DTYPES

    def start(self, x: Tensor) -> Work:
        """Sum x in place, beside the current stream."""
        self._beside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._beside):
            torch.ops.parallel3d.all_reduce_(x, self.number)
        # It is summed even if a failure has made everyone here forget the memory.
        x.record_stream(self._beside)
        return Copied(self._beside.record_event(), x)

    def sum_into(self, out: Tensor, x: Tensor) -> None:
        """See kernels.all_reduce.Sums. Raises CommunicationError after a peer was late, KernelError."""
        self.raise_if_failed()
        stream = torch.cuda.current_stream(self._device)
        if self._last is not None and self._last != stream:
            stream.wait_stream(self._last)
        width, source, target = x.element_size(), x.data_ptr(), out.data_ptr()
        for piece in self._pieces(x.numel(), width):
            status = self._library.p3d_all_reduce(
                piece.two_shot,
                DTYPES[x.dtype],
                self._group.size,
                self._index,
                source + piece.start * width,
                target + piece.start * width,
                piece.size,
                self._staging,
                self._pads,
                self._state.data_ptr(),
                self._pinned.data_ptr(),
                HALF_BYTES,
                int(self.limit_s * 1e9),
                piece.blocks,
                self._device.index,
                stream.cuda_stream,
            )
            check(self._library, "p3d_all_reduce", status)
        self._last = stream

    def works(self) -> bool:
        """Whether sums of every kind are right. Waits for the device, and loads all kernels: in a step, where a kernel may be
        waiting for another rank, that could wait for ever."""
        good = True
        try:
            for dtype, size in itertools.product(DTYPES, _TRIAL_SIZES):
                x = torch.full((size,), 1 + self._group.index, dtype=dtype, device=self._device)
                self.sum_into(x, x)
                good = good and bool((x == self._group.size * (self._group.size + 1) // 2).all())
        except (CommunicationError, KernelError):
            return False
        return good

    def raise_if_failed(self) -> None:
        """Raises CommunicationError if a peer was late in any call that has ended; waits for nothing."""
        if late := self._report.value:
            raise CommunicationError(
                f"rank {self._group.ranks[late - 1]} did not come to an all-reduce of ranks {list(self._group.ranks)} within "
                f"{self.limit_s:g} s; look for what stopped it, or set kernels.all_reduce to false to use NCCL"
            )


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
    asked: bool,
    limit_s: float = DEFAULT_TIMEOUT.total_seconds(),
) -> None:
    """Let the group of tensor slices sum by the kernel, if that is asked for and every group of the world can.

    One warning says why what was asked for is not to be had. Collective over the world. limit_s: how long a kernel waits for
    a peer.
    """
    groups.model.kernels.all_reduce = None
    if not asked or groups.model.size == 1:
        return
    obstacle = _obstacle(groups, device)
    kernel: AllReduce | None = None
    if obstacle is None:
        kernel = _open(groups, device)
        if not _everywhere(kernel is not None, groups.control):
            obstacle = Obstacle("the driver maps no memory of one device on another", "see what p3d doctor says")
        elif not _everywhere(kernel is not None and kernel.works(), groups.control):
            obstacle = Obstacle("sums came out wrong, or not at all, when it was tried", "see what p3d doctor says")
    if obstacle is None:
        assert kernel is not None
        kernel.limit_s = limit_s
        groups.model.kernels.all_reduce = kernel
    elif groups.rank == 0:
        warnings.warn(f"kernels.all_reduce: {obstacle}; {groups.backend} sums tensor slices instead", stacklevel=2)


def _open(groups: ProcessGroups, device: torch.device) -> AllReduce | None:
    """Collective over the world; None where this rank gets no memory that others map."""
    shared = map_memory(groups.model, groups.control, device, staging_bytes())
    if shared is not None:
        shared.clear_pad()
        torch.cuda.synchronize(device)
    # Nobody signals to a pad that is not cleared yet.
    if not _everywhere(shared is not None, groups.control):
        return None
    assert shared is not None
    return AllReduce(shared, groups.model, device, _TRIAL_LIMIT_S)


def _everywhere(good: bool, control: Group) -> bool:
    return all(row[0] for row in all_gather_integers([int(good)], control))


def _obstacle(groups: ProcessGroups, device: torch.device) -> Obstacle | None:
    """The same on every rank: the first rank's that has one."""
    local = None if groups.backend == "nccl" else Obstacle(f"{groups.backend} trains on the CPU", "use NCCL")
    mine = (socket.gethostname(), device.index, local or local_obstacle(device))
    everyone: list[tuple[str, Any, Obstacle | None]] = all_gather_object(mine, groups.control)
    found = [obstacle for _, _, obstacle in everyone if obstacle is not None]
    for ranks in groups.topology.get_axis_comm_lists("model"):
        across = group_obstacle([everyone[rank][0] for rank in ranks])
        found += [across] if across is not None else []
    if found:
        return found[0]
    needed, there = signal_bytes(groups.model.size), pad_bytes()
    if there < needed:
        own: Obstacle | None = Obstacle(f"signal pads have {there} bytes, {needed} are needed", "set no smaller size")
    else:
        own = peer_obstacle(device, [everyone[rank][1] for rank in groups.model.ranks])
    return _first(all_gather_object(own, groups.control))


def _first(obstacles: Sequence[Obstacle | None]) -> Obstacle | None:
    return next((obstacle for obstacle in obstacles if obstacle is not None), None)
