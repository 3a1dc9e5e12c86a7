"""Calls of a function in a process that is forked from this one and works ahead."""

from __future__ import annotations

import pickle
import signal
from collections import deque
from collections.abc import Callable, Iterable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

from parallel3d.errors import ExecutionError, Parallel3DError

Key = TypeVar("Key")
Result = TypeVar("Result")


class ForkedCalls(Generic[Key, Result]):
    """Calls a function in a forked process, which shares all that the function refers to.

    - function: returns what can be pickled, or raises a Parallel3DError. It may keep state: the process calls it once for each
      key, `ahead` in its order while it isn't asked for anything, and other keys when they are asked for.

    No thread of this process may hold a lock that the function needs.
    """

    def __init__(self, function: Callable[[Key], Result], ahead: Iterable[Key] = ()):
        context = get_context("fork")
        self._connection, served = context.Pipe()
        context.Process(target=_serve, args=(served, self._connection, function, deque(ahead)), daemon=True).start()
        served.close()  # so that the end of the process ends the connection

    def __call__(self, key: Key) -> Result:
        """Return function(key). Raises what the function raised, and ExecutionError if the process has ended."""
        try:
            self._connection.send(key)
            result: Result | Parallel3DError = pickle.loads(self._connection.recv_bytes())  # noqa: S301 (own process)
        except (EOFError, OSError) as error:
            raise ExecutionError("the process that traces layers has ended early; its error is above") from error
        if isinstance(result, Parallel3DError):
            raise result
        return result


def _serve(
    connection: Connection, other_end: Connection, function: Callable[[Key], Result], ahead: deque[Key]
) -> None:
    other_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks ends this one
    known: dict[Key, bytes] = {}

    def call(key: Key) -> None:
        result: Result | Parallel3DError
        try:
            result = function(key)
        except Parallel3DError as error:
            result = error
        known[key] = pickle.dumps(result)

    while True:
        while ahead and not connection.poll():
            key = ahead.popleft()
            if key not in known:
                call(key)
        try:
            key = connection.recv()
        except EOFError:
            return
        if key not in known:
            call(key)
        connection.send_bytes(known[key])
