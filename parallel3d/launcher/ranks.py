"""Start the ranks of one host for a function, and return its results: for checks and measurements."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from parallel3d.comm.environment import destroy, init_distributed
from parallel3d.errors import ExecutionError, Parallel3DError
from parallel3d.membership import local_job


def run_ranks(function: Callable[..., Any], world_size: int, uses_gpus: bool, *args: Any) -> list[Any]:
    """Run function(*args) in new processes that have joined one world, and return the results in rank order.

    - function: importable by its name. It finds LOCAL_RANK in the environment and its share of the cores as torch's threads.
    - uses_gpus: True for NCCL and a GPU for each rank; False for gloo without visible GPUs.

    What the ranks print is not shown. Raises ExecutionError with the message of the first Parallel3DError, or else with the
    traceback of the rank that failed first; all other ranks are killed then.
    """
    # The fork server imports what the ranks need; they are its forks, because this process may have used CUDA.
    multiprocessing.get_context("forkserver").set_forkserver_preload([function.__module__])
    with TemporaryDirectory(prefix="parallel3d_ranks_") as name:
        folder = Path(name)
        work = folder, function, args, world_size, uses_gpus, local_job()
        context = start_processes(_run, work, world_size, join=False, start_method="forkserver")
        try:
            while not context.join():
                pass
        except (ProcessRaisedException, ProcessExitedException) as failure:
            messages = sorted(folder.glob("error.*"), key=lambda path: path.stat().st_mtime_ns)
            raise ExecutionError(messages[0].read_text() if messages else str(failure)) from failure
        finally:
            for process in context.processes:
                process.kill()
        return [torch.load(folder / f"result.{rank}", weights_only=False) for rank in range(world_size)]


def _run(
    rank: int,
    folder: Path,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    world_size: int,
    uses_gpus: bool,
    variables: Mapping[str, str],
) -> None:
    """Run the function as one rank of the world."""
    with (folder / f"output.{rank}").open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ |= {**variables, "LOCAL_RANK": str(rank)}
    if not uses_gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    method = (folder / "rendezvous").as_uri()
    init_distributed("nccl" if uses_gpus else "gloo", init_method=method, rank=rank, world_size=world_size)
    try:
        torch.save(function(*args), folder / f"result.{rank}")
    except Parallel3DError as error:
        (folder / f"error.{rank}").write_text(str(error))
        raise
    destroy()  # multiprocessing ends its processes without exit handlers
