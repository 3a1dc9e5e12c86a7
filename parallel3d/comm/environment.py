"""Join the world: rank and device of this process, whichever launcher started it."""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import threading
import time
import warnings
import weakref
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from parallel3d.comm.coordination import exit_key, own_agents_store
from parallel3d.errors import CommunicationError, PeerError

DEFAULT_TIMEOUT = timedelta(minutes=30)
_JOIN_TIMEOUT = timedelta(minutes=10)
_ALL_HAVE_COME = "join/all"
_PAUSE_S, _LOOK_FOR_MISSING_S = 0.05, 1.0
# Device memory of a CUDA context with the kernels of PyTorch's libraries, all of which are loaded (`_prepare_cuda`): an
# estimate; it depends on the driver and on PyTorch's build.
CONTEXT_BYTES = 700 * 2**20
# Below the ports that Linux gives to outgoing connections, which could occupy the port.
_SLURM_PORTS = range(16384, 32768)
# Variables of the launchers of MPI: rank, number of ranks, and both on this host.
_MPI_NAMES = [
    *([f"{mpi}_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")] for mpi in ("OMPI", "MV2")),
    ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
]
_LEAVE_TIMEOUT_S = 5.0
_LOOKS, _LOOK_S = 3, 0.002


def slurm_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torch's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) from those that `srun` sets.

    The port depends on job and step, so that two jobs on one host don't collide.
    """
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "127.0.0.1")
    job, step = int(environment.get("SLURM_JOB_ID", "0")), int(environment.get("SLURM_STEP_ID", "0"))
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_NTASKS"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "MASTER_ADDR": first_host(nodes),
        "MASTER_PORT": str(_SLURM_PORTS[(job * 31 + step) % len(_SLURM_PORTS)]),
    }


def mpi_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torch's variables from those of Open MPI's, MVAPICH's, MPICH's or Intel MPI's mpirun; nothing without one.

    MASTER_ADDR and MASTER_PORT are among them if all ranks are on this host.
    """
    for names in _MPI_NAMES:
        rank, size, local_rank, local_size = map(environment.get, names)
        if rank is not None and size is not None and int(size) > 1:
            found = {"RANK": rank, "WORLD_SIZE": size, **({"LOCAL_RANK": local_rank} if local_rank else {})}
            return found | ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"} if size == local_size else {})
    return {}


def first_host(node_list: str) -> str:
    """Return the first host of a SLURM node list: 'gpu[07-12,15],cpu1' -> 'gpu07'."""
    match = re.match(r"([^\[,]+)(?:\[(\w+))?", node_list)
    if match is None:
        raise CommunicationError(f"can't read a host from the SLURM node list {node_list!r}; set MASTER_ADDR")
    return match[1] + (match[2] or "")


def _adopt_launcher(mpi: bool) -> None:
    """Set torch's variables under srun and, if `mpi`, mpirun, unless RANK is set, as by torchrun and our launcher."""
    if "RANK" not in os.environ:
        by_slurm = int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in os.environ
        found = slurm_environment(os.environ) if by_slurm else mpi_environment(os.environ) if mpi else {}
        for name, value in found.items():
            os.environ.setdefault(name, value)


def _prepare_cuda() -> None:
    """Load kernels eagerly, give streams hardware queues of their own, and register no buffers, unless the user has chosen.

    Loading a kernel at its first launch waits for those that run. One that sends to another rank runs until that rank
    receives, which may wait for a kernel of its own to load: with lazy loading, the first batch of a pipeline can hang.
    """
    if torch.cuda.is_initialized() and os.environ.get("CUDA_MODULE_LOADING") != "EAGER":
        warnings.warn(
            "CUDA was in use before init_distributed, so kernels load lazily and the first batch of a pipeline can hang; "
            "call parallel3d.init_distributed() first, or set CUDA_MODULE_LOADING=EAGER in the environment",
            stacklevel=3,
        )
    else:
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    if not torch.cuda.is_initialized():
        # As many hardware queues as there may be streams: those of peer/copies.py may wait, which blocks their queue.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # NCCL would register the buffers of each captured collective with all ranks, which fails with expandable segments, and may
    # sum in another order than without CUDA graphs.
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


def _leave_at_exit() -> None:
    """Leave the world at exit while Python still runs.

    A thread of gloo that releases a tensor later aborts the process ("terminate called without an active exception"), even
    after a successful script: so gloo's threads must end, or be idle if something still refers to their group. This waits at
    most _LEAVE_TIMEOUT_S: if a rank ends early, a collective that the others never join would keep such a thread for ever.
    Python starts no thread at exit, so the thread that leaves is started now.
    """
    leaving, left = threading.Event(), threading.Event()

    def leave() -> None:
        leaving.wait()
        destroy()
        _rest(Path("/proc/self/task"))
        left.set()

    def at_exit() -> None:
        leaving.set()
        left.wait(_LEAVE_TIMEOUT_S)

    def forget() -> None:
        """Leave the groups to the parent of this forked child: their release would wait for ever for the parent's threads."""
        atexit.unregister(at_exit)
        for group in dist.distributed_c10d._world.pg_map:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    threading.Thread(target=leave, name="parallel3d leaves", daemon=True).start()
    atexit.register(at_exit)
    os.register_at_fork(after_in_child=forget)


def _rest(tasks: Path) -> None:
    """Return when gloo's threads, listed in Linux's directory `tasks`, were asleep _LOOKS times in a row.

    A thread that has completed a collective still holds its tensors while others keep the processor from it.
    """
    asleep, end = 0, time.monotonic() + _LEAVE_TIMEOUT_S
    while asleep < _LOOKS and time.monotonic() < end:
        asleep = 0 if any(map(_is_awake, tasks.glob("*/stat"))) else asleep + 1
        time.sleep(_LOOK_S)


