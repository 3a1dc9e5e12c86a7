"""Host memory for offloaded state: how much this host's ranks may take, and slabs of it that GPUs copy from and to."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from parallel3d.errors import OffloadError

_GIB = 2**30
_THREADS = 8
_UNLIMITED = 2**60  # cgroup v1 says 2**63, rounded down to a page
# Files of limits and of use, and the entries of memory.stat that are page cache, which the kernel drops on demand.
_CGROUP_FILES = (
    (("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file")),
    (("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)
_PROCESS_LIMITS = (("RLIMIT_AS", resource.RLIMIT_AS, "VmSize"), ("RLIMIT_DATA", resource.RLIMIT_DATA, "VmData"))
_MAP_NORESERVE = 0x4000  # the mmap module has it from Python 3.13


def host_capacity(limit_gib: float | None = None, proc: Path = Path("/proc/self")) -> dict[str, int]:
    """Return the bytes of host memory that may still be taken under each known limit, by the limit's name.

    Processes that name the same limit share it. No limit means that the capacity isn't known.
    - limit_gib: the user's limit for all ranks of this host, which replaces those of cgroups (v1 and v2, nested ones too).
    - proc: this process's directory of Linux's proc file system.

    The host's RAM is not a limit: a virtual machine's may grow as it is used. Nor is /dev/shm, since slabs are private memory,
    nor RLIMIT_MEMLOCK, to which CUDA's driver doesn't charge the pages that it pins.
    """
    limits: dict[str, int] = {}
    if limit_gib is not None:
        limits["offload.host_memory_gib"] = int(limit_gib * _GIB)
    with suppress(OSError):  # /proc is not mounted
        if limit_gib is None:
            limits.update(left for folder in _memory_cgroups(proc) for left in _left_in(folder))
        status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
        for name, kind, use in _PROCESS_LIMITS:
            limit, _ = resource.getrlimit(kind)
            if limit != resource.RLIM_INFINITY:
                limits[f"{name} of process {os.getpid()}"] = max(0, limit - int(status[use].split()[0]) * 1024)
    return limits


def _memory_cgroups(proc: Path) -> Iterator[Path]:
    """Yield the directories of this process's memory cgroups that are mounted here, inner ones first."""
    own = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
    for line in (proc / "mountinfo").read_text().splitlines():
        fields, _, more = line.partition(" - ")
        (root, mount), (kind, *_, options) = fields.split()[3:5], more.split()
        controller = {"cgroup2": "", "cgroup": "memory"}.get(kind)
        if controller is None or controller not in ("", *options.split(",")):
            continue
        for _, controllers, path in own:
            if controller in controllers.split(","):
                inside = os.path.relpath(path, root)
                # A container may see the path of its host, outside of what is mounted.
                place = Path(mount) if inside.startswith("..") else Path(mount, inside)
                yield from (folder for folder in (place, *place.parents) if folder.is_relative_to(mount))


def _left_in(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield the names of a cgroup's limits, and the bytes that may still be taken under each."""
    for limits, used, cached in _CGROUP_FILES:
        if (folder / used).exists():
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            taken = int((folder / used).read_text()) - sum(int(stat.get(key, 0)) for key in cached)
            for path in (folder / name for name in limits):
                limit = path.read_text().strip() if path.exists() else "max"
                if limit != "max" and int(limit) < _UNLIMITED:
                    yield str(path), max(0, int(limit) - taken)


def check_host_memory(needs: Sequence[int], capacities: Sequence[Mapping[str, int]], local_rank: int) -> None:
    """Raise OffloadError if the ranks of this host need more memory than a limit allows. All of them decide alike.

    needs: bytes that each wants for offloaded state; capacities: host_capacity() of each, before any of them allocates; both in
    order of local rank.
    """
    for name in dict.fromkeys(name for capacity in capacities for name in capacity):
        sharing = {rank: needs[rank] for rank, capacity in enumerate(capacities) if name in capacity}
        need, allowed = sum(sharing.values()), min(capacities[rank][name] for rank in sharing)
        if need > allowed:
            each = ", ".join(f"{n / _GIB:.3f} by {r}{' (this one)' * (r == local_rank)}" for r, n in sharing.items())
            raise OffloadError(
                f"offloaded state needs {need / _GIB:.3f} GiB of host memory (by local rank: {each}), but {name} leaves "
                f"{allowed / _GIB:.3f} GiB; offload less (a lower offload_optimizer.ratio), shard it over more ranks (a higher "
                "zero_optimization.stage, more hosts), set offload_optimizer.device to nvme, or raise the limit"
            )


class _Memory(mmap.mmap):
    """Private anonymous memory that may be registered with a CUDA device; it is unregistered before it is unmapped.

    weakref.finalize would not do: mmap calls finalizers after it has unmapped the memory.
    """

    _registered: tuple[int, int, int] | None = None  # process, device, address

    def register(self, address: int) -> None:
        """Allocate the pages, and register them with the current CUDA device. Warns if CUDA refuses."""
        size, device = len(self), torch.cuda.current_device()
        part = -(-size // _THREADS)

        def fill(start: int) -> None:
            ctypes.memset(address + start, 0, min(part, size - start))

        def register() -> int:
            with torch.cuda.device(device):
                return int(torch.cuda.cudart().cudaHostRegister(address, size, 0))

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(fill, range(0, size, part)))
            # CUDA keeps a thread's last error, which torch would raise at this thread's next kernel.
            status = pool.submit(register).result()
        if status:
            warnings.warn(
                f"CUDA can't pin {size / _GIB:.3f} GiB of host memory ({torch.cuda.CudaError(status)}); it is used unpinned, "
                "and copies from and to it are slower; see `ulimit -l` and the container's limits",
                stacklevel=3,
            )
            return
        # After a fork, this process would write to copies of the pages, but the device would still use the old ones.
        self.madvise(mmap.MADV_DONTFORK)
        self._registered = os.getpid(), device, address

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._registered is None or is_finalizing():  # the end of the process frees everything
            return
        process, device, address = self._registered
        if os.getpid() != process:
            # A forked child doesn't have the pages. It may have others there by now, so nothing must be unmapped.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
            return
        with suppress(RuntimeError), torch.cuda.device(device):  # a device that has failed
            torch.cuda.synchronize()  # copies may be in flight
            torch.cuda.cudart().cudaHostUnregister(address)


def allocate_slab(nbytes: int, pin: bool = False) -> Tensor:
    """Allocate exactly this number of bytes of host memory; return a page-aligned tensor of bytes, all zero.

    - pin: allocate all pages now, and let the current CUDA device copy asynchronously, if there is one. Where CUDA refuses,
      this warns, and the memory is not pinned. A forked child doesn't have pinned pages.

    The memory is freed when its last view is deleted; if pinned, after the device's work. (torch's own pinned memory would be
    rounded up to a power of two.) Raises OffloadError.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        # Unless told not to reserve, Linux refuses more than the RAM that a virtual machine has so far.
        memory = _Memory(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except OSError as error:
        raise OffloadError(
            f"{nbytes / _GIB:.3f} GiB of host memory can't be had: {error.strerror}; see `ulimit -v`, `ulimit -d` and "
            "/proc/sys/vm/overcommit_memory, or offload less"
        ) from error
    with suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    slab = torch.frombuffer(memory, dtype=torch.uint8)
    if pin and torch.cuda.is_available():
        memory.register(slab.data_ptr())
    return slab
