"""Child processes of the launcher, those that it has adopted too: found, reaped and ended."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

from parallel3d.logs import logger

GRACE_S = 5
"""Seconds between asking a worker to end and killing it."""

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def adopt_orphans() -> None:
    """Make this process the parent of each descendant whose own parent dies, so that `children` finds it."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent ends, also if that is killed."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def children() -> set[int]:
    """Return the ids of this process's children, including ended ones that nobody has waited for."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            # The second field, the name in parentheses, may hold spaces and parentheses itself.
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(stat.parent.name))
    return found


def reap(others: Set[int]) -> None:
    """Reap adopted children that have ended. others: children for which somebody else waits."""
    with suppress(ChildProcessError):  # there are none
        # A cheap check whether any child has ended. WNOWAIT leaves it waitable, as others may wait for it.
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            for pid in children() - others:
                os.waitpid(pid, os.WNOHANG)


def end_leftovers(spare: Set[int]) -> None:
    """Kill processes that the workers started and left, and their children after adoption.

    spare: children that the workers did not start.
    """
    deadline = time.monotonic() + 5
    while (left := children() - spare) and time.monotonic() < deadline:
        for pid in left:
            # A child's id is not reused before the child is waited for, so this can't hit another process.
            with suppress(OSError):  # another user's process: reported as left
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
    if left:
        logger.warning("parallel3d: these processes can't be killed (they are blocked in the kernel): %s", sorted(left))
