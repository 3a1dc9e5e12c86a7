"""Command `deepspeed`: DeepSpeed's command line, on one host by this package's launcher, on several by torchrun on each."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from parallel3d.errors import ConfigError
from parallel3d.launcher.agent import launch
from parallel3d.launcher.hosts import parse_hostfile, parse_range_list, parse_resource_filter
from parallel3d.launcher.multinode_runner import LAUNCHERS, nodes_command
from parallel3d.launcher.options import LaunchOptions

# File of a user with lines NAME=VALUE for the environment of all nodes.
DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
_PASSED_ON = ("CUDA_", "GLOO_", "MLFLOW", "MV2", "NCCL", "OMP_", "PARALLEL3D_", "PYTHON", "TORCH_", "UCX")
_REFUSED = {
    "autotuning": "`p3d plan` finds the layout",
    "elastic_training": "the configuration's section elastic restarts with fewer ranks",
    "min_elastic_nodes": "the configuration's section elastic restarts with fewer ranks",
    "max_elastic_nodes": "the configuration's section elastic restarts with fewer ranks",
}
_BY_SSH = ("pdsh", "ssh", "standard")
_LOCAL = "localhost"


def command() -> int:
    """Run this process's command line and return the exit code; say what is wrong with it."""
    try:
        return main()
    except ConfigError as error:
        print(f"deepspeed: {error}", file=sys.stderr)
        return 2


