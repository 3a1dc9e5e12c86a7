"""Calls in processes that are forked from this one, import what they need and work ahead."""

from __future__ import annotations

import os
import pickle
import signal
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
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

    def process(self, key: Any) -> int:
        """Return which process calls it with this key, 0 or 1. They share nothing."""


class ForkedCalls:
    """Two forked processes that call a function. imports: modules that they import first, while this process goes on.

    No thread of this process may hold a lock that the imports or the function need.
    """

    def __init__(self, imports: Sequence[str] = ()):
        context = get_context("fork")
        self._connections, served = zip(context.Pipe(), context.Pipe(), strict=True)
        context.Process(target=_serve, args=(served, self._connections, imports), daemon=True).start()
        for connection in served:
            connection.close()  # so that the end of a process ends its connection

    def begin(self, service: Service, ahead: Sequence[Any]) -> bool:
        """Send each process a copy of the function, and the keys for which to call it in advance, in this order.

        Return False if they can't be sent, because the function refers to objects that can't be pickled.
        """
        try:
            for number, connection in enumerate(self._connections):
                connection.send_bytes(pickle.dumps((service, [key for key in ahead if service.process(key) == number])))
        except Exception:  # whatever an object's own code raises
            return False
        self._process = service.process
        return True

    def __call__(self, key: Any) -> Any:
        """Return the result, None if the process has ended. Raises the Parallel3DError that the function raised."""
        connection = self._connections[self._process(key)]
        try:
            connection.send(key)
            result = connection.recv()
        except (EOFError, OSError):
            return None
        if isinstance(result, Parallel3DError):
            raise result
        return result


def _serve(served: Sequence[Connection], others: Sequence[Connection], imports: Sequence[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks ends these
    for name in imports:
        import_module(name)
    connection, other = served if os.fork() else served[::-1]
    for end in (other, *others):
        end.close()
    # A call that fails here is repeated by the process that asks, which then raises the error.
    with suppress(Exception):
        service, keys = connection.recv()
        ahead: deque[Any] = deque(keys)
        called = cache(lambda key: _result(service, key))
        while True:
            while ahead and not connection.poll():
                called(ahead.popleft())
            key = connection.recv()
            connection.send_bytes(called(key))
            ahead.extendleft(service.following(key))


def _result(function: Callable[[Any], Any], key: Any) -> bytes:
    try:
        return pickle.dumps(function(key))
    except Parallel3DError as error:
        return pickle.dumps(error)
