"""A group of one host's ranks that call a kernel together: the memory that all map, and what may be in the way of it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from parallel3d.comm.collectives import Group, everywhere
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.obstacles import UNMAPPED, Obstacle, axis_obstacle
from parallel3d.comm.peer.streams import current_handle
from parallel3d.comm.peer.symmetric import Mapped, map_memory
from parallel3d.errors import CommunicationError
from parallel3d.kernels.loader import addresses, check, load_library
from parallel3d.kernels.peers import PAD_BYTES

_STATE_BYTES = 16  # csrc/peers.cuh: State
_TRIAL_LIMIT_S = 60.0
# Of a kernel that was tried.
WRONG = Obstacle("results came out wrong, or not at all, when it was tried", "see what p3d doctor says")


class PeerCalls:
    """What the calls of one kernel share, on one rank; every rank makes the same calls in the same order.

    A peer that comes later than `limit_s` ends the wait, and nothing of this group's is computed any more. kernel: its key
    among the configuration's kernels. Made by open_peer_calls.
    """

    def __init__(self, shared: Mapped, group: Group, device: torch.device, kernel: str, limit_s: float):
        library = load_library()
        assert library is not None, "checked before by local_obstacle"
        self.compiled, self.group, self.device, self.limit_s = library, group, device, limit_s
        self._kernel, self._shared = kernel, shared
        bases = shared.buffers()
        self.pads, self.staging = addresses(bases), addresses([base + PAD_BYTES for base in bases])
        self._state = torch.zeros(_STATE_BYTES, dtype=torch.uint8, device=device)
        # Where the kernel tells the host of a failure: reading it waits for nothing.
        self._pinned = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._report = ctypes.c_int32.from_address(self._pinned.data_ptr())
        self.state, self.report = self._state.data_ptr(), self._pinned.data_ptr()
        # Calls share the staging memory, so they run one after the other, whatever streams they are on.
        self._last: torch.cuda.Stream | None = None

    @property
    def memory(self) -> Tensor:
        """This rank's staging bytes."""
        return self._shared.memory[PAD_BYTES:]

    @property
    def limit_ns(self) -> int:
        """How long a call waits for a peer."""
        return int(self.limit_s * 1e9)

    def follow(self) -> int:
        """The handle of the current stream, which goes on when the calls before are done.

        Raises CommunicationError after a peer was late.
        """
        self.raise_if_failed()
        handle = current_handle(self.device.index)
        if self._last is None or self._last.cuda_stream != handle:
            stream = torch.cuda.current_stream(self.device)
            if self._last is not None:
                stream.wait_stream(self._last)
            self._last = stream
        return handle

    def check(self, name: str, status: int) -> None:
        """Raises KernelError where a function of the library has returned a CUDA error."""
        check(self.compiled, name, status)

    def raise_if_failed(self) -> None:
        """Raises CommunicationError if a peer was late in any call that has ended; waits for nothing."""
        if late := self._report.value:
            raise CommunicationError(
                f"rank {self.group.ranks[late - 1]} did not come to {self._kernel} of ranks {list(self.group.ranks)} within "
                f"{self.limit_s:g} s; look for what stopped it, or set kernels.{self._kernel} to false to use NCCL"
            )


def open_peer_calls(
    groups: ProcessGroups, axis: str, device: torch.device, kernel: str, num_bytes: int, limit_s: float
) -> PeerCalls | None:
    """Of this rank's group along an axis of the topology, with so many staging bytes, none of them cleared; None on every
    rank where on any it can't be had. Collective over the world.
    """
    group: Group = getattr(groups, axis)
    shared = map_memory(group, groups.control, device, PAD_BYTES + num_bytes)
    if shared is not None:
        shared.memory[:PAD_BYTES].zero_()
        torch.cuda.synchronize(device)
    # Nobody signals to a pad that is not cleared yet.
    if not everywhere(shared is not None, groups.control):
        return None
    assert shared is not None
    return PeerCalls(shared, group, device, kernel, limit_s)


class Kernel(Protocol):
    """A kernel of this package that the ranks of a group call together."""

    calls: PeerCalls

    def works(self) -> bool:
        """Whether results of every kind are right. Waits for the device, and loads all that is launched later: in a step, where
        a kernel may be waiting for another rank, that could wait for ever."""


K = TypeVar("K", bound=Kernel)


def open_kernel(
    groups: ProcessGroups,
    axis: str,
    device: torch.device,
    kernel: str,
    num_bytes: int,
    make: Callable[[PeerCalls], K],
    limit_s: float,
    noun: str,
) -> K | Obstacle:
    """The kernel of a key, made of its calls and tried, or what is in its way, the same on every rank.

    Collective over the world. axis: of the topology, along which ranks call it; noun: what each of them holds; limit_s: how
    long a call waits for a peer.
    """
    if (obstacle := axis_obstacle(groups, axis, device, noun)) is not None:
        return obstacle
    calls = open_peer_calls(groups, axis, device, kernel, num_bytes, limit_s)
    if calls is None:
        return UNMAPPED
    made = make(calls)
    return made if works_everywhere(made, groups.control) else WRONG


def works_everywhere(kernel: Kernel, control: Group) -> bool:
    """Whether its results are right on every rank, none of which waits long for them. Collective over control, the world."""
    limit_s, kernel.calls.limit_s = kernel.calls.limit_s, _TRIAL_LIMIT_S
    good = everywhere(kernel.works(), control)
    kernel.calls.limit_s = limit_s
    return good
