"""Workspace of kernels that the GPUs of one host call together (csrc/peers.cuh): the memory that all of them map."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from parallel3d.comm.collectives import Group, everywhere
from parallel3d.comm.environment import DEFAULT_TIMEOUT
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.peer.streams import Copied, current_handle
from parallel3d.comm.peer.symmetric import (
    UNMAPPED,
    Mapped,
    Unavailable,
    check_axis,
    check_device,
    check_hosts,
    check_symmetric_memory,
    map_memory,
)
from parallel3d.errors import CommunicationError, KernelError
from parallel3d.kernels.library import REMEDY, addresses, check, find_nvcc, load_library

# Numbers of the dtypes in the launchers.
DTYPES: Mapping[torch.dtype, int] = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
WORLD_SIZES = (2, 4, 8)
VECTOR_BYTES = 16
# A word of 8 bytes for each block and peer.
MOST_BLOCKS = 256
PAD_BYTES = MOST_BLOCKS * max(WORLD_SIZES) * 8
LIMIT_S = DEFAULT_TIMEOUT.total_seconds()
"""Default limit to a kernel's wait for a peer, in seconds."""

_STATE_BYTES = 16  # csrc/peers.cuh: State
_TRIAL_LIMIT_S = 60.0
_LEAST_CAPABILITY = (8, 0)

# What operators of torch.library communicate by: their schemas take numbers, not objects.
_registered: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = count(1)


def register(kernel: object) -> int:
    """Return a number by which torch's operators find the kernel for as long as it lives."""
    number = next(_numbers)
    _registered[number] = kernel
    return number


def registered(number: int) -> Any:
    """Return the kernel with this number. Raises KeyError."""
    return _registered[number]


def check_kernels(device: torch.device | None = None) -> Unavailable | None:
    """Return why kernels of csrc/ can't run in this process, or None. device: its own (default: the first CUDA device)."""
    if (missing := check_device(device)) is not None:
        return missing
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        return Unavailable(
            f"the device has compute capability {capability[0]}.{capability[1]}", "use an A100, an H100 or a later GPU"
        )
    return check_symmetric_memory() or _check_library()


def _check_library() -> Unavailable | None:
    try:
        if load_library() is not None:
            return None
    except KernelError as error:
        reason, _, remedy = str(error).rpartition("; ")
        return Unavailable(reason, remedy)
    if find_nvcc() is None:
        return Unavailable("not compiled, and there is no nvcc", REMEDY)
    return Unavailable("not compiled", "run: p3d build-kernels")


def check_ranks(hosts: Sequence[str], noun: str) -> Unavailable | None:
    """Return why ranks on these hosts, one each, can't call a kernel together, or None. noun: what each rank holds."""
    if (across := check_hosts(hosts, noun)) is not None:
        return across
    if len(hosts) not in WORLD_SIZES:
        sizes = ", ".join(map(str, WORLD_SIZES))
        return Unavailable(f"{len(hosts)} {noun}", f"the kernel is for {sizes} of them")
    return None


