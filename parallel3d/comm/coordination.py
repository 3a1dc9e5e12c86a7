"""Coordination of ranks through key-value stores: collective decisions, liveness of peers, and the store used in failures.

Nothing here uses a collective after construction, so it works from any thread while training communicates, and when
collectives no longer work.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import time
import uuid
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from parallel3d.comm.collectives import Group, all_gather_object
from parallel3d.errors import CommunicationError, Parallel3DError, PeerError

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
# torch's TCPStore takes no values of more than 8 MiB.
_MOST_BYTES = 4 << 20
# The first rank may own the store: it stays until the others have read their answers, but not for ranks that died.
_LEAVE_S = 10.0
# Counts how often any rank has given up; below this key, each rank's value of that count when it last gave up.
_GIVEN_UP = "given_up"


class CollectiveDecision:
    """Decisions of all ranks of a world, made by the first rank; all ranks must make the same ones in the same order.

    A decision that fails does no harm to the next one. The constructor is collective over `group`.

    - group: the world, by any handle that all ranks made together.
    - name: of this series of decisions.
    - timeout_s: how long a rank waits for the others.
    - raises: the class of the errors, besides those of Parallel3DError that a decision raises itself.
    """

    def __init__(
        self,
        group: Group,
        name: str,
        timeout_s: float,
        raises: type[Parallel3DError] = CommunicationError,
        connect_s: float = 5.0,
    ):
        self.rank, self._size = group.index, group.size
        self._timeout, self._raises = timeout_s, raises
        self._number = 0
        if group.handle is not None:
            default = dist.distributed_c10d._get_default_store()
            self._store = dist.PrefixStore(f"{name}/{group.handle.group_name}", default)
            self._liveness = PeerLiveness(group, connect_s)

    def make(self, purpose: str, value: Any, decide: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Return this rank's item of decide(every rank's value), which the first rank calls; values and items are JSON's.

        Raises `raises`, naming the ranks that have not come, at the timeout, and from a PeerError as soon as a rank that has
        not come is known to be gone; on every rank the Parallel3DError that `decide` raises.
        """
        if self._size == 1:
            return decide([value])[0]
        try:
            return self._make(purpose, value, decide)
        except CommunicationError as error:
            if isinstance(error, self._raises):
                raise
            raise self._raises(str(error)) from error

    def attempt(
        self, purpose: str, make: Callable[[], Any], decide: Callable[[list[Any]], Sequence[Any]] | None = None
    ) -> Any:
        """Decide on make() of every rank; if that raises on a rank, all ranks raise its message as `raises`.

        decide: None if nothing is to be decided but whether it has raised.
        """
        raised: Exception | None = None
        try:
            value = {"value": make()}
        except Exception as error:
            raised = error
            value = {"error": str(error) if isinstance(error, self._raises) else f"{type(error).__name__}: {error}"}

        def checked(values: list[Any]) -> Sequence[Any]:
            errors = [f"rank {rank}: {item['error']}" for rank, item in enumerate(values) if "error" in item]
            if errors:
                raise self._raises(errors[0])
            return [None] * len(values) if decide is None else decide([item["value"] for item in values])

        try:
            return self.make(purpose, value, checked)
        except self._raises as error:
            raise error from (error.__cause__ if raised is None else raised)

    def _make(self, purpose: str, value: Any, decide: Callable[[list[Any]], Sequence[Any]]) -> Any:
        self._purpose, self._deadline = purpose, time.monotonic() + self._timeout
        own = f"{self._number}/{self.rank}"
        self._begun = self._store.add(_GIVEN_UP, 0)
        self._put(own, [purpose, value])
        try:
            answer = self._lead(value, decide) if self.rank == 0 else self._follow()
        finally:
            self._remove(own)
        self._number += 1
        if "lost" in answer:
            raise PeerError(answer["error"], answer["lost"])
        if "error" in answer:
            kinds = {kind.__name__: kind for kind in Parallel3DError.__subclasses__()}
            raise kinds.get(answer["kind"], CommunicationError)(answer["error"])
        self._check(0, answer["purpose"])
        return answer["item"]

    def _lead(self, value: Any, decide: Callable[[list[Any]], Sequence[Any]]) -> dict[str, Any]:
        others = {rank: f"{self._number}/{rank}" for rank in range(1, self._size)}
        answers: list[dict[str, Any]]
        if lost := self._wait(others):
            answers = [{"error": self._ended(lost), "lost": lost[0]}] * self._size
        else:
            came = [[self._purpose, value], *(self._get(key) for key in others.values())]
            try:
                for rank, (purpose, _) in enumerate(came):
                    self._check(rank, purpose)
                answers = [{"item": item} for item in decide([value for _, value in came])]
            except Exception as error:  # whatever it is, the others are waiting for it
                message = str(error) if isinstance(error, Parallel3DError) else f"{type(error).__name__}: {error}"
                answers = [{"error": message, "kind": type(error).__name__}] * self._size
        for rank in others:
            self._put(f"{self._number}/answer/{rank}", {**answers[rank], "purpose": self._purpose})
        self._wait_for_readers()
        return {**answers[0], "purpose": self._purpose}

    def _follow(self) -> dict[str, Any]:
        key = f"{self._number}/answer/{self.rank}"
        if lost := self._wait({0: key}):
            raise PeerError(self._ended(lost), lost[0])
        answer: dict[str, Any] = self._get(key)
        self._remove(key)
        return answer

    def _check(self, rank: int, purpose: str) -> None:
        """Raise where ranks have lost count, as after one that came too late: their values belong to other decisions."""
        if purpose != self._purpose:
            raise CommunicationError(
                f"rank {self.rank} is at {self._purpose} and rank {rank} at {purpose}; every rank must call the same, in the "
                "same order (after one that came too late, start the job anew)"
            )

    def _put(self, key: str, value: Any) -> None:
        content = zlib.compress(json.dumps(value).encode(), 1)
        parts = [content[k : k + _MOST_BYTES] for k in range(0, len(content), _MOST_BYTES)]
        for k, part in enumerate(parts):
            self._store.set(f"{key}/{k}", base64.b64encode(part).decode())
        self._store.set(key, str(len(parts)))  # last: once this is there, the value is complete

    def _get(self, key: str) -> Any:
        number = int(self._store.get(key))
        content = b"".join(base64.b64decode(self._store.get(f"{key}/{k}")) for k in range(number))
        return json.loads(zlib.decompress(content))

    def _remove(self, key: str) -> None:
        for k in range(int(self._store.get(key))):
            self._store.delete_key(f"{key}/{k}")
        self._store.delete_key(key)

    def _wait(self, keys: Mapping[int, str]) -> list[int]:
        """Wait until each rank has set its key; return [] or the ranks that have ended without setting it.

        Raises CommunicationError at the deadline.
        """
        pauses = _pauses()
        while not self._store.check(list(keys.values())):
            # A rank may have ended after it had set its key.
            if lost := [rank for rank in self._liveness.ended(keys) if not self._store.check([keys[rank]])]:
                return lost
            if time.monotonic() > self._deadline:
                message = self._absent()
                # The caller removes this rank's value, so that no later decision uses it; that it was here stays recorded.
                self._store.set(f"{_GIVEN_UP}/{self.rank}", str(self._store.add(_GIVEN_UP, 1)))
                raise CommunicationError(message)
            time.sleep(next(pauses))
        return []

    def _ended(self, lost: list[int]) -> str:
        who = f"rank {lost[0]}" if len(lost) == 1 else f"ranks {lost}"
        return (
            f"{self._purpose}: {who} ended while others waited for what it brings; look at its output for why it died, or left "
            "its script before the others"
        )

    def _absent(self) -> str:
        missing = [rank for rank in range(self._size) if not self._has_come(rank)]
        who = f"ranks {missing} have not come" if missing else "rank 0 has not answered"
        return (
            f"{self._purpose}: {who} within {self._timeout:g} s; every rank must call it, at the same place (look for a rank "
            "that died, or an `if rank == 0` around the call)"
        )

    def _has_come(self, rank: int) -> bool:
        """Return whether a rank is here, or was here and gave up after this one began to wait."""
        if self._store.check([f"{self._number}/{rank}"]):
            return True
        key = f"{_GIVEN_UP}/{rank}"
        return self._store.check([key]) and int(self._store.get(key)) > self._begun

    def _wait_for_readers(self) -> None:
        deadline, pauses = time.monotonic() + _LEAVE_S, _pauses()
        unread = {rank: f"{self._number}/answer/{rank}" for rank in range(1, self._size)}
        while unread and time.monotonic() < deadline:
            gone = self._liveness.ended(unread)
            unread = {rank: key for rank, key in unread.items() if rank not in gone and self._store.check([key])}
            if unread:
                time.sleep(next(pauses))


