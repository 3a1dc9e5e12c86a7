"""Start the launcher on each of several hosts, by ssh, mpirun or srun, and end it there."""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from parallel3d.config.files import read_text
from parallel3d.errors import ConfigError
from parallel3d.launcher.guard import LIFELINE
from parallel3d.launcher.processes import GRACE_S, adopt_orphans, children, end_leftovers, end_with_parent
from parallel3d.logs import logger
from parallel3d.membership import TOKEN

LOCAL = "localhost"
ENVIRONMENT_FILES = (os.environ.get("DS_ENV_FILE", ".deepspeed_env"), ".parallel3d_env")
"""Files of a user, at home or in the working directory, with lines NAME=VALUE for the environment of all hosts."""

_PASSED_ON = tuple("CUDA_ GLOO_ LD_LIBRARY MLFLOW NCCL OMP_ PARALLEL3D_ PATH PYTHON TORCH_ UCX".split())
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BY_SSH = ("ssh", "pdsh")
_LOST = 255
"""ssh's exit code when the connection is lost, or the command was killed by a signal."""

_ALONE_S = 25.0  # time until the other hosts are ended when one has failed; by then they have reported why
_LOOK_S, _ANSWER_S = 0.2, 5.0
PORT = 29500
"""DeepSpeed's port for the ranks to meet."""


@dataclass
class Starter:
    """A command that starts the launcher on hosts: what it reads from its input, and its environment besides this one's."""

    hosts: str
    command: Sequence[str]
    script: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        set_ = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        line = " ".join([*set_, shlex.join(self.command)])
        return f"{line} <<'END'\n{self.script}END" if self.script else line


def launch_nodes(options: argparse.Namespace, hosts: Mapping[str, list[int]]) -> int:
    """Start all hosts, and return the job's exit code: that of the first that failed by itself. Raises ConfigError.

    A host that is lost, by its connection or a signal, leaves the others to decide; they end, or go on by max_restarts.
    """
    port, by_manager = options.master_port or _free_port(next(iter(hosts))), options.launcher.lower() not in _BY_SSH
    options = argparse.Namespace(**{**vars(options), "master_port": port})
    if options.dry_run:
        for starter in starters(options, hosts, exports()):
            print(starter)
        return 0
    # Handed over by standard input and the environment: it is in no list of processes.
    token = {TOKEN: os.environ.get(TOKEN) or secrets.token_hex(32)}
    started: list[tuple[Starter, subprocess.Popen[bytes]]] = []
    before = children()
    if by_manager:
        adopt_orphans()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        for starter in starters(options, hosts, exports() | token):
            # In sessions of their own, so that Ctrl-C reaches only this process.
            process = subprocess.Popen(  # noqa: S603 (quoted)
                starter.command,
                stdin=subprocess.PIPE,
                env=os.environ | starter.environment,
                start_new_session=True,
                preexec_fn=end_with_parent if by_manager else None,
            )
            started.append((starter, process))
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended and printed why
                process.stdin.write(starter.script.encode())
                process.stdin.flush()
        meeting = (address_of(options, hosts), port) if by_manager and len(hosts) > 1 else None
        return _wait(started, options.max_restarts, meeting)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        _end(started)
        if by_manager:
            end_leftovers(before)  # such as an ssh of mpirun's to a host that is cut off