class SymmetricWorkspace:
    """Memory and state that the calls of one kernel share, on one rank; every rank makes the same calls in the same order.

    A peer that is later than `limit_s` ends the wait; after that nothing of this group is computed any more. Made by
    `open_workspace`.

    - key: of the kernel in the configuration's kernels.
    - staging, pads: addresses on every rank, as C takes them.
    - state, report: addresses of the kernel's counters, and of where it tells the host of a failure.
    """

    def __init__(self, shared: Mapped, group: Group, device: torch.device, key: str, limit_s: float):
        library = load_library()
        assert library is not None, "checked before by check_kernels"
        self.library, self.group, self.device, self.limit_s = library, group, device, limit_s
        self._key, self._shared = key, shared
        bases = shared.buffers()
        self.pads, self.staging = addresses(bases), addresses([base + PAD_BYTES for base in bases])
        self._state = torch.zeros(_STATE_BYTES, dtype=torch.uint8, device=device)
        # Pinned: reading it waits for nothing.
        self._pinned = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._report = ctypes.c_int32.from_address(self._pinned.data_ptr())
        self.state, self.report = self._state.data_ptr(), self._pinned.data_ptr()
        # Calls share the staging memory, so they run one after the other, whatever streams they are on.
        self._last: torch.cuda.Stream | None = None
        self._side = torch.cuda.Stream(device, priority=-1)

    @property
    def memory(self) -> Tensor:
        """This rank's staging bytes."""
        return self._shared.memory[PAD_BYTES:]

    @property
    def limit_ns(self) -> int:
        """Limit to a call's wait for a peer, in nanoseconds."""
        return int(self.limit_s * 1e9)

    def follow(self) -> int:
        """Let the current stream wait for the earlier calls, and return its handle.

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

    def launch(self, name: str, *arguments: Any, half_bytes: int, blocks: int, stream: int) -> None:
        """Call a launcher of the library with the arguments, the workspace, and how it is to run. Raises KernelError."""
        status = getattr(self.library, name)(
            *arguments,
            self.staging,
            self.pads,
            self.state,
            self.report,
            half_bytes,
            self.limit_ns,
            blocks,
            self.device.index,
            stream,
        )
        self.check(name, status)

    def run_on_side_stream(self, call: Callable[[], object], *tensors: Tensor) -> Copied:
        """Run `call`, which uses the tensors, on a stream of its own after what the current stream has queued."""
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            call()
        # The call runs even if a failure has made everyone here forget the memory.
        for tensor in tensors:
            tensor.record_stream(self._side)
        return Copied(self._side.record_event(), tensors[0])

    def check(self, name: str, status: int) -> None:
        """Raise KernelError if a function of the library has returned a CUDA error."""
        check(self.library, name, status)

    def raise_if_failed(self) -> None:
        """Raise CommunicationError if a peer was late in any call that has ended; waits for nothing."""
        if late := self._report.value:
            raise CommunicationError(
                f"rank {self.group.ranks[late - 1]} did not come to {self._key} of ranks {list(self.group.ranks)} within "
                f"{self.limit_s:g} s; look for what stopped it, or set kernels.{self._key} to false to use NCCL"
            )


def open_workspace(
    groups: ProcessGroups, axis: str, device: torch.device, key: str, num_bytes: int, limit_s: float = LIMIT_S
) -> SymmetricWorkspace | None:
    """Open a workspace of num_bytes staging bytes, not cleared, for this rank's group along an axis of the topology.

    Returns None on every rank if any rank can't have it. Collective over the world.
    """
    # Nobody signals to a pad that is not cleared yet.
    shared = map_memory(groups, axis, device, PAD_BYTES + num_bytes, cleared=PAD_BYTES)
    return None if shared is None else SymmetricWorkspace(shared, getattr(groups, axis), device, key, limit_s)


class Kernel(Protocol):
    """A kernel of this package that the ranks of a group call together."""

    workspace: SymmetricWorkspace

    def try_out(self) -> bool:
        """Return whether results of every kind are right; may raise CommunicationError and KernelError.

        Waits for the device, and loads all that is launched later: loading in a step, where a kernel may be waiting for another
        rank, could block for ever.
        """


K = TypeVar("K", bound=Kernel)


def open_kernel(
    groups: ProcessGroups,
    axis: str,
    device: torch.device,
    key: str,
    num_bytes: int,
    make: Callable[[SymmetricWorkspace], K],
    limit_s: float,
    noun: str,
    instead: str,
) -> K | None:
    """Make the kernel of a key and try it out; None, with one warning that says why, unless every group of the world can
    have it.

    - axis: of the topology, along which ranks call it; noun: what each of them holds.
    - limit_s: how long a call waits for a peer.
    - instead: what the backend does without the kernel.

    Collective over the world.
    """
    if getattr(groups, axis).size == 1:
        return None
    reason = check_axis(groups, axis, device, noun, check_kernels, check_ranks)
    workspace = open_workspace(groups, axis, device, key, num_bytes, limit_s) if reason is None else None
    if workspace is not None:
        kernel = make(workspace)
        if _works_everywhere(kernel, groups.control):
            return kernel
        reason = Unavailable("results came out wrong, or not at all, when it was tried", "see what p3d doctor says")
    if groups.rank == 0:
        warnings.warn(f"kernels.{key}: {reason or UNMAPPED}; {groups.backend} {instead} instead", stacklevel=3)
    return None


def _works_everywhere(kernel: Kernel, control: Group) -> bool:
    """Return whether its results are right on every rank, none of which waits long for them. Collective over the world."""
    limit_s, kernel.workspace.limit_s = kernel.workspace.limit_s, _TRIAL_LIMIT_S
    try:
        works = kernel.try_out()
    except (CommunicationError, KernelError):
        works = False
    kernel.workspace.limit_s = limit_s
    return everywhere(works, control)
