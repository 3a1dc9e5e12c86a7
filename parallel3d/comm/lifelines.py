"""Connections on which nothing is said: one that breaks tells at once that the process at its other end is gone."""

from __future__ import annotations

import os
import socket
import time
import uuid
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from parallel3d.comm.collectives import Group, all_gather_object

# For so long ranks try to connect, once; who can't, as behind a firewall, has no lifeline.
_CONNECT_S = 5.0
# A machine that vanishes closes nothing. The kernel asks it after 8 s, and thrice every 4 s: 20 s.
_KEEPALIVE = {"TCP_KEEPIDLE": 8, "TCP_KEEPINTVL": 4, "TCP_KEEPCNT": 3}
_INDEX_BYTES = 4


@dataclass(frozen=True)
class _Offer:
    """Where the first rank listens. token: what both ends say, so that nobody else is taken for the other."""

    port: int
    token: bytes = field(default_factory=lambda: uuid.uuid4().bytes)
    name: str = field(default_factory=socket.gethostname)
    master: str | None = field(default_factory=lambda: os.environ.get("MASTER_ADDR"))

    def hosts(self) -> list[str]:
        """What to call it by from here, the surest first: names of hosts are not always known."""
        near = "127.0.0.1" if self.name == socket.gethostname() else None
        return [host for host in (near, self.master, self.name) if host]


class _Line:
    """One end of a connection. It counts once the other end has said `awaited`: one that fails before tells nothing."""

    def __init__(self, connection: socket.socket, awaited: bytes = b""):
        self._connection, self._awaited = connection, awaited
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def has_ended(self) -> bool:
        try:
            while content := self._connection.recv(64):
                self._awaited = self._awaited.removeprefix(content)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return not self._awaited

    def close(self) -> None:
        # No shutdown, which would end the connection of the process that this one was forked from.
        self._connection.close()


class Lifelines:
    """Connections between the first rank of a group and each other one; ranks are places in the group.

    Collective over `group`. Made once and for all; they are closed with this object, and in forked children.
    """

    def __init__(self, group: Group):
        self._lines: dict[int, _Line] = {}
        _OPEN.add(self)
        weakref.finalize(self, _close, self._lines)
        server = _listen(group.size) if group.index == 0 else None
        offer = None if server is None else _Offer(server.getsockname()[1])
        found: _Offer | None = all_gather_object(offer, group)[0]
        deadline = time.monotonic() + _CONNECT_S
        if found is None:  # the first rank can't listen
            return
        if server is None:
            self._connect(found, group.index, deadline)
            return
        with server:
            self._accept(server, found.token, group.size, deadline)

    def ended(self, ranks: Iterable[int]) -> list[int]:
        """Those that are known to be gone: their processes ended, or their own Lifelines are closed."""
        return [rank for rank in ranks if rank in self._lines and self._lines[rank].has_ended()]

    def close(self) -> None:
        """Close this end of each."""
        _close(self._lines)

    def _accept(self, server: socket.socket, token: bytes, size: int, deadline: float) -> None:
        with suppress(OSError):
            while len(self._lines) < size - 1:
                server.settimeout(_until(deadline))
                connection = server.accept()[0]
                connection.settimeout(_until(deadline))
                rank = _caller(connection, token)
                if rank is None:
                    connection.close()
                    continue
                self._lines[rank] = _Line(connection)

    def _connect(self, offer: _Offer, index: int, deadline: float) -> None:
        for host in offer.hosts():
            with suppress(OSError):
                connection = socket.create_connection((host, offer.port), _until(deadline))
                line = _Line(connection, awaited=offer.token)
                connection.sendall(offer.token + index.to_bytes(_INDEX_BYTES, "big"))
                # Kept whether or not the first rank answers in time: closed, it would tell that this rank is gone.
                self._lines[0] = line
                return


_OPEN: weakref.WeakSet[Lifelines] = weakref.WeakSet()


def _close_all() -> None:
    for lifelines in _OPEN:
        lifelines.close()


# A child that outlives its process, as a loader's worker for some seconds, must not hold the connection.
os.register_at_fork(after_in_child=_close_all)


def _close(lines: dict[int, _Line]) -> None:
    for line in lines.values():
        line.close()
    lines.clear()


def _listen(size: int) -> socket.socket | None:
    with suppress(OSError):
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=size)
        return socket.create_server(("", 0), backlog=size)
    return None


def _until(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _caller(connection: socket.socket, token: bytes) -> int | None:
    """The rank at the other end, which is answered; None of anybody else."""
    with suppress(OSError), connection.makefile("rb") as content:
        greeting = content.read(len(token) + _INDEX_BYTES)
        if len(greeting) == len(token) + _INDEX_BYTES and greeting.startswith(token):
            connection.sendall(token)
            return int.from_bytes(greeting[len(token) :], "big")
    return None
