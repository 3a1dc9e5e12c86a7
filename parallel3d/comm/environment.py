"""Joining the world: which rank this process is, on which device, by whichever launcher started it."""

from __future__ import annotations

import atexit
import os
import re
import threading
import time
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from parallel3d.errors import CommunicationError

DEFAULT_TIMEOUT = timedelta(minutes=30)
# Device memory of a CUDA context with the kernels of PyTorch's libraries, all of which are loaded (`_prepare_cuda`): an
# estimate; it depends on the driver and on PyTorch's build.
CONTEXT_BYTES = 700 * 2**20
_SLURM_PORTS = range(20000, 50000)
_LEAVE_TIMEOUT_S = 5.0
_LOOKS, _LOOK_S = 3, 0.002


def slurm_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """torch's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) from those that `srun` sets.

    The port follows from job and step, so that two jobs on one host don't collide.
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


def first_host(node_list: str) -> str:
    """The first host of a SLURM node list: 'gpu[07-12,15],cpu1' -> 'gpu07'."""
    match = re.match(r"([^\[,]+)(?:\[(\w+))?", node_list)
    if match is None:
        raise CommunicationError(f"can't read a host from the SLURM node list {node_list!r}; set MASTER_ADDR")
    return match[1] + (match[2] or "")


def _adopt_slurm() -> None:
    """srun sets no RANK; torchrun and our launcher do, and win when both are there."""
    if "RANK" not in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in os.environ:
        for name, value in slurm_environment(os.environ).items():
            os.environ.setdefault(name, value)


def _prepare_cuda() -> None:
    """Have kernels load eagerly and streams run apart, unless the user has chosen.

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
        # As many hardware queues as there may be streams: peer_copies.py has some that wait, which hold up their queue.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def _leave_at_exit() -> None:
    """Have a process that ends leave the world while Python still runs.

    A thread of gloo's that lets go of a tensor after that aborts the process ("terminate called without an active
    exception"), of a script that went well too: so its threads end, or, where something still refers to their group, come to
    rest. But no longer than _LEAVE_TIMEOUT_S: where a rank ends early, a collective that the others never join would keep such
    a thread for good. Python starts no thread at exit, so now.
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

    threading.Thread(target=leave, name="parallel3d leaves", daemon=True).start()
    atexit.register(at_exit)


def _rest(tasks: Path) -> None:
    """Return when gloo's threads, in Linux's directory of this process's, were asleep _LOOKS times in a row.

    One that has completed a collective still has its tensors for as long as others take the processor from it.
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
    """Join the world that the launcher describes; a process that none started is a world of one.

    dist_backend: "nccl", "gloo", or None for NCCL where CUDA is there. distributed_port: the MASTER_PORT, where no
    launcher set one. dist_init_required: False where the script has joined the world itself. A second call does nothing.
    auto_mpi_discovery, verbose and config are DeepSpeed's, and change nothing here.
    Raises CommunicationError when a launcher's variables are there in part.
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
    _join(dist_backend, timeout, init_method, rank, world_size)
    _leave_at_exit()


def _join(dist_backend: str | None, timeout: timedelta, init_method: str | None, rank: int, world_size: int) -> None:
    _adopt_slurm()
    _prepare_cuda()
    backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
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
            f"RANK is set but {', '.join(missing)} is not; start the script by parallel3d, torchrun or srun, or unset RANK"
        )
    dist.init_process_group(
        backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout, device_id=device_id
    )


def is_initialized() -> bool:
    """Whether this process has joined a world."""
    return dist.is_initialized()


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    """This process's rank in the world, or in a group of torch's; before init_distributed the launcher's, or 0."""
    return dist.get_rank(group) if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """Number of processes in the world, or in a group of torch's; joins the world first where that hasn't happened."""
    init_distributed()
    return dist.get_world_size(group)


def get_local_rank() -> int:
    """This process's rank on its host."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))


def local_device(backend: str | None = None) -> torch.device:
    """The device this rank computes on: its own GPU under NCCL, else the CPU. Raises CommunicationError without one."""
    if (backend or dist.get_backend()) != "nccl":
        return torch.device("cpu")
    count, local_rank = torch.cuda.device_count(), get_local_rank()
    if local_rank >= count:
        raise CommunicationError(
            f"local rank {local_rank} has no GPU of its own: {count} CUDA devices are visible; start at most {count} "
            "processes on this host, or pass dist_backend='gloo' to train on the CPU"
        )
    return torch.device("cuda", local_rank)


def destroy() -> None:
    """Leave the world; the process groups made from it are gone."""
    if dist.is_initialized():
        dist.destroy_process_group()
