"""Scratch space on disk for offloaded state, read and written past the page cache by threads.

State passes between a disk and a device through buffers in host memory.
"""

from __future__ import annotations

import errno
import fcntl
import io
import mmap
import os
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from parallel3d.comm.host_memory import allocate_slab
from parallel3d.comm.transfers import Event
from parallel3d.errors import OffloadError

ALIGNMENT = 4096  # Bytes. O_DIRECT needs offsets, sizes and addresses aligned to it; memory pages are.
_GIB = 2**30


def in_blocks(nbytes: int) -> int:
    """Return a number of bytes rounded up to whole blocks of the disk."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Traffic:
    """Bytes that were read or written, and the seconds in which any request was in progress."""

    def __init__(self) -> None:
        self.nbytes, self.seconds = 0, 0.0
        self._running, self._since, self._lock = 0, 0.0, Lock()

    @contextmanager
    def moving(self, nbytes: int) -> Iterator[None]:
        """Count the block as a request; its bytes only if it ends well."""
        with self._lock:
            if self._running == 0:
                self._since = time.perf_counter()
            self._running += 1
        moved = 0
        try:
            yield
            moved = nbytes
        finally:
            with self._lock:
                self.nbytes += moved
                self._running -= 1
                if self._running == 0:
                    self.seconds += time.perf_counter() - self._since


class Transfer:
    """Read or write in progress. Until wait() returns, its tensor must be neither read nor written."""

    def __init__(self, blocks: Sequence[Future[None]]):
        self._blocks = blocks

    def wait(self) -> None:
        """Wait until no part of the transfer is in progress. Raises OffloadError if a part failed."""
        wait(self._blocks)
        for block in self._blocks:
            block.result()


class ScratchFile:
    """Private scratch space of one rank on disk, freed however its process ends.

    - directory: on the disk to use, such as `nvme_path`.
    - nbytes: size in bytes, which is allocated at once.
    - block_bytes: size of a request, a multiple of 4096 (`aio.block_size`).
    - in_flight: reads at a time, and as many writes, each of a thread (`aio.queue_depth` x `aio.intra_op_parallelism`).

    The file has no name, so nothing is left after a kill that a later start could take for its own; `lsof +L1` lists it while
    it is used. Warns if the file system has no O_DIRECT: then reads and writes go through the page cache. Raises OffloadError.
    """

    def __init__(self, directory: str | Path, nbytes: int, block_bytes: int = 8 << 20, in_flight: int = 8):
        self.directory, self.nbytes = directory, nbytes
        self.reads, self.writes = Traffic(), Traffic()
        self._block_bytes = block_bytes
        self._taken, self._offsets = 0, dict[int, int]()
        self._file = _allocate(directory, nbytes)
        self.is_direct = _use_direct(self._file.fileno())
        if not self.is_direct:
            warnings.warn(
                f"{directory} is on a file system without O_DIRECT for blocks of {ALIGNMENT} bytes: offloaded state passes "
                "through the page cache, which is slower and takes host memory; set nvme_path to a directory on a local disk",
                stacklevel=2,
            )
        # Separate threads for each direction: with a single queue, reads and writes would not overlap.
        self._readers, self._writers = (
            ThreadPoolExecutor(in_flight, thread_name_prefix=f"parallel3d disk {name}") for name in ("read", "write")
        )

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate the next free part of the file and return it as a flat tensor of zeros, mapped into memory.

        Use the tensor between transfers: these and the mapping see each other's bytes. Raises OffloadError if the file is full.
        """
        size = in_blocks(numel * dtype.itemsize)
        if size > self.nbytes - self._taken:
            raise OffloadError(
                f"{size} bytes more are needed of the scratch file in {self.directory}, and {self._taken} of {self.nbytes} are "
                "taken: the optimizer keeps more state for an element than was predicted; use device cpu for it"
            )
        memory = mmap.mmap(self._file.fileno(), size, offset=self._taken) if size else bytearray(1)
        flat = torch.frombuffer(memory, dtype=torch.uint8)[: numel * dtype.itemsize].view(dtype)
        self._offsets[flat.data_ptr()] = self._taken
        self._taken += size
        return flat

    def offset_of(self, flat: Tensor, start: int) -> int:
        """Return where element `start` of a tensor that `allocate` returned is in the file."""
        return self._offsets[flat.data_ptr()] + start * flat.itemsize

    def read(self, offset: int, into: Tensor) -> Transfer:
        """Start to fill a tensor from the bytes at `offset`. Transfers run at the same time and in any order.

        Tensors are contiguous, on the CPU, and aligned to ALIGNMENT in size and address, as `offset` is; parts of a slab are.
        """
        return self._start(offset, into, is_read=True)

    def write(self, offset: int, source: Tensor) -> Transfer:
        """Start to write a tensor to the bytes at `offset`; see read."""
        return self._start(offset, source, is_read=False)

    def rates(self) -> tuple[float, float]:
        """Return the bytes per second that were read and written so far, while any were."""
        read, written = (traffic.nbytes / max(traffic.seconds, 1e-9) for traffic in (self.reads, self.writes))
        return read, written

    def close(self) -> None:
        """Wait for transfers in progress, then free the space."""
        self._readers.shutdown()
        self._writers.shutdown()
        self._file.close()

    def _start(self, offset: int, tensor: Tensor, is_read: bool) -> Transfer:
        size = tensor.numel() * tensor.itemsize
        aligned = not any(number % ALIGNMENT for number in (offset, size, tensor.data_ptr()))
        if not (aligned and tensor.is_contiguous() and 0 <= offset <= self.nbytes - size):
            raise OffloadError(
                f"{size} bytes of memory at {tensor.data_ptr():#x} can't be read from or written to bytes {offset} to "
                f"{offset + size} of {self.nbytes} on disk: they must lie inside, be contiguous, and begin and end at "
                f"multiples of {ALIGNMENT}; take parts of a slab that do"
            )
        # The view keeps the tensor's memory alive.
        memory = tensor.detach().view(-1).view(torch.uint8).numpy().data
        starts = range(0, size, self._block_bytes)
        parts = ((memory[at : at + self._block_bytes], offset + at) for at in starts)
        threads = self._readers if is_read else self._writers
        return Transfer([threads.submit(self._move, part, place, is_read) for part, place in parts])

    def _move(self, memory: memoryview, offset: int, is_read: bool) -> None:
        call, traffic = (os.preadv, self.reads) if is_read else (os.pwritev, self.writes)
        done = 0
        with traffic.moving(len(memory)):
            while done < len(memory):
                try:
                    moved = call(self._file.fileno(), [memory[done:]], offset + done)
                    if moved < ALIGNMENT:
                        raise OSError(errno.EIO, f"only {moved} bytes were moved")
                except OSError as error:
                    raise OffloadError(
                        f"{'reading' if is_read else 'writing'} {len(memory) - done} bytes at {offset + done} of the scratch "
                        f"file in {self.directory} failed: {error.strerror}; look for the disk's errors in the kernel's log "
                        "(dmesg), or set nvme_path to a directory on another disk"
                    ) from error
                done += moved - moved % ALIGNMENT  # O_DIRECT can go on only there


