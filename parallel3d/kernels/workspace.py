"""Kernels that the GPUs of one host call together (csrc/peers.cuh), and their workspace: the memory that all of them map."""

from __future__ import annotations

import ctypes
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

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
    map_memory,
)
from parallel3d.errors import CommunicationError, KernelError
from parallel3d.kernels.cuda_library import addresses, check, load_library

if TYPE_CHECKING:
    from typing import Self

# Numbers of the dtypes in the launchers.
DTYPES: Mapping[torch.dtype, int] = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
WORLD_SIZES = (2, 4, 8)
VECTOR_BYTES = 16
# Most blocks of a kernel. The pads have a word of 8 bytes for each block and peer.
MOST_BLOCKS = 256
PAD_BYTES = MOST_BLOCKS * max(WORLD_SIZES) * 8
LIMIT_S = DEFAULT_TIMEOUT.total_seconds()
"""Default limit to a kernel's wait for a peer, in seconds."""

_STATE_BYTES = 16  # csrc/peers.cuh: State
_TRIAL_LIMIT_S = 60.0
_LEAST_CAPABILITY = (8, 0)
_BUFFER_ALIGNMENT = 512


def check_kernels(device: torch.device | None = None) -> Unavailable | None:
    """Return why kernels of csrc/ can't run in this process, or None. device: its own (default: the first CUDA device)."""
    if (missing := check_device(device)) is not None:
        return missing
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        return Unavailable(
            f"the device has compute capability {capability[0]}.{capability[1]}", "use an A100, an H100 or a later GPU"
        )
    try:
        load_library()
    except KernelError as error:
        reason, _, remedy = str(error).rpartition("; ")
        return Unavailable(reason, remedy)
    return None


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
    - state, report: addresses of the kernel's counters, and of the word by which it reports a failure to the host.
    """

    def __init__(self, shared: Mapped, group: Group, device: torch.device, key: str):
        self.compiled, self.group, self.device, self.limit_s = load_library(), group, device, LIMIT_S
        self._key, self._shared = key, shared
        bases = shared.buffers()
        self.pads, self.staging = addresses(bases), addresses([base + PAD_BYTES for base in bases])
        self._state = torch.zeros(_STATE_BYTES, dtype=torch.uint8, device=device)
        # In pinned memory, so that the host reads it without waiting for the device.
        self._pinned = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._report = ctypes.c_int32.from_address(self._pinned.data_ptr())
        self.state, self.report = self._state.data_ptr(), self._pinned.data_ptr()
        # Calls share the staging memory, so they run one after the other, whatever streams they are on.
        self._last: torch.cuda.Stream | None = None
        self._side = torch.cuda.Stream(device, priority=-1)

    def buffers(self, lengths: Sequence[int]) -> list[tuple[Tensor, list[int]]]:
        """Cut the staging bytes into buffers of these lengths in bytes, the same on every rank.

        Returns this rank's bytes of each, and its addresses on every rank, as this process maps them. The workspace has
        buffer_bytes(lengths) staging bytes or more.
        """
        starts = accumulate(map(_aligned, lengths), initial=0)
        memory, bases = self._shared.memory[PAD_BYTES:], list(self.staging)
        return [
            (memory[start : start + length], [base + start for base in bases])
            for start, length in zip(starts, lengths, strict=False)
        ]

    def follow(self) -> int:
        """Let the current stream wait for the earlier calls, and return its handle.

        Raises CommunicationError after a peer was late.
        """
        self.raise_if_failed()
        handle = current_handle(self.device.index)
        if self._last is None or self._last.cuda_stream != handle:
            stream = torch.cuda.current_stream(self.device)
            # A CUDA graph runs after all that came before its launch; its capture can't wait for it.
            if self._last is not None and not torch.cuda.is_current_stream_capturing():
                stream.wait_stream(self._last)
            self._last = stream
        return handle

    def run_on_side_stream(self, call: Callable[[], object], *tensors: Tensor) -> Copied:
        """Run `call`, which uses the tensors, on the side stream after what the current stream has queued.

        In a capture of a CUDA graph it runs on the current stream: all calls of a graph must follow each other in it.
        """
        if torch.cuda.is_current_stream_capturing():
            call()
            return Copied(torch.cuda.current_stream(self.device).record_event(), tensors[0])
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            call()
        # Keep the memory until the call has run, even if a failure drops all references to it on this rank.
        for tensor in tensors:
            tensor.record_stream(self._side)
        return Copied(self._side.record_event(), tensors[0])

    def raise_if_failed(self) -> None:
        """Raise CommunicationError if a peer was late in any call that has ended; waits for nothing."""
        if late := self._report.value:
            raise CommunicationError(
                f"rank {self.group.ranks[late - 1]} did not come to {self._key} of ranks {list(self.group.ranks)} within "
                f"{self.limit_s:g} s; look for what stopped it, or set kernels.{self._key} to false to use NCCL"
            )


def open_workspace(
    groups: ProcessGroups, axis: str, device: torch.device, noun: str, key: str, num_bytes: int
) -> SymmetricWorkspace | Unavailable:
    """Open a workspace of num_bytes staging bytes, not cleared, for this rank's group along an axis of the topology.

    Returns a reason on every rank if any rank can't have it. noun: what each rank of a group holds. Collective over the world.
    """
    if (reason := check_axis(groups, axis, device, noun, check_kernels, check_ranks)) is not None:
        return reason
    # Nobody signals to a pad that is not cleared yet.
    shared = map_memory(groups, axis, device, PAD_BYTES + num_bytes, cleared=PAD_BYTES)
    return UNMAPPED if shared is None else SymmetricWorkspace(shared, getattr(groups, axis), device, key)


def buffer_bytes(lengths: Sequence[int]) -> int:
    """Return the bytes of device memory that buffers of these lengths, in bytes, take on each rank."""
    return sum(map(_aligned, lengths))


def _aligned(length: int) -> int:
    return -(-length // _BUFFER_ALIGNMENT) * _BUFFER_ALIGNMENT


@dataclass(frozen=True)
class Call:
    """One call of a kernel: elements [start, start + size) of a message, or of each shard.

    two_shot: ranks sum parts of the message for each other, instead of each the whole.
    """

    start: int
    size: int
    blocks: int
    two_shot: bool = False


class PeerKernel(ABC):
    """Kernel that the ranks of a group call together; every rank makes the same calls in the same order.

    If a peer is later than the workspace's limit, the result is NaN, and the next call raises. Made by `open`.

    - key: of the kernel in the configuration's kernels; its launcher is p3d_{key}.
    - axis: of the topology, along which ranks call it; noun: what each of them holds.
    - half_bytes: half of the staging buffer: what one call takes.
    - instead: what the backend does without the kernel.
    - calls: (size, element_bytes, world_size, threads) -> the calls for work on `size` elements, the same on every rank;
      threads: of a block, a vector each.
    """

    key: ClassVar[str]
    axis: ClassVar[str]
    noun: ClassVar[str]
    half_bytes: ClassVar[int]
    instead: ClassVar[str]
    calls: ClassVar[Callable[..., list[Call]]]

    def __init__(self, workspace: SymmetricWorkspace):
        self.workspace = workspace
        threads = int(workspace.compiled.p3d_all_reduce_threads())
        self._calls = lru_cache(1024)(partial(self.calls, world_size=workspace.group.size, threads=threads))

    @classmethod
    def staging_bytes(cls) -> int:
        """Return the bytes of device memory that one group's kernel takes on each rank, besides a few words."""
        return PAD_BYTES + 2 * cls.half_bytes

    @classmethod
    def open(cls, groups: ProcessGroups, device: torch.device, limit_s: float = LIMIT_S) -> Self | None:
        """Open the kernel for this rank's group and try it out. Collective over the world.

        Returns None, with one warning that says why, unless every group of the world can have it.
        limit_s: how long a call waits for a peer.
        """
        if getattr(groups, cls.axis).size == 1:
            return None
        opened = open_workspace(groups, cls.axis, device, cls.noun, cls.key, 2 * cls.half_bytes)
        if isinstance(opened, SymmetricWorkspace):
            kernel, opened.limit_s = cls(opened), _TRIAL_LIMIT_S
            try:
                works = kernel.try_out()
            except (CommunicationError, KernelError):
                works = False
            if everywhere(works, groups.control):
                opened.limit_s = limit_s
                return kernel
            opened = Unavailable("results came out wrong, or not at all, when it was tried", "see what p3d doctor says")
        warn_unavailable(groups, cls.key, opened, f"{groups.backend} {cls.instead}")
        return None

    @abstractmethod
    def try_out(self) -> bool:
        """Return whether results of every kind are right; may raise CommunicationError and KernelError.

        Waits for the device, and loads all that is launched later: loading in a step, where a kernel may be waiting for another
        rank, could block for ever.
        """

    def _launch(self, call: Call, stream: int, *arguments: Any) -> None:
        """Launch one call on a stream that follows the earlier ones. Raises KernelError.

        arguments: of the launcher, before the workspace's.
        """
        workspace, name = self.workspace, f"p3d_{self.key}"
        shared = (workspace.staging, workspace.pads, workspace.state, workspace.report)
        limits, launch = (self.half_bytes, int(workspace.limit_s * 1e9)), (call.blocks, workspace.device.index, stream)
        status = getattr(workspace.compiled, name)(*arguments, *shared, *limits, *launch)
        check(workspace.compiled, name, status)


def warn_unavailable(groups: ProcessGroups, key: str, reason: Unavailable, instead: str) -> None:
    """Warn on the first rank that a kernel is off. instead: what is done without it, in words."""
    if groups.rank == 0:
        warnings.warn(f"kernels.{key}: {reason}; {instead} instead", stacklevel=3)