def starters(
    options: argparse.Namespace, hosts: Mapping[str, list[int]], variables: Mapping[str, str]
) -> list[Starter]:
    """Return the commands that start the hosts with these variables. Raises ConfigError."""
    launcher = options.launcher.lower()
    try:
        further = shlex.split(options.launcher_args)
    except ValueError as error:
        raise ConfigError(f"--launcher_args {options.launcher_args!r}: {error}; close the quotes") from error
    node = _node_command(options, hosts)
    if launcher not in _BY_SSH:
        if options.venv_script:
            node = ["sh", "-c", '. "$0" && exec "$@"', options.venv_script, *node]
        command = [*_by_manager(launcher, list(hosts), variables), *further, *node]
        return [Starter(", ".join(hosts), command, environment=variables)]
    ssh = ["ssh", "-T", *further, *(["-p", str(options.ssh_port)] if options.ssh_port else [])]
    ssh += ["-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
    setup = [f"cd {shlex.quote(os.getcwd())} || exit"]
    setup += [f"export {name}={shlex.quote(value)}" for name, value in {**variables, LIFELINE: "1"}.items()]
    setup += [f". {shlex.quote(options.venv_script)} || exit"] if options.venv_script else []
    found = []
    for index, host in enumerate(hosts):
        # The index goes after the launcher's name, before the script.
        own = [*node[:3], f"--node_rank={index}", *node[3:]]
        command = ["sh", "-s"] if is_local(host) else [*ssh, host, "sh -s"]
        found.append(Starter(host, command, "\n".join([*setup, f"exec {shlex.join(own)}", ""])))
    return found


def _node_command(options: argparse.Namespace, hosts: Mapping[str, list[int]]) -> list[str]:
    """Return the command of the launcher on one of the hosts, without its index, which it gets from mpirun or srun."""
    slots = "@".join(f"{host}:{','.join(map(str, own))}" for host, own in hosts.items())
    module = "parallel3d.launcher" + (".deepspeed" if options.prog == "deepspeed" else "")
    ranks = f"--ranks={options.ranks}" if options.ranks else f"--include={slots}"
    command = [sys.executable, "-m", module, "--no_ssh", "--hostfile=", ranks]
    command += [f"--master_addr={address_of(options, hosts)}", f"--master_port={options.master_port or PORT}"]
    each = len(next(iter(hosts.values()))) if options.num_procs else None  # a layout's, divided among the hosts
    values = {"max_restarts": options.max_restarts, "num_procs": each, "log_dir": options.log_dir}
    values["log_level"] = options.log_level
    if options.bind_core_list:
        values["bind_core_list"] = ",".join(map(str, options.bind_core_list))
    command += [f"--{name}={value}" for name, value in values.items() if value]
    flags = "module no_python no_local_rank bind_cores_to_rank".split()
    return [*command, *(f"--{name}" for name in flags if getattr(options, name)), *options.command]


def _by_manager(launcher: str, hosts: list[str], variables: Mapping[str, str]) -> list[str]:
    """Return the command by which mpirun or srun starts one launcher per host, free to use all cores there."""
    number = str(len(hosts))
    if launcher == "slurm":
        command = ["srun", "--nodes", number, "--ntasks", number, "--ntasks-per-node", "1", "--export=ALL"]
        command += ["--no-kill", "--kill-on-bad-exit=0"]  # a host that is lost, or fails, leaves the others to decide
        return [*command, "--cpu-bind=none", *([] if hosts == [LOCAL] else ["--nodelist", ",".join(hosts)])]
    if launcher == "openmpi":
        command = ["mpirun", "-n", number, "--host", ",".join(f"{host}:1" for host in hosts), "--bind-to", "none"]
        return [*command, *(word for name in variables for word in ("-x", name))]
    return ["mpirun", "-n", number, "-ppn", "1", "-hosts", ",".join(hosts), "-genvlist", ",".join(variables)]


def address_of(options: argparse.Namespace, hosts: Mapping[str, list[int]]) -> str:
    """Return the address of the first host, where all meet. Raises ConfigError if the others can't reach it."""
    address: str = options.master_addr or next(iter(hosts))
    if len(hosts) > 1 and address == LOCAL:
        raise ConfigError(
            f"the first of {len(hosts)} hosts is {address}, where the others can't reach it; give --master_addr"
        )
    return address


def _free_port(host: str) -> int:
    """Return a free port, so that two jobs don't collide, or DeepSpeed's if the host is another one."""
    if not is_local(host):
        return PORT
    with socket.socket() as free:
        free.bind(("", 0))
        port: int = free.getsockname()[1]
        return port


def _wait(
    started: Sequence[tuple[Starter, subprocess.Popen[bytes]]], max_restarts: int, meeting: tuple[str, int] | None
) -> int:
    """Wait for the hosts' ends, and return the job's exit code.

    meeting: address and port of the first host's store, if the end of that host's launcher is the job's.
    """
    codes: dict[str, int] = {}
    failed, end = [], float("inf")
    while len(codes) < len(started) and time.monotonic() < end:
        for starter, process in started:
            code = process.poll()
            if code is None or starter.hosts in codes:
                continue
            codes[starter.hosts] = code
            is_lost = bool(starter.script) and (code == _LOST or code < 0)
            if is_lost:
                logger.error("parallel3d: %s is lost (%s: exit code %d)", starter.hosts, starter.command[0], code)
            elif code:
                failed.append(code if code > 0 else 128 - code)
            if code and not (is_lost and max_restarts):
                end = min(end, time.monotonic() + _ALONE_S)
        if meeting is not None:  # mpirun and srun wait long for a host that is cut off, whose job has ended
            with suppress(OSError):
                socket.create_connection(meeting, timeout=_ANSWER_S).close()
                end = time.monotonic() + _ALONE_S
        time.sleep(_LOOK_S)
    if not failed and len(codes) == len(started) and 0 in codes.values():
        return 0
    return failed[0] if failed else next((code if code > 0 else 128 - code for code in codes.values() if code), 1)


def _end(started: Sequence[tuple[Starter, subprocess.Popen[bytes]]]) -> None:
    """End the hosts' launchers by closing their lifelines, and what has no lifeline by a signal."""
    for starter, process in started:
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
        if process.poll() is None and not starter.script:
            process.terminate()
    end = time.monotonic() + 2 * GRACE_S
    for _, process in started:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def exports() -> dict[str, str]:
    """Return the environment that goes to all hosts: some variables of this one, and the lines of the user's files."""
    found = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
    for name in ("CUDA_VISIBLE_DEVICES", TOKEN):  # a host's own; and what --dry_run is not to print
        found.pop(name, None)
    for path in (folder / name for folder in (Path.home(), Path()) for name in ENVIRONMENT_FILES):
        for line in map(str.strip, read_text(path).splitlines() if path.is_file() else ()):
            name, is_set, value = line.partition("=")
            if line and not line.startswith("#"):
                if not is_set or not _VARIABLE.fullmatch(name.strip()):
                    raise ConfigError(f"{path}: {line!r} is not a variable; write lines as NAME=VALUE")
                found[name.strip()] = value.strip()
    return {name: value for name, value in found.items() if _VARIABLE.fullmatch(name)}


def is_local(host: str) -> bool:
    """Return whether a name is this host's own, to which no ssh is needed."""
    if host == LOCAL or host in (socket.gethostname(), socket.getfqdn()):
        return True
    try:
        with socket.socket() as own:
            own.bind((socket.gethostbyname(host), 0))  # an address of another host can't be bound
    except OSError:
        return False
    return True
