"""Scripts that start a training as a plan's winner: on one host, on several by ssh, and by Slurm."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from parallel3d.planner.report.drawing import render
from parallel3d.planner.search.result import PlanResult

SCRIPTS = _SHELL, _SLURM = "run.sh", "run.sbatch"


def launch_scripts(result: PlanResult, directory: Path) -> dict[str, str]:
    """Return name -> text of the scripts for the winner; none if nothing fits. directory: of config.json and ranks.json.

    They take options of the launcher, the training script and its arguments, and add --deepspeed_config. run.sbatch is for
    hosts of equally many GPUs, over which the ranks are dealt out in blocks of one size.
    """
    if not result.best:
        return {}
    hosts: dict[str, list[int]] = {}
    for place in result.map:
        hosts.setdefault(place.host, []).append(place.gpu)
    names, one = list(hosts), hosts[result.map[0].host]
    block = next((k for k, place in enumerate(result.map) if place.host != names[0]), len(one))
    are_dealt = all(place.host == names[k // block % len(names)] for k, place in enumerate(result.map))
    by_slurm = len(names) > 1 and are_dealt and all(len(own) == len(one) for own in hosts.values())
    is_chosen = result.on_gpus and one != list(range(len(one)))
    given = {
        "plan": result,
        "hosts": list(map(tuple, hosts.values())),
        "block": block,
        "visible": ",".join(map(str, one)) if is_chosen else "",
        "config": quote(str(directory / "config.json")),
        "ranks": quote(str(directory / "ranks.json")),
    }
    return {name: str(render(f"{name}.jinja", **given)) for name in (SCRIPTS if by_slurm else [_SHELL])}


def commands(result: PlanResult, directory: Path) -> list[str]:
    """Return the command lines that start the winner by its scripts."""
    call = {_SHELL: "", _SLURM: "sbatch "}
    return [f"{call[name]}{quote(str(directory / name))} train.py" for name in launch_scripts(result, directory)]
