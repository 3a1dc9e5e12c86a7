"""Commands by which MPI's and Slurm's own launchers start a script on several hosts, and DeepSpeed's classes of them."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from parallel3d.errors import ConfigError

# Launchers, by DeepSpeed's names. Those of MPICH, MVAPICH and Intel MPI have the same options, of their process manager Hydra.
LAUNCHERS = ("openmpi", "mpich", "mvapich", "impi", "slurm")


def nodes_command(options: argparse.Namespace, hosts: Mapping[str, int], exports: Mapping[str, str]) -> list[str]:
    """Return the command that starts the script of `options` on these hosts with their numbers of processes.

    exports: variables of the command's environment that the launcher passes on; Slurm's passes all on. Raises ConfigError.
    """
    launcher, sizes = options.launcher.lower(), set(hosts.values())
    if launcher not in LAUNCHERS:
        raise ConfigError(
            f"--launcher {options.launcher} is not supported; drop it, so that hosts are started by ssh, or use one of "
            f"{', '.join(LAUNCHERS)}"
        )
    if len(sizes) > 1:
        raise ConfigError(
            f"--launcher {launcher} starts one number of processes on each host, but the hosts have {dict(hosts)} slots; give "
            "--num_gpus, or drop --launcher"
        )
    each = sizes.pop()
    number, names = str(each * len(hosts)), ",".join(hosts)
    if launcher == "slurm":
        command = ["srun", "-n", number, "--ntasks-per-node", str(each), "--nodelist", names, "--export=ALL"]
    elif launcher == "openmpi":
        command = ["mpirun", "-n", number, "--host", ",".join(f"{host}:{each}" for host in hosts)]
        command += [word for name in exports for word in ("-x", name)]
    else:
        command = ["mpirun", "-n", number, "-ppn", str(each), "-hosts", names, "-genvlist", ",".join(exports)]
    python = [] if options.no_python else [sys.executable, "-u", *["-m"] * options.module]
    return [*command, *shlex.split(options.launcher_args), *python, options.user_script, *options.user_args]


class MultiNodeRunner:
    """Starter of a script on several hosts, as DeepSpeed's classes have it: `get_cmd(environment, hosts)` is its command."""

    launcher = ""

    def __init__(self, args: argparse.Namespace, world_info_base64: str, resource_pool: Any = None):
        self.args, self.exports = args, dict[str, str]()

    def add_export(self, key: str, var: str) -> None:
        """Pass a variable on to all hosts. In `exports` it is quoted for a shell if need be, with double quotes."""
        self.exports[key] = var if shlex.quote(var) == var else f'"{var}"'

    def get_cmd(self, environment: dict[str, str], active_resources: Mapping[str, Any]) -> list[str]:
        """Return the command; its environment gets the variables of add_export. Raises ConfigError."""
        environment.update({name: value.strip('"') for name, value in self.exports.items()})
        hosts = {host: slots if isinstance(slots, int) else len(slots) for host, slots in active_resources.items()}
        options = argparse.Namespace(**{**vars(self.args), "launcher": self.launcher})
        return nodes_command(options, hosts, self.exports)


class OpenMPIRunner(MultiNodeRunner):
    """Starts by Open MPI's mpirun."""

    launcher = "openmpi"


class MPICHRunner(MultiNodeRunner):
    """Starts by MPICH's mpirun."""

    launcher = "mpich"


class MVAPICHRunner(MultiNodeRunner):
    """Starts by MVAPICH's mpirun."""

    launcher = "mvapich"


class IMPIRunner(MultiNodeRunner):
    """Starts by Intel MPI's mpirun."""

    launcher = "impi"


class SlurmRunner(MultiNodeRunner):
    """Starts by srun."""

    launcher = "slurm"
