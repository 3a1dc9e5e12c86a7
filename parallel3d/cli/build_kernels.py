"""`p3d build-kernels`: compile the CUDA kernels, for an installation that found no nvcc."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from parallel3d.kernels.library import build, open_library


def add_command(commands: Any) -> None:
    """Add `build-kernels` to the subcommands of an argparse parser."""
    parser = commands.add_parser(
        "build-kernels",
        help="compile the CUDA kernels",
        description="Compile the CUDA kernels by nvcc, for A100, H100 and later GPUs, into the user's cache; what is there "
        "already stays. No GPU is needed.",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="another directory than the user's cache")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    path = build(options.out)
    open_library(path)  # raises now if it can't be loaded
    print(path)
    return 0
