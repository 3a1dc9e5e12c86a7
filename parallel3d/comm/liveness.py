"""Liveness of peers: connections that break when a process ends."""

from __future__ import annotations

import hmac
import os
import selectors
import socket
import time
import uuid
import weakref
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from parallel3d.comm.collectives import Group, all_gather_object

# A machine that vanishes closes no connection. The kernel probes it after 8 s, three times every 4 s: 20 s.
_KEEPALIVE = {"TCP_KEEPIDLE": 8, "TCP_KEEPINTVL": 4, "TCP_KEEPCNT": 3}
_INDEX_BYTES = 4
_BACKLOG = 4096  # of connections, those of strangers included


class PeerLiveness:
    """Idle connections between the first rank of a group and each other one: one that breaks shows that a process has ended.

    Ranks are indices in the group. A rank that can't connect within `connect_s`, as through a firewall, is never known to be
    gone. The constructor is collective. Connections are closed with this object and in forked children: a child may outlive
    its process, as a data loader's worker does for some seconds.
    """

    def __init__(self, group: Group, connect_s: float):
        self._connections: dict[int, _Connection] = {}
        close = partial(_close, self._connections)
        weakref.finalize(self, close)
        os.register_at_fork(after_in_child=close)
        with ExitStack() as stack:
            server = None
            if group.index == 0:
                with suppress(OSError):
                    server = stack.enter_context(_listen())
            offer = None if server is None else _Offer(server.getsockname()[1])
            offered: _Offer | None = all_gather_object(offer, group)[0]
            deadline = time.monotonic() + connect_s
            if server is not None and offered is not None:
                self._accept(server, offered.token, group.size, deadline)
            elif offered is not None:  # the first rank can listen
                self._connect(offered, group.index, deadline)

    def ended(self, ranks: Iterable[int]) -> list[int]:
        """Return those ranks whose processes are known to have ended, or whose own PeerLiveness is gone."""
        return [rank for rank in ranks if rank in self._connections and self._connections[rank].has_ended()]

    def _accept(self, server: socket.socket, token: bytes, size: int, deadline: float) -> None:
        """Accept the connections of the other ranks, which greet with the token and their index, and answer with the token.

        Connections of strangers, silent ones too, keep no rank waiting.
        """
        with selectors.DefaultSelector() as selector:
            server.setblocking(False)
            selector.register(server, selectors.EVENT_READ)
            try:
                while len(self._connections) < size - 1 and time.monotonic() < deadline:
                    for key, _ in selector.select(_until(deadline)):
                        with suppress(OSError):
                            self._greet(selector, key, token)
            finally:
                for key in list(selector.get_map().values()):
                    cast(socket.socket, key.fileobj).close()

    def _greet(self, selector: selectors.BaseSelector, key: selectors.SelectorKey, token: bytes) -> None:
        """Accept a connection, whose data is then what it has sent, or read what came on one."""
        ready = cast(socket.socket, key.fileobj)
        if key.data is None:
            connection = ready.accept()[0]
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ, bytearray())
            return
        missing = len(token) + _INDEX_BYTES - len(key.data)
        content = ready.recv(missing)
        key.data.extend(content)
        if content and len(content) < missing:
            return
        selector.unregister(ready)
        if len(content) == missing and hmac.compare_digest(bytes(key.data[: len(token)]), token):
            ready.sendall(token)
            self._connections[int.from_bytes(key.data[len(token) :], "big")] = _Connection(ready)
        else:
            ready.close()

    def _connect(self, offer: _Offer, index: int, deadline: float) -> None:
        near = "127.0.0.1" if offer.name == socket.gethostname() else None
        # The most reliable first: host names are not always known.
        for host in filter(None, (near, offer.master, offer.name)):
            with suppress(OSError):
                connection = socket.create_connection((host, offer.port), _until(deadline))
                end = _Connection(connection, awaited=offer.token)
                connection.sendall(offer.token + index.to_bytes(_INDEX_BYTES, "big"))
                # Kept whether or not the first rank answers in time: closing it would signal that this rank has ended.
                self._connections[0] = end
                return


@dataclass(frozen=True)
class _Offer:
    """Address at which the first rank listens. token: sent by both ends, so that they recognize each other."""

    port: int
    token: bytes = field(default_factory=lambda: uuid.uuid4().bytes)
    name: str = field(default_factory=socket.gethostname)
    master: str | None = field(default_factory=lambda: os.environ.get("MASTER_ADDR"))


class _Connection:
    """One end of a connection. Its end means nothing before the other end has sent `awaited`."""

    def __init__(self, connection: socket.socket, awaited: bytes = b""):
        self._connection, self._awaited = connection, awaited
        # No shutdown, which would end the connection of the process that this one was forked from.
        self.close = connection.close
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
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


def _close(connections: dict[int, _Connection]) -> None:
    for connection in connections.values():
        connection.close()
    connections.clear()


def _listen() -> socket.socket:
    """Listen at the address where the ranks meet, if it is this host's and IPv4, or else at all of this host's.

    A host may know its own name as an address that other hosts don't reach: Debian's /etc/hosts has 127.0.1.1.
    """
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with suppress(OSError):
        server = socket.create_server((master, 0), backlog=_BACKLOG)
        if master in ("127.0.0.1", "localhost") or not server.getsockname()[0].startswith("127."):
            return server
        server.close()
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", 0), backlog=_BACKLOG)


def _until(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
