"""Buffers in host memory that state passes through between a disk and a device."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from torch import Tensor

from parallel3d.comm.host_memory import allocate_slab
from parallel3d.comm.transfers import Event
from parallel3d.zero.disk import ScratchFile, Transfer, in_blocks


@dataclass(eq=False)
class StagingBuffer:
    """A part of some flat tensors of the scratch file in host memory, by name. free: when a device has copied what was read."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    slabs: dict[str, Tensor] = field(default_factory=dict)
    reads: list[Transfer] = field(default_factory=list)
    written: Future[None] | None = None
    free: Event = None

    def wait(self) -> None:
        """Return when it has been read. Raises OffloadError."""
        while self.reads:
            self.reads.pop().wait()

    def keep_until(self, event: Event) -> None:
        """Let the buffer be used again only after an event."""
        self.free = event

    def wait_until_written(self) -> None:
        """Return when it has been written back. Raises OffloadError, again and again: what was to be written is lost."""
        if self.written is not None:
            self.written.result()
        self.written = None


class StagingBuffers:
    """Reads parts of a scratch file's tensors into host buffers, and writes them back when a device has filled them.

    - count: number of buffers, used in turn. pin: whether they are pinned. longest: bytes of a part of a tensor at most.
    """

    def __init__(self, file: ScratchFile, count: int, pin: bool, longest: int):
        self.file, self._pin, self._longest = file, pin, longest
        self._buffers = deque(StagingBuffer() for _ in range(count))
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="parallel3d write-back")

    def is_free(self) -> bool:
        """Return whether the next buffer is free."""
        staged = self._buffers[0]
        return (staged.written is None or staged.written.done()) and (staged.free is None or staged.free.query())

    def read(self, flats: Mapping[str, Tensor], part: slice) -> StagingBuffer:
        """Start to read a part of each of these tensors, once a buffer is free."""
        staged = self._buffers.popleft()
        self._buffers.append(staged)
        staged.wait()
        staged.wait_until_written()
        if staged.free is not None:
            staged.free.synchronize()
        staged.free, staged.tensors = None, {}
        for name, flat in flats.items():
            slab = self.room(staged, name, flat[part])
            staged.reads.append(self.file.read(self.file.offset_of(flat, part.start), slab))
        return staged

    def room(self, staged: StagingBuffer, name: str, like: Tensor) -> Tensor:
        """Make room for a part in a buffer; return its bytes, up to the end of its last block."""
        if name not in staged.slabs:
            staged.slabs[name] = allocate_slab(in_blocks(self._longest), self._pin)
        staged.tensors[name] = staged.slabs[name][: like.nbytes].view(like.dtype)
        return staged.slabs[name][: in_blocks(like.nbytes)]

    def write(self, staged: StagingBuffer, flats: Mapping[str, Tensor], part: slice, filled: Event) -> None:
        """Write what a buffer holds back after an event, on another thread. An error is raised at the buffer's next use."""
        flats = {name: flats[name] for name in staged.tensors}
        staged.written = self._writer.submit(self._write, staged, flats, part, filled)

    def _write(self, staged: StagingBuffer, flats: Mapping[str, Tensor], part: slice, filled: Event) -> None:
        if filled is not None:
            filled.synchronize()
        writes = [
            self.file.write(self.file.offset_of(flat, part.start), self.room(staged, name, flat[part]))
            for name, flat in flats.items()
        ]
        for transfer in writes:
            transfer.wait()

    def settle(self) -> None:
        """Return when all is written. Raises OffloadError."""
        for staged in self._buffers:
            staged.wait_until_written()

    def slabs(self) -> list[Tensor]:
        """Return the memory of the buffers."""
        return [slab for staged in self._buffers for slab in staged.slabs.values()]
