"""Coordination of ranks through key-value stores: collective decisions, and the store used in failures.

Nothing here uses a collective after construction, so it works from any thread while training communicates, and when
collectives no longer work.
"""

from __future__ import annotations

import base64
import hmac
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from parallel3d.comm.collectives import Group
from parallel3d.comm.liveness import PeerLiveness
from parallel3d.errors import CommunicationError, Parallel3DError, PeerError, message_of
from parallel3d.membership import proof

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
# torch's TCPStore takes no values of more than 8 MiB.
_MOST_BYTES = 4 << 20
# The first rank may own the store: it stays until the others have read their answers, but not for ranks that died.
_LEAVE_S = 10.0
# How many seconds after the end of its store rank 0's end may become known.
_STORE_S = 1.0
# Counts how often any rank has given up; below this key, each rank's value of that count when it last gave up.
_GIVEN_UP = "given_up"


class CollectiveDecision:
    """Decisions of all ranks of a world, made by the first rank; all ranks must make the same ones in the same order.

    A decision that fails does no harm to the next one. The constructor is collective over `group`.

    - group: the world, by any handle that all ranks made together.
    - name: the name of this series of decisions.
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
        self.rank, self._size, self._group = group.index, group.size, group
        self._timeout, self._raises = timeout_s, raises
        self._number = self._attempts = 0
        if group.handle is not None:
            default = dist.distributed_c10d._get_default_store()
            self._store = dist.PrefixStore(f"{name}/{group.handle.group_name}", default)
            self._liveness = PeerLiveness(group, connect_s)

    def make(self, purpose: str, value: Any, decide: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Return this rank's item of decide(every rank's value), which the first rank calls; values and items are JSON values.

        Raises `raises`, naming the ranks that have not come, at the timeout, and from a PeerError as soon as a rank that has
        not come is known to be gone; on every rank the Parallel3DError that `decide` raises.
        """
        if self._size == 1:
            return decide([value])[0]
        try:
            try:
                return self._make(purpose, value, decide)
            except dist.DistError as error:
                raise self._without_store(error) from error
        except CommunicationError as error:
            if isinstance(error, self._raises):
                raise
            raise self._raises(str(error)) from error

    def attempt(
        self, purpose: str, make: Callable[[], Any], decide: Callable[[list[Any]], Sequence[Any]] | None = None
    ) -> Any:
        """Decide on make() of every rank; if that raises on a rank, all ranks raise its message as `raises`.

        decide: as in `make`, on the values of make(); None to decide only whether a rank has raised.
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
        self._begun = self._store.add(_GIVEN_UP, 0)
        self._attempts += 1
        while True:
            own = f"{self._number}/{self.rank}"
            self._put(own, [purpose, value, self._attempts])
            try:
                answer = self._lead(value, decide) if self.rank == 0 else self._follow()
            finally:
                self._remove(own)
            self._number += 1
            if answer["attempt"] in (None, self._attempts):
                break
            # The answer is to a decision on which this rank gave up while the first rank made it: the others have gone on.
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
        attempts: dict[int, int] = {}
        if lost := self._wait(others):
            answers = [{"error": self._ended(lost), "lost": lost[0]}] * self._size
        else:
            try:
                came = [[self._purpose, value, self._attempts], *(self._get(key) for key in others.values())]
                attempts = {rank: attempt for rank, (_, _, attempt) in enumerate(came)}
                for rank, (purpose, *_) in enumerate(came):
                    self._check(rank, purpose)
                answers = [{"item": item} for item in decide([value for _, value, _ in came])]
            except Exception as error:  # any kind: the other ranks wait for an answer
                answers = [{"error": message_of(error), "kind": type(error).__name__}] * self._size
        for rank in range(self._size):
            answers[rank] = {**answers[rank], "purpose": self._purpose, "attempt": attempts.get(rank)}
        for rank in others:
            self._put(f"{self._number}/answer/{rank}", answers[rank])
        self._wait_for_readers()
        return answers[0]

    def _follow(self) -> dict[str, Any]:
        key = f"{self._number}/answer/{self.rank}"
        if lost := self._wait({0: key}):
            raise PeerError(self._ended(lost), lost[0])
        answer: dict[str, Any] = self._get(key)
        self._remove(key)
        return answer

    def _check(self, rank: int, purpose: str) -> None:
        """Raise if ranks are at different decisions, as after a rank that came too late."""
        if purpose != self._purpose:
            raise CommunicationError(
                f"rank {self.rank} is at {self._purpose} and rank {rank} at {purpose}; every rank must call the same, in the "
                "same order (after one that came too late, restart the job)"
            )

    def _put(self, key: str, value: Any) -> None:
        content = zlib.compress(json.dumps(value).encode(), 1)
        parts = [content[k : k + _MOST_BYTES] for k in range(0, len(content), _MOST_BYTES)]
        for k, part in enumerate(parts):
            self._store.set(f"{key}/{k}", base64.b64encode(part).decode())
        # Last: once this is there, the value is complete.
        self._store.set(key, f"{len(parts)} {proof(key.encode(), content).hex()}")

    def _get(self, key: str) -> Any:
        number, signature = self._store.get(key).decode().split()
        content = b"".join(base64.b64decode(self._store.get(f"{key}/{k}")) for k in range(int(number)))
        if not hmac.compare_digest(signature, proof(key.encode(), content).hex()):
            raise CommunicationError(
                f"{self._purpose}: a value in the job's store is of no rank of this job; start the job on a network that "
                "strangers can't reach"
            )
        return json.loads(zlib.decompress(content))

    def _remove(self, key: str) -> None:
        for k in range(int(self._store.get(key).split()[0])):
            self._store.delete_key(f"{key}/{k}")
        self._store.delete_key(key)

    def _wait(self, keys: Mapping[int, str]) -> list[int]:
        """Wait until each rank has set its key; return [] or the ranks that have ended without setting it.

        The wait is recorded as activity, so that watchdogs see which ranks are not in this decision. Raises CommunicationError
        at the deadline.
        """
        pauses = _pauses()
        with self._group.activity.waiting(self._group.waiting(self._purpose)):
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

    def _without_store(self, error: dist.DistError) -> CommunicationError:
        """Return the error for a store that doesn't answer. The store ends with rank 0, unless an agent holds it."""
        deadline, pauses = time.monotonic() + _STORE_S, _pauses()
        while time.monotonic() < deadline:  # a process closes its connections one after the other
            if self.rank and self._liveness.ended([0]):
                return PeerError(self._ended([0]), 0)
            time.sleep(next(pauses))
        return CommunicationError(
            f"{self._purpose}: the job's store doesn't answer ({message_of(error)}); look at the output of rank 0 and of the "
            "launcher for why it ended"
        )

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
        """Return whether a rank has come, or came and gave up after this one began to wait."""
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
    """Yield pauses between two checks of the store, each twice as long as the last one up to a limit."""
    pause = _SHORTEST_PAUSE_S
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE_S)


