"""Launchers on hosts of network_hosts.py, as forks of one process for all of them: each would import torch for seconds.

`python -I -S host_launchers.py SOCKET PYTHON parallel3d.launcher ...` on a host has that process run `python -m forked_ranks
parallel3d.launcher ...` there, with its own environment, folder and streams, and with PYTHON as sys.executable. Signals and
its exit code are passed on.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_NAMESPACES = 0x00020000 | 0x04000000 | 0x20000000 | 0x40000000
"""Flags of setns: mounts, the host's name, processes and network."""


@contextmanager
def launcher_server(folder: Path) -> Iterator[Path]:
    """Yield the socket of the server, which the first test process that needs it starts, and which ends after the last."""
    import fcntl
    import subprocess

    path = folder / "launchers"
    with socket.socket(socket.AF_UNIX) as held, (folder / "launchers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            held.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(str(path))
                listening.listen(64)
                held.connect(str(path))
                command = [sys.executable, __file__, str(listening.fileno())]
                subprocess.Popen(
                    command, pass_fds=[listening.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
                )
        fcntl.flock(lock, fcntl.LOCK_UN)
        yield path


def _serve(listening: socket.socket) -> None:
    """Answer each connection in a fork, until none is open."""
    import forked_ranks  # noqa: F401 (and with it all that launchers and ranks import)

    listening.settimeout(1.0)
    while True:
        try:
            connection, _ = listening.accept()
        except TimeoutError:
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            continue
        if not os.fork():
            listening.close()
            connection.setblocking(True)
            _answer(connection)
            os._exit(0)
        connection.close()


def _answer(connection: socket.socket) -> None:
    """Run one launcher in the namespaces of the process that asks for it."""
    import ctypes
    import select
    import struct

    size, streams, *_ = socket.recv_fds(connection, 4, 3)
    if not streams:  # of a test process, which has ended
        return
    folder, environment, arguments = json.loads(connection.recv(int.from_bytes(size), socket.MSG_WAITALL))
    asking, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(os.pidfd_open(asking), _NAMESPACES):
        raise OSError(ctypes.get_errno(), "setns")
    launcher = os.fork()
    if not launcher:
        _become(folder, environment, arguments, streams)
    for stream in streams:
        os.close(stream)
    ended = os.pidfd_open(launcher)
    while ended not in select.select([ended, connection], [], [])[0]:
        number = connection.recv(1)
        os.kill(launcher, number[0] if number else signal.SIGKILL)
        if not number:
            break
    code = os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1])
    with suppress(OSError):  # it was killed
        connection.sendall(struct.pack("i", code))


def _become(folder: str, environment: dict[str, str], arguments: Sequence[str], streams: Sequence[int]) -> None:
    """Go on as a new Python, the first argument, that runs `-m forked_ranks` with the others, up to its end."""
    from forked_ranks import become

    os.setsid()
    os.chdir(folder)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    sys.executable = arguments[0]
    become([sys.executable, "-m", "forked_ranks", *arguments[1:]], environment)


def _ask(path: str, arguments: Sequence[str]) -> int:
    """Return the exit code of the launcher, negative where a signal has ended it."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        request = json.dumps([os.getcwd(), dict(os.environ), arguments]).encode()
        socket.send_fds(server, [len(request).to_bytes(4)], [0, 1, 2])
        server.sendall(request)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, _: server.sendall(bytes([number])))
        code = server.recv(4, socket.MSG_WAITALL)
        if len(code) < 4:
            raise ConnectionError("the server of launchers has ended")
        return int.from_bytes(code, sys.byteorder, signed=True)


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        _serve(socket.socket(fileno=int(sys.argv[1])))
    else:
        code = _ask(sys.argv[1], sys.argv[2:])
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        sys.exit(code)
