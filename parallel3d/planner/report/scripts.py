"""Scripts that start a training as a plan's winner: on one host, on several by torchrun, and by Slurm."""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from pathlib import Path
from shlex import quote

from parallel3d.planner.search.result import PlanResult

SCRIPTS = _SHELL, _SLURM = "run.sh", "run.sbatch"


def launch_scripts(result: PlanResult, config: str) -> dict[str, str]:
    """Return name -> text of the scripts for the winner; none if nothing fits. config: path of config.json.

    They take the training script and its arguments, and add --deepspeed_config. run.sbatch is for hosts of equally many GPUs.
    """
    if not result.best:
        return {}
    of_host = [[place.gpu for place in own] for _, own in groupby(result.map, key=attrgetter("host"))]
    one = of_host[0]
    script = f'"$@" --deepspeed_config {quote(config)}'
    head = f"#!/bin/sh\n# {result.best[0].layout} of {result.model}: give the training script and its arguments.\n"
    if one != list(range(len(one))) and result.on_gpus:
        head += f"export CUDA_VISIBLE_DEVICES={','.join(map(str, one))}\n"
    if len(of_host) == 1:
        return {_SHELL: f"{head}exec parallel3d --num_{'gpus' if result.on_gpus else 'procs'} {len(one)} {script}\n"}
    if any(gpus != one for gpus in of_host):
        head += "# The places of ranks differ between hosts: ranks.json lists them.\n"
    hosts = (
        f"--nnodes {len(of_host)} --nproc_per_node {len(one) if all(len(g) == len(one) for g in of_host) else 'gpu'}"
    )
    meet = "--node_rank ${NODE_RANK:?number of this host} --master_addr ${MASTER_ADDR:?address of host 0}"
    scripts = {_SHELL: f"{head}exec torchrun {hosts} {meet} {script}\n"}
    if all(len(gpus) == len(one) for gpus in of_host):
        wanted = {"nodes": len(of_host), "ntasks-per-node": len(one)} | (
            {"gpus-per-node": len(one)} if result.on_gpus else {}
        )
        first, _, rest = head.partition("\n")
        asked = "".join(f"#SBATCH --{name}={number}\n" for name, number in wanted.items())
        scripts[_SLURM] = f"{first}\n{asked}{rest}srun python {script}\n"
    return scripts


def commands(result: PlanResult, directory: Path) -> list[str]:
    """Return the command lines that start the winner by its scripts."""
    call = {_SHELL: "", _SLURM: "sbatch "}
    return [f"{call[name]}{quote(str(directory / name))} train.py" for name in launch_scripts(result, "")]
