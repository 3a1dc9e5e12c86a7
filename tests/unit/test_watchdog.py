"""The watchdog's thread and the end of its process."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

import pytest

from parallel3d.activity import Activity
from parallel3d.config import FailuresConfig
from parallel3d.failures.watchdog import Watchdog


class SlowBoard:
    """A store on a loaded machine: what is asked takes its time."""

    lost = False

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.left = False

    def is_open(self, incident: int) -> bool:
        self.asked.set()
        time.sleep(0.5)
        return False

    def leave(self) -> None:
        self.left = True


@pytest.mark.parametrize("closed_before", [False, True], ids=["at work", "its engine is gone"])
def test_a_script_that_ends_waits_for_the_thread_that_asks_the_store(closed_before: bool) -> None:
    """It would come back into a Python that has ended, which aborts the process."""
    board: Any = SlowBoard()
    nobody: Any = cast(Any, None)
    watchdog = Watchdog(
        board, nobody, Activity(), 0, [0], nobody, FailuresConfig(timeout_s=0), lambda: False, lambda: b""
    )
    assert board.asked.wait(10)
    if closed_before:
        watchdog.close()
    watchdog.leave()
    assert not watchdog._thread.is_alive()
    assert board.left is not closed_before
