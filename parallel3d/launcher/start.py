"""Start what a command line asks for: processes of this host, or the launcher on each of several hosts."""

from __future__ import annotations

import argparse
import os
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from parallel3d.errors import ConfigError
from parallel3d.launcher.agent import launch
from parallel3d.launcher.hosts import parse_hostfile, parse_named, parse_resource_filter, read_ranks
from parallel3d.launcher.nodes import LOCAL, PORT, address_of, is_local, launch_nodes
from parallel3d.launcher.options import LaunchOptions, Node, WorldSize
from parallel3d.logs import logger


def start(options: argparse.Namespace) -> int:
    """Run the command to its end and return the job's exit code. Raises ConfigError if it can't be carried out."""
    logger.setLevel("ERROR" if options.quiet else options.log_level.upper())
    devices = torch.cuda.device_count()
    hosts = choose_hosts(options, devices)
    first = next(iter(hosts))
    with _pid_file(options.save_pid):
        if options.no_ssh:
            index = _index(options, hosts)
            node = Node(list(hosts), index, address_of(options, hosts), options.master_port or PORT)
            own = list(hosts.values())[index]
            return _launch_here(options, own, devices, node if len(hosts) > 1 else None)
        if len(hosts) == 1 and not options.force_multi and is_local(first):
            if options.dry_run:
                print(f"{len(hosts[first])} x {shlex.join(options.command)}")
                return 0
            return _launch_here(options, hosts[first], devices)
        return launch_nodes(options, hosts)


def choose_hosts(options: argparse.Namespace, devices: int) -> dict[str, list[int]]:
    """Return the slots of each host to use: indices of its devices, or else of CPU processes. Raises ConfigError.

    devices: the number of CUDA devices of this host.
    """
    named = options.include or options.exclude
    if named and (options.num_nodes or options.num_gpus):
        raise ConfigError(
            f"--num_nodes and --num_gpus don't go with --include or --exclude {named}; give one of the two"
        )
    every = list(range(devices or 1))
    if options.ranks:
        found = read_ranks(Path(options.ranks))
    elif Path(options.hostfile).is_file():
        lines = Path(options.hostfile).read_text().splitlines()
        found = {host: list(range(slots)) for host, slots in parse_hostfile(lines).items()}
    elif options.no_ssh and options.include:
        found = {host: every if slots is None else slots for host, slots in parse_named(options.include).items()}
    elif options.no_ssh and options.num_nodes:
        if options.num_nodes > 1 and not options.master_addr:
            raise ConfigError(
                "--no_ssh without a --hostfile needs --master_addr: the address of the host of --node_rank 0"
            )
        found = {f"node-{index}": every for index in range(options.num_nodes)}
    else:
        found = {LOCAL: every}
    if options.num_nodes and options.num_nodes > len(found):
        raise ConfigError(
            f"--num_nodes is {options.num_nodes}, but hosts are {', '.join(found)}; name a --hostfile with all"
        )
    hosts = dict(list(parse_resource_filter(found, options.include, options.exclude).items())[: options.num_nodes])
    if not hosts:
        raise ConfigError(f"--exclude {options.exclude} leaves no device; name fewer")
    if each := options.num_procs or options.num_gpus:
        if isinstance(each, WorldSize):
            if each % len(hosts):
                raise ConfigError(
                    f"the {each} ranks of a layout can't be divided among {len(hosts)} hosts; choose by --num_nodes"
                )
            each //= len(hosts)
        hosts = {host: list(range(each)) for host in hosts}
    return hosts


def _launch_here(options: argparse.Namespace, slots: list[int], devices: int, node: Node | None = None) -> int:
    """Run this host's processes on its slots, of the devices and cores that are its own."""
    launched = of_this_host(options, slots, devices, node)
    if launched.uses_gpus:
        names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(devices)))).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[slot] for slot in slots)
    elif options.num_procs is None and len(slots) > 1:
        logger.warning("%s: there is no CUDA device; the number of CPU processes is %d", options.prog, len(slots))
    if options.bind_core_list:
        os.sched_setaffinity(0, options.bind_core_list)
    return launch(launched)


def of_this_host(
    options: argparse.Namespace, slots: list[int], devices: int, node: Node | None = None
) -> LaunchOptions:
    """Return what this host runs on its slots. Raises ConfigError if it has too few devices.

    devices: the number of CUDA devices of this host; node: its place, if the job has several hosts.
    """
    if not (options.module or options.no_python or os.path.exists(options.user_script)):
        raise ConfigError(f"there is no script {options.user_script!r} in {os.getcwd()}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
    on_gpus = devices > 0 and options.num_procs is None
    # DeepSpeed's command then starts CPU processes.
    lacks_all = options.num_gpus and not devices and options.prog == "parallel3d"
    if lacks_all or (on_gpus and max(slots) >= devices):
        asked = f"--num_gpus {options.num_gpus}" if options.num_gpus else f"slots are {slots}"
        raise ConfigError(
            f"{asked}, but the number of CUDA devices present is {devices} (CUDA_VISIBLE_DEVICES is {visible}). Ask for no "
            f"more, or for CPU processes with --num_procs {len(slots)}."
        )
    return LaunchOptions(
        len(slots),
        on_gpus,
        options.command,
        is_module=options.module,
        master_port=options.master_port,
        log_dir=options.log_dir,
        max_restarts=options.max_restarts,
        is_program=options.no_python,
        # Which torch's agent replaces.
        first_arguments=["--local_rank=${local_rank}"] if options.passes_local_rank else [],
        binds_cores=options.bind_cores_to_rank or bool(options.bind_core_list),
        node=node,
    )


def _index(options: argparse.Namespace, hosts: Mapping[str, list[int]]) -> int:
    """Return this host's index, as given, or as Slurm or mpirun have it. Raises ConfigError."""
    names, found = list(hosts), options.node_rank
    if found is None and (name := os.environ.get("SLURMD_NODENAME")) in names:
        found = names.index(name)
    for variable in ("SLURM_NODEID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        if found is None and variable in os.environ:
            found = int(os.environ[variable])
    if found is None and len(hosts) == 1:
        found = 0
    if found is None or found >= len(hosts):
        raise ConfigError(
            f"--no_ssh with --node_rank {found}, but the nodes are 0 to {len(hosts) - 1}; give one of these"
        )
    return found


@contextmanager
def _pid_file(is_wanted: bool) -> Iterator[None]:
    """Keep DeepSpeed's file of this process's id while the job runs."""
    path = Path(tempfile.gettempdir(), f"{os.getpid()}.deepspeed")
    if is_wanted:
        with path.open("x") as file:  # never another one's file
            file.write(str(os.getpid()))
    try:
        yield
    finally:
        if is_wanted:
            path.unlink(missing_ok=True)