# All ranks of a host connect at once when they start, which keeps it busy.
_ANSWER_TIMEOUT, _CONNECT_TIMEOUT = timedelta(seconds=5), timedelta(seconds=60)
_PREFIX = "parallel3d/failures"
VERDICT_KEY = "verdict"
"""Key of the verdict of the ranks on a failure, for the launcher's agent."""
SAID_KEY = "said"
"""Key that is there once a rank has printed the verdict."""


NORMAL_EXIT = "exit code 0"


def exit_key(rank: int) -> str:
    """Return the key where the agent notes how a rank's process ended, as "SIGKILL", "exit code 3" or NORMAL_EXIT."""
    return f"exit/{rank}"


def failure_store() -> dist.Store:
    """Return a store, over a connection of its own, by which ranks exchange reports when collectives no longer work.

    It is the store of the elastic agent that started this process, which outlives every rank; without an agent, the world's own
    store, which ends with rank 0. Its operations raise torch's DistError when it is gone.
    """
    agents = own_agents_store()
    if agents is not None:
        return agents
    default: Any = dist.distributed_c10d._get_default_store()
    store = default.clone()
    store.set_timeout(_ANSWER_TIMEOUT)
    return dist.PrefixStore(_PREFIX, store)


def own_agents_store() -> dist.Store | None:
    """Return the store of the elastic agent that started this process; None without an agent."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return None
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return agents_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), restarts)


def agents_store(address: str, port: int, restarts: int, connect: timedelta = _CONNECT_TIMEOUT) -> dist.Store:
    """Return the store of an elastic agent, for the agent itself. restarts: how often it has restarted the workers."""
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=connect)
    store.set_timeout(_ANSWER_TIMEOUT)
    return dist.PrefixStore(f"{_PREFIX}/{restarts}", store)
