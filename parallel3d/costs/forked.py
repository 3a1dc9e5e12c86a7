"""Calls in a process that is forked from this one, imports what they need and works ahead."""

from __future__ import annotations

import pickle
import signal
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Protocol

from parallel3d.errors import Parallel3DError


class Service(Protocol):
    """Function of keys. It returns what can be pickled, or raises a Parallel3DError."""

    def __call__(self, key: Any) -> Any:
        """Return the result; called once for each key."""

    def following(self, key: Any) -> Iterable[Any]:
        """Return keys that are likely to be asked for soon after this one."""


class ForkedCalls:
    """Process that calls a function. imports: modules that it imports first, while this process goes on.

    No thread of this process may hold a lock that the imports or the function need.
    """

    def __init__(self, imports: Sequence[str] = ()):
        context = get_context("fork")
        self._connection, served = context.Pipe()
        context.Process(target=_serve, args=(served, self._connection, imports), daemon=True).start()
        served.close()  # so that the end of the process ends the connection

    def begin(self, service: Service, ahead: Sequence[Any]) -> bool:
        """Give the process a copy of its function, and keys to call it for in this order before they are asked for.

        Return whether that could be sent: a function may refer to what can't be pickled.
        """
        try:
            self._connection.send_bytes(pickle.dumps((service, ahead)))
        except Exception:  # whatever an object's own code raises
            return False
        return True

    def __call__(self, key: Any) -> Any:
        """Return the result, None if the process has ended. Raises the Parallel3DError that the function raised."""
        try:
            self._connection.send(key)
            result = pickle.loads(self._connection.recv_bytes())  # noqa: S301 (of our own process)
        except (EOFError, OSError):
            return None
        if isinstance(result, Parallel3DError):
            raise result
        return result


def _serve(connection: Connection, other_end: Connection, imports: Sequence[str]) -> None:
    other_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks ends this one
    for name in imports:
        import_module(name)
    try:
        service, keys = pickle.loads(connection.recv_bytes())  # noqa: S301 (of our own process)
    except Exception:  # nothing was given, or a function of a module that only the other process has imported
        return
    ahead: deque[Any] = deque(keys)
    called = cache(lambda key: _result(service, key))
    while True:
        while ahead and not connection.poll():
            called(ahead.popleft())
        try:
            key = connection.recv()
        except EOFError:
            return
        connection.send_bytes(called(key))
        ahead.extendleft(service.following(key))


def _result(function: Callable[[Any], Any], key: Any) -> bytes:
    try:
        return pickle.dumps(function(key))
    except Parallel3DError as error:
        return pickle.dumps(error)
