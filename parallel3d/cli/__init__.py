"""The command `p3d`: tools around a training, one subcommand each."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from parallel3d.errors import Parallel3DError
from parallel3d.planner import rare_collections

# Command -> its module, which is imported when the command is called.
_MODULES = {
    "config": "config",
    "check": "check",
    "ckpt": "ckpt",
    "plan": "plan",
    "doctor": "kernels",
    "build-kernels": "kernels",
    "deepspeed": "deepspeed",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's own) and return the exit code: 2 for a user's error."""
    parser = argparse.ArgumentParser(prog="p3d", description="Tools around a training with parallel3d.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    called = (sys.argv[1:] if argv is None else argv)[:1]
    modules = [_MODULES[name] for name in called if name in _MODULES] or dict.fromkeys(_MODULES.values())
    with rare_collections():
        for module in modules:
            import_module(f"parallel3d.cli.{module}").add_command(commands)
    options = parser.parse_args(argv)
    try:
        code: int = options.run(options)
    except Parallel3DError as error:
        print(f"p3d: {error}", file=sys.stderr)
        return 2
    return code
