"""Command `p3d completion`."""

from __future__ import annotations

import argparse

import shtab

from parallel3d.cli.arguments import make_parser
from parallel3d.launcher.cli import launch_parser


def run(options: argparse.Namespace) -> int:
    """Print the completion of both commands for a shell."""
    for parser in (make_parser(), launch_parser()):
        print(shtab.complete(parser, options.shell))
    return 0