def _pauses() -> Iterator[float]:
    """Yield pauses between two looks at the store, each twice as long as the last one up to a limit."""
    pause = _SHORTEST_PAUSE_S
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE_S)


# A machine that vanishes closes no connection. The kernel probes it after 8 s, three times every 4 s: 20 s.
_KEEPALIVE = {"TCP_KEEPIDLE": 8, "TCP_KEEPINTVL": 4, "TCP_KEEPCNT": 3}
_INDEX_BYTES = 4


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
                    server = stack.enter_context(_listen(group.size))
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
        """Accept the connections of the other ranks, which greet with the token and their index, and answer with the token."""
        with suppress(OSError):
            while len(self._connections) < size - 1:
                server.settimeout(_until(deadline))
                connection = server.accept()[0]
                connection.settimeout(_until(deadline))
                greeting = b""
                with suppress(OSError), connection.makefile("rb") as content:
                    greeting = content.read(len(token) + _INDEX_BYTES)
                if len(greeting) == len(token) + _INDEX_BYTES and greeting.startswith(token):
                    with suppress(OSError):
                        connection.sendall(token)
                    self._connections[int.from_bytes(greeting[len(token) :], "big")] = _Connection(connection)
                else:
                    connection.close()

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


def _close(connections: dict[int, _Connection]) -> None:
    for connection in connections.values():
        connection.close()
    connections.clear()


def _listen(size: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=size)
    return socket.create_server(("", 0), backlog=size)


def _until(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


_ANSWER_TIMEOUT = timedelta(seconds=5)
_PREFIX = "parallel3d/failures"
VERDICT_KEY = "verdict"
"""Key of the ranks' verdict, for the launcher's agent."""


def exit_key(rank: int) -> str:
    """Return the key where the agent notes how a rank's process ended."""
    return f"exit/{rank}"


def failure_store() -> dist.Store:
    """Return a store, over a connection of its own, by which ranks exchange reports when collectives no longer work.

    It is the elastic agent's, which outlives every rank, if one started this process; else the world's own, which is gone
    with rank 0. Its operations raise torch's DistError when it is gone.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        return agents_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), restarts)
    default: Any = dist.distributed_c10d._get_default_store()
    store = default.clone()
    store.set_timeout(_ANSWER_TIMEOUT)
    return dist.PrefixStore(_PREFIX, store)


def agents_store(address: str, port: int, restarts: int) -> dist.Store:
    """Return the agent's own view of that store. restarts: how often it has restarted the workers."""
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=_ANSWER_TIMEOUT)
    return dist.PrefixStore(f"{_PREFIX}/{restarts}", store)
