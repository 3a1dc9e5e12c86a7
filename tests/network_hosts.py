"""Hosts of a network on this machine: namespaces with addresses, names, processes and an sshd of their own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SSHD = "/usr/sbin/sshd"
REQUIRED = "P3D_REQUIRE_CLUSTERS"


def missing(*programs: str) -> str | None:
    """Why no hosts with these programs can be made here; None where they can."""
    if os.getuid():
        return "namespaces with an sshd need root"
    for program in ("ip", "ssh", "ssh-keygen", SSHD, *programs):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    tried = subprocess.run(
        [*_UNSHARE, "ip", "link", "add", "ports", "type", "bridge"],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    return f"namespaces can't be made: {tried.stderr}" if tried.returncode else None


def require(*programs: str) -> None:
    """Skip the test where there are no hosts with these programs; fail there in CI."""
    if why := missing(*programs):
        (pytest.fail if os.environ.get(REQUIRED) else pytest.skip)(why)


_UNSHARE = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
_SSHD = """ListenAddress {address}
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PidFile none
LogLevel ERROR
ClientAliveInterval 5
ClientAliveCountMax 2
"""
_SSH = """IdentityFile {folder}/key
UserKnownHostsFile /dev/null
StrictHostKeyChecking no
LogLevel ERROR
"""


class Namespaces:
    """Namespaces whose first process, `init`, does some commands, then waits for `go`, then becomes a program."""

    def __init__(self, commands: str, program: str) -> None:
        boot = f"{commands} && echo ready && read go && exec {program}"
        self._unshare = subprocess.Popen([*_UNSHARE, "sh", "-c", boot], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._unshare.stdout is not None
        assert self._unshare.stdout.readline() == b"ready\n"
        self.init = int(Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children").read_text())
        self._own = os.readlink(f"/proc/{self.init}/ns/pid")

    def go(self) -> None:
        assert self._unshare.stdin is not None
        self._unshare.stdin.write(b"\n")
        self._unshare.stdin.close()

    def end(self) -> None:
        """End it, if it still lives."""
        self._unshare.kill()
        self._unshare.wait()
        for stream in (self._unshare.stdin, self._unshare.stdout):
            assert stream is not None
            stream.close()


class Host(Namespaces):
    """A host; its init process is sshd, and its interface eth0."""

    def __init__(self, name: str, address: str, folder: Path, switch: Namespaces) -> None:
        self.name, self.address = name, address
        (folder / f"sshd.{name}").write_text(_SSHD.format(address=address, folder=folder))
        commands = f"hostname {name} && mount --bind {folder}/hosts /etc/hosts && ip link set lo up"
        super().__init__(commands, f"{SSHD} -D -e -f {folder}/sshd.{name}")
        on_switch = ["nsenter", "--target", str(switch.init), "--net", "ip", "link"]
        port = f"port{self.init}"
        cable = ["add", port, "type", "veth", "peer", "name", "eth0", "netns", str(self.init)]
        subprocess.run([*on_switch, *cable], check=True)
        subprocess.run([*on_switch, "set", port, "master", "ports", "up"], check=True)
        subprocess.run(self.inside("ip", "addr", "add", f"{address}/24", "dev", "eth0"), check=True)
        self.link("up")
        self.go()
        while Path(f"/proc/{self.init}/comm").read_text() != "sshd\n":
            time.sleep(0.01)

    def inside(self, *command: str, folder: Path = ROOT) -> list[str]:
        """The command, run on this host in a folder."""
        return ["nsenter", "--target", str(self.init), "--net", "--uts", "--mount", "--pid", f"--wd={folder}", *command]

    def link(self, state: str) -> None:
        """Set its link up or down."""
        subprocess.run(self.inside("ip", "link", "set", "eth0", state), check=True)

    def kill(self) -> None:
        """Kill all its processes at once, by the first."""
        os.kill(self.init, signal.SIGKILL)

    def processes(self) -> dict[int, str]:
        """The command lines of what runs there besides init, by this machine's ids."""
        found = {}
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                if os.readlink(place / "ns/pid") == self._own and int(place.name) != self.init:
                    found[int(place.name)] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return {pid: line for pid, line in found.items() if line}


@contextmanager
def two_hosts(
    folder: Path, launchers: Path, names: Sequence[str] = ("host-a", "host-b"), last: Sequence[int] = (1, 2)
) -> Iterator[list[Host]]:
    """Two hosts, joined by a switch, that find each other by name. last: the last number of their addresses.

    In the folder is `ssh_config`, with which each reaches the other, and `python` and `parallel3d`: the launchers that
    they run come from the server whose socket is `launchers`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True)
    (folder / "ssh_config").write_text(_SSH.format(folder=folder))
    addresses = [f"10.77.0.{number}" for number in last]
    lines = [f"{address} {name}\n" for address, name in zip(addresses, names, strict=True)]
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
    warm = f"exec {sys.executable} -I -S {ROOT / 'tests' / 'host_launchers.py'} {launchers} {folder / 'python'}"
    programs = {
        "python": f'[ "$1" = -m ] || exec {sys.executable} "$@"\nshift\n{warm} "$@"',
        "parallel3d": f'{warm} parallel3d.launcher "$@"',
    }
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    with ExitStack() as stack:
        # Of its own, so that a host that is killed takes no interface of the other's with it.
        switch = Namespaces("ip link add ports type bridge && ip link set ports up", "sleep infinity")
        stack.callback(switch.end)
        switch.go()
        hosts = []
        for name, address in zip(names, addresses, strict=True):
            hosts.append(Host(name, address, folder, switch))
            stack.callback(hosts[-1].end)
        yield hosts
