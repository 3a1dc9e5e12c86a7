"""Descendants of this process on Linux: to adopt those whose parent died, and to leave none behind.

Elsewhere than on Linux there is no adoption: the worker processes themselves still end, by their process groups.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Set
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of each descendant whose own parent dies, so that `children` finds it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """Process ids of this process's children; ended ones that nobody waited for are among them."""
    return {int(entry.name) for entry in Path("/proc").glob("[0-9]*") if _parent(entry) == os.getpid()}


def kill_children(spare: Set[int], timeout_s: float = 5.0) -> set[int]:
    """Kill all children but those in `spare`, and theirs after adoption; return the ones left after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while (left := children() - spare) and time.monotonic() < deadline:
        for pid in left:
            # A child's id stays taken until it is waited for, so this can't hit a stranger.
            with contextlib.suppress(OSError):  # another user's process: reported as left
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
    return left


def _parent(entry: Path) -> int | None:
    try:
        stat = (entry / "stat").read_text()
    except OSError:  # it ended meanwhile
        return None
    # The second field, the name in parentheses, may hold spaces and parentheses itself.
    return int(stat.rpartition(")")[2].split()[1])
