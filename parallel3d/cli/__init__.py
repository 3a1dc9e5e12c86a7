"""The command `p3d`: tools around a training, one subcommand each."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from parallel3d.cli import check, ckpt, config, kernels, plan
from parallel3d.errors import Parallel3DError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's own) and return the exit code: 2 for a user's error."""
    parser = argparse.ArgumentParser(prog="p3d", description="Tools around a training with parallel3d.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (config, check, ckpt, plan, kernels):
        command.add_command(commands)
    options = parser.parse_args(argv)
    try:
        code: int = options.run(options)
    except Parallel3DError as error:
        print(f"p3d: {error}", file=sys.stderr)
        return 2
    return code