def main(args: Sequence[str] | None = None) -> int:
    """Run DeepSpeed's command line (default: this process's own) and return the exit code. Raises ConfigError."""
    options = parse_args(args)
    logging.getLogger("parallel3d").setLevel("ERROR" if options.quiet else options.log_level.upper())
    for name, remedy in _REFUSED.items():
        if getattr(options, name):
            raise ConfigError(f"--{name} is not supported; {remedy}")
    hosts = _hosts(options)
    if options.no_ssh:
        if not 0 <= options.node_rank < len(hosts):
            raise ConfigError(
                f"--no_ssh with --node_rank {options.node_rank}, but the nodes are 0 to {len(hosts) - 1}; give one of these"
            )
        return subprocess.run(_node_command(options, hosts, options.node_rank), check=False).returncode  # noqa: S603 (quoted)
    if len(hosts) == 1 and not options.force_multi and _is_local(next(iter(hosts))):
        return _launch_here(options, next(iter(hosts.values())))
    return _launch_nodes(options, hosts)


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return DeepSpeed's options."""
    parser = argparse.ArgumentParser(prog="deepspeed", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add(
        "-H", "--hostfile", default="/job/hostfile", help="lines such as: worker-0 slots=4; without the file: this host"
    )
    add("-i", "--include", default="", help="hosts and slots to use: worker-0@worker-1:0,2")
    add("-e", "--exclude", default="", help="hosts and slots to leave out")
    add("--num_nodes", type=int, default=-1, help="the first N hosts of the hostfile")
    add(
        "--num_gpus",
        "--num_accelerators",
        type=int,
        default=-1,
        help="N processes on each host; without CUDA, on the CPU",
    )
    add("--master_addr", default="", help="address of the first host (default: its name in the hostfile)")
    add("--master_port", type=int, default=0, help="default: a free one on a single host, else 29500")
    add("--node_rank", type=int, default=-1, help="this host's index, with --no_ssh")
    add("--launcher", default="pdsh", help=f"pdsh to start the hosts by ssh, or one of {', '.join(LAUNCHERS)}")
    add("--launcher_args", "--launcher_arg", default="", help="further arguments of ssh, mpirun or srun")
    add("--ssh_port", type=int, help="port of ssh")
    add("--module", action="store_true", help="what follows is a module, as in python -m")
    add("--no_python", action="store_true", help="what follows is a program, not a Python script")
    add("--no_local_rank", action="store_true", help="don't pass --local_rank=N to the script")
    add("--no_ssh", action="store_true", help="start this host's processes alone; the command is run on each host")
    add("--no_ssh_check", action="store_true", help="without effect: nothing is checked")
    add("--force_multi", action="store_true", help="start a single host as one of several")
    add("--enable_each_rank_log", default="None", metavar="DIR", help="write the output of each rank to files")
    add("--bind_cores_to_rank", action="store_true", help="divide the cores of a host among its processes")
    add("--bind_core_list", type=parse_range_list, metavar="LIST", help="the cores to divide: 0,2-4")
    add("--venv_script", help="a script that each host reads first")
    add("--log_level", default="info", choices=["debug", "info", "warning", "error", "critical"])
    add("-q", "--quiet", action="store_true", help="as --log_level error")
    add("--autotuning", default="", choices=["tune", "run"], help="refused")
    add("--elastic_training", action="store_true", help="refused")
    add("--min_elastic_nodes", type=int, default=0, help="refused")
    add("--max_elastic_nodes", type=int, default=0, help="refused")
    add("user_script", help="the script, followed by its own arguments")
    add("user_args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser.parse_args(args)


def _hosts(options: argparse.Namespace) -> dict[str, list[int]]:
    """Return the slots of each host to use; those of this host are CUDA's indices in CUDA_VISIBLE_DEVICES."""
    chosen = options.include or options.exclude
    if chosen and (options.num_nodes >= 0 or options.num_gpus >= 0):
        raise ConfigError(
            f"--num_nodes and --num_gpus don't go with --include or --exclude {chosen}; give one of the two"
        )
    path = Path(options.hostfile)
    if path.is_file():
        found = {host: list(range(slots)) for host, slots in parse_hostfile(path.read_text().splitlines()).items()}
    else:
        found = {_LOCAL: list(range(torch.cuda.device_count() or 1))}
    if options.num_nodes > len(found):
        raise ConfigError(
            f"--num_nodes is {options.num_nodes}, but hosts are {', '.join(found)}; name a --hostfile with all"
        )
    hosts = parse_resource_filter(found, options.include, options.exclude)
    if options.num_nodes > 0:
        hosts = dict(list(hosts.items())[: options.num_nodes])
    if options.num_gpus > 0:
        hosts = {host: list(range(options.num_gpus)) for host in hosts}
    if not hosts:
        raise ConfigError(f"--exclude {options.exclude} leaves no device; name fewer")
    return hosts


def _local_rank(options: argparse.Namespace) -> list[str]:
    return [] if options.no_local_rank else ["--local_rank=${local_rank}"]  # which torch's agent replaces


def _launch_here(options: argparse.Namespace, slots: list[int]) -> int:
    devices, wanted = torch.cuda.device_count(), len(slots)
    if devices and max(slots) >= devices:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise ConfigError(
            f"slots {slots} are asked for, but there are {devices} CUDA devices (CUDA_VISIBLE_DEVICES is {visible}); "
            "ask for fewer"
        )
    if devices:
        names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(devices)))).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[slot] for slot in slots)
    elif options.num_gpus > 0:
        print(f"deepspeed: there is no CUDA device; the number of CPU processes is {wanted}", file=sys.stderr)
    if options.bind_core_list:
        os.sched_setaffinity(0, options.bind_core_list)
    return launch(
        LaunchOptions(
            wanted,
            devices > 0,
            [options.user_script, *options.user_args],
            is_module=options.module,
            master_port=options.master_port,
            log_dir=_log_dir(options),
            is_program=options.no_python,
            first_arguments=_local_rank(options),
            binds_cores=options.bind_cores_to_rank,
        )
    )


def _log_dir(options: argparse.Namespace) -> str | None:
    return None if options.enable_each_rank_log == "None" else options.enable_each_rank_log


def _address(options: argparse.Namespace, hosts: dict[str, list[int]]) -> str:
    """Return the address at which all ranks meet."""
    address: str = options.master_addr or next(iter(hosts))
    if len(hosts) > 1 and address == _LOCAL:
        raise ConfigError(
            f"the first of {len(hosts)} hosts is {_LOCAL}, where the others can't reach it; give --master_addr"
        )
    return address


