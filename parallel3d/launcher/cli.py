"""Command line of the launcher, under this package's name and DeepSpeed's."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from parallel3d.command_line import Parser, integer
from parallel3d.config.layout import parse_layout
from parallel3d.errors import ConfigError, nearest
from parallel3d.launcher.hosts import HOSTFILE, WorldSize, parse_range_list
from parallel3d.launcher.processes import GRACE_S
from parallel3d.launcher.start import start

LAUNCHERS = ("ssh", "pdsh", "openmpi", "mpich", "slurm")
"""What starts several hosts, by DeepSpeed's names. Here ssh does what pdsh does there."""

_USAGE = """%(prog)s [options] script [args ...]
       %(prog)s [options] -m module [args ...]"""

_DESCRIPTION = """Run a Python script once per rank, on this host or those of a hostfile. Each process finds RANK, LOCAL_RANK,
WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment. With neither --num_gpus nor --num_procs nor a
hostfile: one process per visible CUDA device, or a single CPU process where there is none. N may be a layout: pp2,tp2,dp2 are
8 processes, divided among the hosts. If OMP_NUM_THREADS is not set, the cores are divided among the processes."""

_EPILOG = f"""The exit code is that of the rank that failed first, 128 + N when signal N ended it or the launcher. When
a rank fails, or on Ctrl-C, the others are asked to end and killed after {GRACE_S} seconds."""

_TORCHRUNS = "nnodes nproc_per_node rdzv_backend rdzv_endpoint rdzv_id rdzv_conf standalone role tee redirects".split()
_ELASTIC = "--max_restarts goes on with fewer hosts, as the configuration's section elastic allows"
_REFUSED = {
    "autotuning": "`p3d plan` finds the layout",
    "elastic_training": _ELASTIC,
    "min_elastic_nodes": _ELASTIC,
    "max_elastic_nodes": _ELASTIC,
}


def main(argv: Sequence[str] | None = None, prog: str = "parallel3d") -> int:
    """Run the command line `argv` (default: this process's own) and return the exit code.

    - prog: "deepspeed" for what differs in DeepSpeed's command: --local_rank is passed to the script.

    It owns its process: it installs signal handlers, changes the environment, and ends the processes that its workers
    leave. Raises SystemExit for a command line that can't be carried out.
    """
    try:
        return run(parse_options(sys.argv[1:] if argv is None else argv, prog))
    except ConfigError as error:
        launch_parser(prog).error(str(error))


def parse_options(argv: Sequence[str] | None = None, prog: str = "parallel3d") -> argparse.Namespace:
    """Return the options, and the command as DeepSpeed's user_script and user_args too. Raises SystemExit with a message."""
    parser = launch_parser(prog)
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].partition("=")[0]
        flags = [flag for action in parser._actions for flag in action.option_strings]
        hint = f"{nearest(name, flags)} The script's own options go after the script."
        if name.lstrip("-").replace("-", "_") in _TORCHRUNS:
            hint = f" That one is torchrun's; use torchrun, or {prog} with --hostfile, --num_nodes and --num_gpus."
        parser.error(f"unknown option {unknown[0]}.{hint}")
    if not known.command:
        parser.error("nothing to run: name a script, or a module after -m")
    if known.module and known.no_python:
        parser.error("-m and --no_python: a module is Python's; give one of them")
    known.prog, (known.user_script, *known.user_args) = prog, known.command
    known.log_level = "error" if known.quiet else known.log_level
    passes_local_rank = prog == "deepspeed" and not known.no_local_rank  # by a variable that torch's agent replaces
    known.local_rank_arguments = ["--local_rank=${local_rank}"] if passes_local_rank else []
    return known


def run(options: argparse.Namespace) -> int:
    """Run the command to its end and return the job's exit code. Raises ConfigError if it can't be carried out.

    Of options of DeepSpeed's that have no meaning here, the error says what to use.
    """
    for name, remedy in _REFUSED.items():
        if getattr(options, name):
            raise ConfigError(f"--{name} is not supported; {remedy}")
    if options.launcher.lower() not in LAUNCHERS:
        raise ConfigError(
            f"--launcher {options.launcher} is not supported; drop it, so that hosts are started by ssh, or use one of "
            f"{', '.join(LAUNCHERS)} (Intel MPI and MVAPICH take mpich's options)"
        )
    return start(options)


