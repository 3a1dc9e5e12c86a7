"""The command `p3d`: tools around a training, one subcommand each."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from parallel3d.cli.arguments import make_parser
from parallel3d.errors import Parallel3DError
from parallel3d.planner import rare_collections


def command() -> NoReturn:
    """Run this process's command line, and end the process without freeing its memory, which with PyTorch takes 0.2 s."""
    codes: list[int] = []
    atexit.register(_leave, codes)  # before all others, and so called after them
    codes.append(main())
    sys.exit(codes[0])


def _leave(codes: Sequence[int]) -> None:
    if codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(codes[0])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's own) and return the exit code: 2 for a user's error."""
    options = make_parser().parse_args(argv)
    module, _, function = options.run.partition(":")
    with rare_collections():
        run = getattr(import_module(f"parallel3d.cli.{module}"), function)
    try:
        code: int = run(options)
        sys.stdout.flush()
    except Parallel3DError as error:
        print(f"p3d: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read the output has ended, as in `p3d ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return code
