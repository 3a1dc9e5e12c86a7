"""Streams of a device, played by threads."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable
from queue import Queue
from threading import Event, Thread
from typing import Any

from torch import Tensor


class ThreadStream:
    """Runs what is queued on a thread of its own, with random pauses, as a CUDA stream runs beside the host."""

    def __init__(self, seed: int):
        self._queue: Queue[Callable[[], Any] | None] = Queue()
        self._rng = random.Random(seed)
        self.held: list[Tensor] = []
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            if self._rng.random() < 0.3:
                time.sleep(self._rng.random() * 1e-3)
            task()

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        self._queue.put(lambda: ctypes.memmove(target, source, num_bytes))

    def wait_for(self, word: int, count: int) -> None:
        flag = ctypes.c_int32.from_address(word)

        def wait() -> None:
            end = time.monotonic() + 20
            while (flag.value - count + 2**31) % 2**32 < 2**31:  # signed difference, as the driver compares
                assert time.monotonic() < end, "the flag never came"
                time.sleep(1e-5)

        self._queue.put(wait)

    def mark(self) -> Event:
        done = Event()
        self._queue.put(done.set)
        return done

    def follow(self, mark: Event) -> None:
        self._queue.put(lambda: mark.wait(20))

    def hold(self, memory: Tensor) -> None:
        self._queue.put(lambda: self.held.append(memory))

    def run(self, task: Callable[[], Any]) -> None:
        """Queue any work."""
        self._queue.put(task)

    def pause(self, seconds: float) -> None:
        self._queue.put(lambda: time.sleep(seconds))

    def write(self, word: int, count: int) -> None:
        flag = ctypes.c_int32.from_address(word)
        self._queue.put(lambda: setattr(flag, "value", count))

    def close(self) -> bool:
        """Whether all that was queued is done."""
        self._queue.put(None)
        self._thread.join(30)
        return not self._thread.is_alive()


class CurrentStream:
    """Streams of which the same one is always the current one."""

    def __init__(self, stream: ThreadStream):
        self._stream = stream

    def current(self) -> ThreadStream:
        return self._stream
