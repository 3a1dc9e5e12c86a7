"""Command `deepspeed`: the launcher under DeepSpeed's name, which passes --local_rank to the script.

Also `deepspeed.launcher.runner`, for scripts that import its functions.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial

from parallel3d.launcher import cli
from parallel3d.launcher.hosts import parse_hostfile, parse_resource_filter
from parallel3d.launcher.nodes import ENVIRONMENT_FILES

__all__ = ["DEEPSPEED_ENVIRONMENT_NAME", "command", "encode_world_info", "main", "parse_args", "parse_resource_filter"]

_parse_hostfile = parse_hostfile
DEEPSPEED_ENVIRONMENT_NAME = ENVIRONMENT_FILES[0]

command = partial(cli.main, prog="deepspeed")


def main(args: Sequence[str] | None = None) -> int:
    """Run DeepSpeed's command line (default: this process's own) and return the exit code. Raises ConfigError."""
    return cli.run(parse_args(args))


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return DeepSpeed's options."""
    return cli.parse_options(args, "deepspeed")


def encode_world_info(world_info: Mapping[str, object]) -> str:
    """Return the base64 of the hosts and their slots as JSON."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()


if __name__ == "__main__":
    sys.exit(command())
