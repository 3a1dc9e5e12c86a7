"""Start what a command line asks for: processes of this host, or the launcher on each of several hosts."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from parallel3d.config.files import read_text
from parallel3d.errors import ConfigError
from parallel3d.launcher.hosts import (
    HOSTFILE,
    Node,
    WorldSize,
    parse_hostfile,
    parse_named,
    parse_resource_filter,
    read_ranks,
)
from parallel3d.launcher.nodes import LOCAL, PORT, address_of, is_local, launch_nodes
from parallel3d.logs import logger


def start(options: argparse.Namespace) -> int:
    """Run the command to its end and return the job's exit code. Raises ConfigError if it can't be carried out."""
    logger.setLevel(options.log_level.upper())
    hosts = choose_hosts(options)
    first, node = next(iter(hosts)), None
    slots = hosts[first]
    with _pid_file(options.save_pid):
        if options.no_ssh:
            index = _index(options, hosts)
            slots = list(hosts.values())[index]
            if len(hosts) > 1:
                ranks = list(read_ranks(Path(options.ranks)).values())[index] if options.ranks else ()
                node = Node(list(hosts), index, address_of(options, hosts), options.master_port or PORT, list(ranks))
        elif len(hosts) > 1 or options.force_multi or not is_local(first):
            return launch_nodes(options, hosts)
        if options.dry_run:
            python = [] if options.no_python else [sys.executable, "-m"] if options.module else [sys.executable]
            command = [*python, options.user_script, *options.local_rank_arguments, *options.user_args]
            print(f"{len(slots)} x {shlex.join(command)}")
            return 0
        return _launch_here(options, slots, node)


def count_devices() -> int:
    """Return the number of CUDA devices of this host."""
    import torch  # imported only where processes are started: a launcher of several hosts needn't wait for it

    return torch.cuda.device_count()


def choose_hosts(options: argparse.Namespace) -> dict[str, list[int]]:
    """Return the slots of each host to use: indices of its devices, or else of CPU processes. Raises ConfigError."""
    named = options.include or options.exclude
    if named and (options.num_nodes or options.num_gpus):
        raise ConfigError(
            f"--num_nodes and --num_gpus don't go with --include or --exclude {named}; give one of the two"
        )
    if options.ranks:
        for name in ("hostfile", "include", "exclude", "num_gpus", "num_nodes"):
            if (value := getattr(options, name)) not in (None, "", HOSTFILE):
                raise ConfigError(
                    f"--ranks {options.ranks} names hosts and devices, and so does --{name} {value}; give one of the two"
                )
        found = {host: list(own.values()) for host, own in read_ranks(Path(options.ranks)).items()}
    elif Path(options.hostfile).is_file():
        lines = read_text(Path(options.hostfile)).splitlines()
        found = {host: list(range(slots)) for host, slots in parse_hostfile(lines).items()}
    else:
        found = _without_hostfile(options)
    if options.num_nodes and options.num_nodes > len(found):
        raise ConfigError(
            f"--num_nodes is {options.num_nodes}, but hosts are {', '.join(found)}; name a --hostfile with all"
        )
    hosts = dict(list(parse_resource_filter(found, options.include, options.exclude).items())[: options.num_nodes])
    if not hosts:
        raise ConfigError(
            f"no slot is left of {found}; give the hosts slots, or --exclude fewer than {options.exclude!r}"
        )
    if each := options.num_procs or options.num_gpus:
        if isinstance(each, WorldSize):
            if each % len(hosts):
                raise ConfigError(
                    f"the {each} ranks of a layout can't be divided among {len(hosts)} hosts; choose by --num_nodes"
                )
            each //= len(hosts)
        hosts = {host: list(range(each)) for host in hosts}
    return hosts


def _without_hostfile(options: argparse.Namespace) -> dict[str, list[int]]:
    """Return the hosts and slots that --include or --num_nodes describe with --no_ssh, else this host's. Raises ConfigError."""
    every = list(range(count_devices() or 1))
    if options.hostfile not in ("", HOSTFILE):
        if options.prog == "parallel3d":
            raise ConfigError(
                f"there is no hostfile {options.hostfile!r} in {os.getcwd()}; correct --hostfile, or leave it out for this host"
            )
        # As DeepSpeed's command does.
        logger.warning("%s: there is no hostfile %r; this host is used", options.prog, options.hostfile)
    if options.no_ssh and options.include:
        return {host: every if slots is None else slots for host, slots in parse_named(options.include).items()}
    if options.no_ssh and options.num_nodes:
        if options.num_nodes > 1 and not options.master_addr:
            raise ConfigError(
                "--no_ssh without a --hostfile needs --master_addr: the address of the host of --node_rank 0"
            )
        return {f"node-{index}": every for index in range(options.num_nodes)}
    return {LOCAL: every}


def _launch_here(options: argparse.Namespace, slots: list[int], node: Node | None) -> int:
    """Run this host's processes on its slots, of the devices and cores that are its own."""
    devices = count_devices()
    if uses_gpus := check_devices(options, slots, devices):
        names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(devices)))).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[slot] for slot in slots)
    elif options.num_procs is None and len(slots) > 1:
        logger.warning("%s: there is no CUDA device; the number of CPU processes is %d", options.prog, len(slots))
    if options.bind_core_list:
        own = os.sched_getaffinity(0)
        if others := sorted({*options.bind_core_list} - own):
            raise ConfigError(
                f"--bind_core_list: the cores {others} are not among this process's; give some of {sorted(own)}"
            )
        os.sched_setaffinity(0, options.bind_core_list)
    from parallel3d.launcher.agent import launch  # it imports torch

    return launch(argparse.Namespace(**vars(options), num_workers=len(slots), uses_gpus=uses_gpus, node=node))


def check_devices(options: argparse.Namespace, slots: list[int], devices: int) -> bool:
    """Return whether the processes of this host's slots use its devices. Raises ConfigError if it has too few.

    devices: the number of CUDA devices of this host.
    """
    if not (options.module or options.no_python or os.path.exists(options.user_script)):
        raise ConfigError(f"there is no script {options.user_script!r} in {os.getcwd()}")
    if options.no_python and shutil.which(options.user_script) is None:
        raise ConfigError(f"there is no program {options.user_script!r} on PATH or in {os.getcwd()}")
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
    return on_gpus


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
    """Keep DeepSpeed's file of this process's id while the job runs. Raises ConfigError if it can't be written."""
    path = Path(tempfile.gettempdir(), f"{os.getpid()}.deepspeed")
    if is_wanted:
        try:
            path.unlink(missing_ok=True)  # the file of an earlier process with this id, which was killed
            with path.open("x") as file:  # "x" never follows a link that another user has put there
                file.write(str(os.getpid()))
        except OSError as error:
            raise ConfigError(f"--save_pid: {error}; remove that file, or set TMPDIR to another folder") from error
    try:
        yield
    finally:
        if is_wanted:
            path.unlink(missing_ok=True)
