"""Scripts that start a training as a plan's winner: on one host, on several by ssh, and by Slurm."""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from pathlib import Path
from shlex import quote

from parallel3d.planner.search.result import PlanResult

SCRIPTS = _SHELL, _SLURM = "run.sh", "run.sbatch"


def launch_scripts(result: PlanResult, directory: Path) -> dict[str, str]:
    """Return name -> text of the scripts for the winner; none if nothing fits. directory: of config.json and ranks.json.

    They take options of the launcher, the training script and its arguments, and add --deepspeed_config. run.sbatch is for
    hosts of equally many GPUs.
    """
    if not result.best:
        return {}
    of_host = [[place.gpu for place in own] for _, own in groupby(result.map, key=attrgetter("host"))]
    one = of_host[0]
    script = f'"$@" --deepspeed_config {quote(str(directory / "config.json"))}'
    head = f"#!/bin/sh\n# {result.best[0].layout} of {result.model}: give the training script and its arguments.\n"
    chosen = one != list(range(len(one))) and result.on_gpus
    devices = f"export CUDA_VISIBLE_DEVICES={','.join(map(str, one))}\n" if chosen else ""
    if len(of_host) == 1:
        count = f"--num_{'gpus' if result.on_gpus else 'procs'} {len(one)}"
        return {_SHELL: f"{head}{devices}exec parallel3d {count} {script}\n"}
    scripts = {_SHELL: f"{head}exec parallel3d --ranks {quote(str(directory / 'ranks.json'))} {script}\n"}
    if all(len(gpus) == len(one) for gpus in of_host):
        if any(gpus != one for gpus in of_host):
            devices += "# The places of ranks differ between hosts: ranks.json lists them.\n"
        wanted = {"nodes": len(of_host), "ntasks-per-node": len(one)} | (
            {"gpus-per-node": len(one)} if result.on_gpus else {}
        )
        first, _, rest = head.partition("\n")
        asked = "".join(f"#SBATCH --{name}={number}\n" for name, number in wanted.items())
        scripts[_SLURM] = f"{first}\n{asked}{rest}{devices}srun python {script}\n"
    return scripts


def commands(result: PlanResult, directory: Path) -> list[str]:
    """Return the command lines that start the winner by its scripts."""
    call = {_SHELL: "", _SLURM: "sbatch "}
    return [f"{call[name]}{quote(str(directory / name))} train.py" for name in launch_scripts(result, directory)]