def launch_parser(prog: str = "parallel3d") -> Parser:
    """Return the parser of the launcher's options."""
    parser = Parser(prog=prog, usage=_USAGE, description=_DESCRIPTION, epilog=_EPILOG, allow_abbrev=False)
    parser.add_version()
    _add_hosts(parser)
    _add_starting(parser)
    _add_processes(parser)
    for name in _REFUSED:
        action = "store_true" if name == "elastic_training" else "store"
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS, action=action)
    # One positional for everything after the options: argparse would drop a "--" between two positionals.
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _add_hosts(parser: Parser) -> None:
    """Add the options that choose hosts and their processes."""
    add = parser.add_argument
    count = parser.add_mutually_exclusive_group()
    count.add_argument(
        "--num_gpus",
        "--num_accelerators",
        type=_processes,
        metavar="N",
        help="N processes on each host, process i on CUDA device i",
    )
    count.add_argument(
        "--num_procs", type=_processes, metavar="N", help="N CPU processes on each host, which see no CUDA device"
    )
    add("-H", "--hostfile", default=HOSTFILE, help="lines such as: worker-0 slots=4; without it: this host")
    add("-i", "--include", default="", metavar="HOSTS", help="hosts and slots to use: worker-0@worker-1:0,2")
    add("-e", "--exclude", default="", metavar="HOSTS", help="hosts and slots to leave out")
    parser.add_number("--num_nodes", noun="a number of hosts", help="the first N hosts of the hostfile")
    add("--ranks", metavar="FILE", help="ranks.json of `p3d plan`: host and device of each rank")
    add("--master_addr", default="", help="address of the first host (default: its name)")
    port = "port where the ranks meet (default: a free one, or 29500 where the first host is another one)"
    parser.add_number("--master_port", noun="a port", least=0, most=65535, default=0, metavar="P", help=port)


def _add_starting(parser: Parser) -> None:
    """Add the options of how hosts are started."""
    add = parser.add_argument
    add("--launcher", default="ssh", help=f"what starts the hosts: {', '.join(LAUNCHERS)} (ssh and pdsh are the same)")
    add("--launcher_args", "--launcher_arg", default="", help="further arguments of ssh, mpirun or srun")
    parser.add_number("--ssh_port", noun="a port", most=65535, metavar="P", help="port of ssh")
    add("--no_ssh", action="store_true", help="start only this host's processes; run the command on each host")
    index = "this host's index, with --no_ssh (default: that of Slurm or mpirun)"
    parser.add_number("--node_rank", noun="a host's index", least=0, help=index)
    add("--no_ssh_check", action="store_true", help=argparse.SUPPRESS)  # DeepSpeed's: nothing is checked
    add("--force_multi", action="store_true", help="start a single host as one of several")
    add("--venv_script", help="a script that each host reads first")
    add("--dry_run", action="store_true", help="print the commands that start the hosts, and end")


def _add_processes(parser: Parser) -> None:
    """Add the options of the processes of a host."""
    add = parser.add_argument
    # Not in DeepSpeed's command, whose --launcher_args "-mca x y" argparse would take for it.
    names = ["--module"] if parser.prog == "deepspeed" else ["-m", "--module"]
    add(*names, action="store_true", help="what follows is a module, as in python -m")
    add("--no_python", action="store_true", help="what follows is a program, not a Python script")
    add("--no_local_rank", action="store_true", help="don't pass --local_rank=N to the script, as `deepspeed` does")
    parser.add_number(
        "--max_restarts",
        noun="a number of restarts",
        least=0,
        default=0,
        help="start all ranks again, up to N times, when one has failed or a host is lost; the script continues by "
        "engine.resume (default: 0)",
    )
    add(
        "--log_dir",
        "--enable_each_rank_log",
        metavar="DIR",
        type=lambda text: None if text == "None" else text,
        help="also write each rank's output to files under DIR (no live progress bar then)",
    )
    add("--bind_cores_to_rank", action="store_true", help="divide the cores of a host among its processes")
    add("--bind_core_list", type=_cores, metavar="LIST", help="the cores to divide: 0,2-4")
    add(
        "--save_pid",
        action="store_true",
        help="write this process's id to PID.deepspeed in the folder of temporary files",
    )
    add("--log_level", default="info", choices=["debug", "info", "warning", "error", "critical"])
    add("-q", "--quiet", action="store_true", help="as --log_level error")


def _processes(text: str) -> int:
    """Parse a number of processes, given as a number or as a layout."""
    if not text[:1].isalpha():
        return integer("a number of processes", 1)(text)
    try:
        return WorldSize(parse_layout(text).world_size)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _cores(text: str) -> list[int]:
    try:
        return parse_range_list(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