def _node_command(options: argparse.Namespace, hosts: dict[str, list[int]], node: int) -> list[str]:
    """Return the command that starts the processes of one of several nodes there."""
    slots, address = list(hosts.values())[node], _address(options, hosts)
    command = [
        "env",
        f"CUDA_VISIBLE_DEVICES={','.join(map(str, slots))}",
        sys.executable,
        "-m",
        "torch.distributed.run",
    ]
    command += [f"--nnodes={len(hosts)}", f"--node_rank={node}", f"--nproc_per_node={len(slots)}"]
    command += [f"--master_addr={address}", f"--master_port={options.master_port or 29500}"]
    command += ["--module"] * options.module + ["--no_python"] * options.no_python
    command += [f"--log_dir={_log_dir(options)}", "--tee=3"] if _log_dir(options) else []
    arguments = [argument.replace("$", "$$") for argument in options.user_args]
    return [*command, options.user_script, *_local_rank(options), *arguments]


def _launch_nodes(options: argparse.Namespace, hosts: dict[str, list[int]]) -> int:
    """Start every node, and end all when one fails. Returns the exit code of the first that failed, or 0."""
    if options.launcher.lower() not in _BY_SSH:
        return _launch_by_mpi(options, hosts)
    ssh = ["ssh", "-tt", "-o", "BatchMode=yes", *shlex.split(options.launcher_args)]
    ssh += ["-p", str(options.ssh_port)] if options.ssh_port else []
    setup = [f"cd {shlex.quote(os.getcwd())}"]
    setup += [f"export {name}={shlex.quote(value)}" for name, value in _exports().items()]
    setup += [f". {shlex.quote(options.venv_script)}"] if options.venv_script else []
    nodes = []
    for node, host in enumerate(hosts):
        script = " && ".join([*setup, f"exec {shlex.join(_node_command(options, hosts, node))}"])
        here = _is_local(host)
        command = ["sh", "-c", script] if here else [*ssh, host, script]
        nodes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True))  # noqa: S603 (quoted)
    code = 0
    try:
        while code == 0 and any(process.poll() is None for process in nodes):
            time.sleep(0.2)
            code = next((process.returncode for process in nodes if process.returncode), 0)
    finally:
        for process in nodes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
    return code


def _launch_by_mpi(options: argparse.Namespace, hosts: dict[str, list[int]]) -> int:
    """Start all processes by the launcher of an MPI or of Slurm. Returns its exit code."""
    exports = _exports() | {"MASTER_ADDR": _address(options, hosts), "MASTER_PORT": str(options.master_port or 29500)}
    if torch.cuda.is_available() and len(slots := set(map(tuple, hosts.values()))) == 1:
        exports["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, slots.pop()))
    command = nodes_command(options, {host: len(slots) for host, slots in hosts.items()}, exports)
    return subprocess.run(command, env=os.environ | exports, check=False).returncode  # noqa: S603 (the user's own)


def _exports() -> dict[str, str]:
    """Return the environment that goes to all nodes: some variables of this one, and the lines of the user's files."""
    found = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
    found.pop("CUDA_VISIBLE_DEVICES", None)
    for folder in (Path.home(), Path()):
        path = folder / DEEPSPEED_ENVIRONMENT_NAME
        for line in path.read_text().splitlines() if path.is_file() else ():
            name, is_set, value = line.partition("=")
            if not is_set:
                raise ConfigError(f"{path}: {line!r} is no variable; write lines as NAME=VALUE")
            found[name.strip()] = value
    return found


def _is_local(host: str) -> bool:
    """Return whether a name is this host's own, to which no ssh is needed."""
    if host == _LOCAL or host in (socket.gethostname(), socket.getfqdn()):
        return True
    try:
        with socket.socket() as own:
            own.bind((socket.gethostbyname(host), 0))  # an address of another host can't be bound
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(command())
