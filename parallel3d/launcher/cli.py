"""Command line of the launcher."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from math import inf

from parallel3d.command_line import Parser
from parallel3d.config.layout import parse_layout
from parallel3d.errors import ConfigError, nearest
from parallel3d.launcher.options import GRACE_S, LaunchOptions

_USAGE = """parallel3d [options] script [args ...]
       parallel3d [options] -m module [args ...]"""

_DESCRIPTION = """Run a Python script once per rank on this node. Each process finds RANK, LOCAL_RANK, WORLD_SIZE,
LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment. With neither --num_gpus nor --num_procs: one process
per visible CUDA device, or a single CPU process where there is none. N may be a layout: pp2,tp2,dp2 are 8 processes.
If OMP_NUM_THREADS is not set, the cores are divided among the processes."""

_EPILOG = f"""The exit code is that of the rank that failed first, 128 + N when signal N ended it or the launcher. When
a rank fails, or on Ctrl-C, the others are asked to end and killed after {GRACE_S} seconds."""

# Options of torchrun and of the command deepspeed.
_OF_MANY_NODES = (
    "nnodes nproc_per_node node_rank rdzv_backend rdzv_endpoint rdzv_id master_addr hostfile num_nodes".split()
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's own) and return the exit code.

    It owns its process: it installs signal handlers, changes the environment, and ends the processes that its workers
    leave. Raises SystemExit for a command line that can't be carried out.
    """
    arguments = sys.argv[1:] if argv is None else argv
    launch_parser().parse_known_args(arguments)  # --help and --version end here, before torch is imported
    import torch

    from parallel3d.launcher.agent import launch

    try:
        return launch(parse(arguments, torch.cuda.device_count()))
    except ConfigError as error:
        launch_parser().error(str(error))


def parse(argv: Sequence[str], num_devices: int) -> LaunchOptions:
    """Parse `argv` on a node with `num_devices` CUDA devices. Raises SystemExit(2) with a message if it is wrong."""
    parser = launch_parser()
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        hint = nearest(unknown[0].partition("=")[0], flags)
        if unknown[0].partition("=")[0].lstrip("-").replace("-", "_") in _OF_MANY_NODES:
            hint = " This command starts the ranks of one node; torchrun, srun of Slurm, or deepspeed --hostfile start several."
        parser.error(f"unknown option {unknown[0]}.{hint} The script's own options go after the script.")
    if not known.command:
        parser.error("nothing to run: name a script, or a module after -m")
    if not known.is_module and not os.path.exists(known.command[0]):
        parser.error(f"there is no script {known.command[0]!r} in {os.getcwd()}")
    if known.num_gpus is not None and known.num_gpus > num_devices:
        parser.error(
            f"--num_gpus {known.num_gpus}, but the number of CUDA devices present is {num_devices} "
            f"(CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}). "
            f"Ask for no more, or for CPU processes with --num_procs {known.num_gpus}."
        )
    options = vars(known)
    num_gpus, num_procs = options.pop("num_gpus"), options.pop("num_procs")
    return LaunchOptions(num_procs or num_gpus or num_devices or 1, num_procs is None and num_devices > 0, **options)


def launch_parser() -> Parser:
    """Return the parser of the launcher's options."""
    parser = Parser(prog="parallel3d", usage=_USAGE, description=_DESCRIPTION, epilog=_EPILOG, allow_abbrev=False)
    parser.add_version()
    count = parser.add_mutually_exclusive_group()
    count.add_argument("--num_gpus", type=_processes, metavar="N", help="N processes, process i on CUDA device i")
    count.add_argument("--num_procs", type=_processes, metavar="N", help="N CPU processes, which see no CUDA device")
    parser.add_argument(
        "--master_port",
        type=partial(_integer, noun="a port", least=0, most=65535),
        default=0,
        metavar="P",
        help="port where the ranks meet (default: a free one)",
    )
    parser.add_argument(
        "--log_dir", metavar="DIR", help="also write each rank's output to files under DIR (no live progress bar then)"
    )
    parser.add_argument(
        "--max_restarts",
        type=partial(_integer, noun="a number of restarts", least=0),
        default=0,
        metavar="N",
        help="start all ranks again, up to N times, when one has failed; the script continues by engine.resume (default: 0)",
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="what follows is a module, as in python -m")
    # One positional for everything after the options: argparse would drop a "--" between two positionals.
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _processes(text: str) -> int:
    """Parse a number of processes, given as a number or as a layout."""
    if not text[:1].isalpha():
        return _integer(text, "a number of processes", 1)
    try:
        return parse_layout(text).world_size
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _integer(text: str, noun: str, least: int, most: float = inf) -> int:
    if not text.isdecimal() or not least <= int(text) <= most:
        limits = f"of at least {least}" if most == inf else f"from {least} to {most}"
        raise argparse.ArgumentTypeError(f"{text!r} is not {noun}: give an integer {limits}")
    return int(text)
