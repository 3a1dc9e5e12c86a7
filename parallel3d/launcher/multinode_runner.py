"""DeepSpeed's classes of what starts several hosts."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from functools import partial
from typing import Any

from parallel3d.launcher.nodes import starters


class MultiNodeRunner:
    """Starter of a script on several hosts, as DeepSpeed's classes have it: `get_cmd(environment, hosts)` is its command."""

    def __init__(
        self, args: argparse.Namespace, world_info_base64: str, resource_pool: Any = None, launcher: str = "openmpi"
    ):
        self.args, self.exports, self._launcher = args, dict[str, str](), launcher

    def add_export(self, key: str, var: str) -> None:
        """Pass a variable on to all hosts. In `exports` it is quoted for a shell if need be, with double quotes."""
        self.exports[key] = var if shlex.quote(var) == var else f'"{var}"'

    def get_cmd(self, environment: dict[str, str], active_resources: Mapping[str, Any]) -> list[str]:
        """Return the command; its environment gets the variables of add_export. Raises ConfigError."""
        variables = {name: value.strip('"') for name, value in self.exports.items()}
        environment.update(variables)
        hosts = {
            host: list(range(slots)) if isinstance(slots, int) else slots for host, slots in active_resources.items()
        }
        options = argparse.Namespace(**{**vars(self.args), "launcher": self._launcher})
        [starter] = starters(options, hosts, variables)
        return list(starter.command)


OpenMPIRunner = partial(MultiNodeRunner, launcher="openmpi")
SlurmRunner = partial(MultiNodeRunner, launcher="slurm")
# Those of MVAPICH and Intel MPI have the options of MPICH's process manager, Hydra.
MPICHRunner = MVAPICHRunner = IMPIRunner = partial(MultiNodeRunner, launcher="mpich")