def _allocate(directory: str | Path, nbytes: int) -> io.FileIO:
    """Return a file without a name that has at least these bytes on disk. Raises OffloadError."""
    size, free = max(ALIGNMENT, nbytes), "unknown"
    try:
        with ExitStack() as on_error:
            # Linux makes it without a name (O_TMPFILE); where the file system can't, the name is removed at once.
            file = on_error.enter_context(tempfile.TemporaryFile(dir=directory, prefix="parallel3d_", buffering=0))
            space = os.statvfs(directory)
            free = f"{space.f_bavail * space.f_frsize / _GIB:.3f} GiB"
            if space.f_bavail * space.f_frsize < size:  # don't fill the disk only to see that
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(file.fileno(), 0, size)
            on_error.pop_all()
    except OSError as error:
        raise OffloadError(
            f"a scratch file of {size / _GIB:.3f} GiB for this rank's offloaded state can't be made in {directory} (free: "
            f"{free}, which the ranks of this host share): {error.strerror}; free space there, set nvme_path to an existing "
            "directory on another disk that you may write to, or offload less"
        ) from error
    return file


def _use_direct(file: int) -> bool:
    """Let reads and writes bypass the page cache. Returns whether the file system can do so for blocks of ALIGNMENT bytes."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.preadv(file, [mmap.mmap(-1, ALIGNMENT)], 0)  # some file systems refuse only now
    except OSError:
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
        return False
    return True


@dataclass(eq=False)
class StagingBuffer:
    """Host buffer for one part of some of the scratch file's tensors, by name. free: when a device has copied what was read."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    slabs: dict[str, Tensor] = field(default_factory=dict)
    reads: list[Transfer] = field(default_factory=list)
    written: Future[None] | None = None
    free: Event = None

    def wait(self) -> None:
        """Wait until the part has been read. Raises OffloadError."""
        while self.reads:
            self.reads.pop().wait()

    def keep_until(self, event: Event) -> None:
        """Let the buffer be used again only after an event."""
        self.free = event

    def wait_until_written(self) -> None:
        """Wait until the part has been written back. After a failed write, each call raises OffloadError: the data are lost."""
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
        """Wait until all writes are done. Raises OffloadError."""
        for staged in self._buffers:
            staged.wait_until_written()

    def slabs(self) -> list[Tensor]:
        """Return the memory of the buffers."""
        return [slab for staged in self._buffers for slab in staged.slabs.values()]