def _is_awake(stat: Path) -> bool:
    try:
        name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
    except OSError:
        return False  # it has ended meanwhile
    return name.startswith("pt_gloo") and not rest.lstrip().startswith("S")


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = None,
    verbose: bool = True,
    timeout: timedelta = DEFAULT_TIMEOUT,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the world that the launcher describes; without a launcher, a world of one. A second call does nothing.

    - dist_backend: "nccl", "gloo", or None for NCCL if there is CUDA.
    - timeout: of communication, and for all ranks to come here. By default ranks come within 10 minutes.
    - distributed_port: the MASTER_PORT, if no launcher set one.
    - dist_init_required: False if the script has joined the world itself.
    - auto_mpi_discovery: False to leave mpirun's variables alone. verbose, config: DeepSpeed's, without effect here.

    Raises CommunicationError if only some of a launcher's variables are set. Under an elastic agent (parallel3d, torchrun) it
    names the ranks that have not come in time; where the launcher knows that one has ended, PeerError is raised at once.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise CommunicationError(
            "dist_init_required is False, but this process has joined no world; call parallel3d.init_distributed() before, or "
            "leave the argument out"
        )
    if distributed_port is not None:
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
    _adopt_launcher(auto_mpi_discovery)
    _join(dist_backend, timeout, init_method, rank, world_size)
    _leave_at_exit()


def _join(dist_backend: str | None, timeout: timedelta, init_method: str | None, rank: int, world_size: int) -> None:
    _prepare_cuda()
    backend = (dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")).lower()
    device = local_device(backend)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    device_id = device if device.type == "cuda" else None
    if init_method is None and "RANK" not in os.environ and rank < 0:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout, device_id=device_id)
        return
    missing = [n for n in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
    if init_method is None and rank < 0 and missing:
        raise CommunicationError(
            f"RANK is set but {', '.join(missing)} is not; start the script by parallel3d, torchrun or srun, "
            "or set them (mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500), or unset RANK"
        )
    limit = _JOIN_TIMEOUT if timeout == DEFAULT_TIMEOUT else timeout
    agents = own_agents_store() if init_method is None and rank < 0 else None
    if agents is not None:
        meet(agents, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), limit.total_seconds())
    dist.init_process_group(
        backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout, device_id=device_id
    )


def meet(store: dist.Store, rank: int, size: int, limit_s: float) -> None:
    """Wait until every rank has come here. Raises CommunicationError that names those that have not, PeerError if one ended."""
    store.set(f"join/{rank}", "")
    if store.add("join/number", 1) >= size:
        store.set(_ALL_HAVE_COME, "")
    begin, looks = time.monotonic(), 1
    # Not store.wait, of which torch reports each timeout.
    while not store.check([_ALL_HAVE_COME]):
        time.sleep(_PAUSE_S)
        if time.monotonic() - begin < min(looks * _LOOK_FOR_MISSING_S, limit_s):
            continue
        looks += 1
        missing = [other for other in range(size) if not store.check([f"join/{other}"])]
        for other in missing:
            if store.check([exit_key(other)]):
                raise PeerError(
                    f"rank {other} ended ({store.get(exit_key(other)).decode()}) before it joined the world; every rank must "
                    "call parallel3d.init_distributed() or parallel3d.initialize(...)",
                    other,
                )
        if missing and time.monotonic() - begin > limit_s:
            raise CommunicationError(
                f"ranks {missing} have not joined the world within {limit_s:g} s; look at what they do before "
                "parallel3d.init_distributed(), or pass a longer timeout to it"
            )


def is_initialized() -> bool:
    """Return whether this process has joined a world."""
    return dist.is_initialized()


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    """Return this process's rank in the world or in a torch group; before init_distributed the launcher's, or 0."""
    return dist.get_rank(group) if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """Return the number of processes in the world or in a torch group; joins the world first if needed."""
    init_distributed()
    return dist.get_world_size(group)


def get_local_rank() -> int:
    """Return this process's rank on its host."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))


def world_backend() -> str:
    """Return 'nccl' if the world has it, also beside another backend or as torch's default for GPUs; else 'gloo'."""
    return "nccl" if "nccl" in dist.get_backend_config() else "gloo"


def local_device(backend: str | None = None) -> torch.device:
    """Return the device of this rank: its own GPU under NCCL, else the CPU. Raises CommunicationError without a GPU."""
    if (backend or world_backend()) != "nccl":
        return torch.device("cpu")
    count, local_rank = torch.cuda.device_count(), get_local_rank()
    if local_rank >= count:
        raise CommunicationError(
            f"local rank {local_rank} has no GPU of its own: {count} CUDA devices are visible; start at most {count} "
            "processes on this host (srun --gpus-per-task hides the others' GPUs from each: add --gpu-bind=none), or pass "
            "dist_backend='gloo' to train on the CPU"
        )
    return torch.device("cuda", local_rank)


class Resettable(Protocol):
    """A CUDA graph."""

    def reset(self) -> None:
        """Free it."""


# Graphs that may hold collectives of the world's groups.
_GRAPHS: weakref.WeakSet[Resettable] = weakref.WeakSet()


def reset_before_destroy(graph: Resettable) -> None:
    """Reset a graph when the world is destroyed: NCCL waits without a limit for the end of one that has its collectives."""
    _GRAPHS.add(graph)


def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
    """Destroy a process group of torch; by default all, and before that CUDA graphs, which may hold collectives."""
    if group in (None, dist.group.WORLD):
        for graph in list(_GRAPHS):
            graph.reset()
    dist.destroy_process_group(group)


def destroy() -> None:
    """Leave the world, which destroys the process groups made from it."""
    if dist.is_initialized():
        destroy_process_group()
