"""Command `deepspeed`: the launcher under DeepSpeed's name, which passes --local_rank to the script."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from parallel3d.launcher import cli
from parallel3d.launcher.nodes import ENVIRONMENT_FILES

DEEPSPEED_ENVIRONMENT_NAME = ENVIRONMENT_FILES[0]

command = partial(cli.main, prog="deepspeed")


def main(args: Sequence[str] | None = None) -> int:
    """Run DeepSpeed's command line (default: this process's own) and return the exit code. Raises ConfigError."""
    return cli.run(parse_args(args))


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return DeepSpeed's options."""
    return cli.parse_options(args, "deepspeed")


if __name__ == "__main__":
    sys.exit(command())
