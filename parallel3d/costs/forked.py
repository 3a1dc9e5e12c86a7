"""Calls of a function in a process that is forked from this one and works ahead."""

from __future__ import annotations

import pickle
import signal
from collections import deque
from collections.abc import Callable, Iterable
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

from parallel3d.errors import ExecutionError, Parallel3DError

Key = TypeVar("Key")
Result = TypeVar("Result")


class ForkedCalls(Generic[Key, Result]):
    """Calls a function in a forked process, which shares all that the function refers to.

    - function: returns what can be pickled, or raises a Parallel3DError; it is called once for each key.
    - ahead: keys for which it is called before they are asked for, in this order.
    - following: returns keys that are likely to be asked for soon after one; they come before those of `ahead`.

    No thread of this process may hold a lock that the function needs.
    """

    def __init__(
        self,
        function: Callable[[Key], Result],
        ahead: Iterable[Key] = (),
        following: Callable[[Key], Iterable[Key]] = lambda key: (),
    ):
        context = get_context("fork")
        self._connection, served = context.Pipe()
        given = served, self._connection, function, deque(ahead), following
        context.Process(target=_serve, args=given, daemon=True).start()
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
    connection: Connection,
    other_end: Connection,
    function: Callable[[Key], Result],
    ahead: deque[Key],
    following: Callable[[Key], Iterable[Key]],
) -> None:
    other_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks ends this one

    @cache
    def called(key: Key) -> bytes:
        try:
            return pickle.dumps(function(key))
        except Parallel3DError as error:
            return pickle.dumps(error)

    while True:
        while ahead and not connection.poll():
            called(ahead.popleft())
        try:
            key = connection.recv()
        except EOFError:
            return
        connection.send_bytes(called(key))
        ahead.extendleft(following(key))
