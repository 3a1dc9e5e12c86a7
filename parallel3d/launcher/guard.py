"""Process that outlives a killed launcher: it ends what the ranks have started, and removes their temporary folder.

`python guard.py JOB` does so at the end of its standard input, which it gets when the launcher is gone; each line is a folder.
Processes of the job are those that have its name in their environment, as /proc shows it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LIFELINE = "PARALLEL3D_LIFELINE"
"""Variable that is set where the launcher was started from another host, and ends when its standard input does."""

_VARIABLE = "PARALLEL3D_JOB"
_LONGEST_S = 10.0


@contextmanager
def guarded() -> Iterator[Callable[[str], None]]:
    """Guard the processes that this one starts in the block. Yields a function that takes a folder to remove."""
    job = uuid.uuid4().hex
    environment = {name: value for name, value in os.environ.items() if name != _VARIABLE}
    # In a session of its own, so that no Ctrl-C ends it.
    guard = subprocess.Popen(  # noqa: S603 (this interpreter, and this file)
        [sys.executable, "-I", "-S", __file__, job], stdin=subprocess.PIPE, env=environment, start_new_session=True
    )
    assert guard.stdin is not None
    stream = guard.stdin
    os.environ[_VARIABLE] = job

    def remove_later(folder: str) -> None:
        with suppress(OSError):  # somebody has killed the guard: the job itself can go on
            stream.write(os.fsencode(folder) + b"\n")
            stream.flush()

    try:
        yield remove_later
    finally:
        guard.kill()
        guard.wait()
        with suppress(OSError):
            stream.close()


def follow_input() -> None:
    """End this process as by SIGTERM at the end of its standard input; its children's is empty."""
    lifeline = os.fdopen(os.dup(0), "rb", buffering=0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)

    def follow() -> None:
        while lifeline.read(4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow, daemon=True).start()


def _processes(job: str) -> list[int]:
    mark, found = os.fsencode(f"{_VARIABLE}={job}"), []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is another user's
            if mark in file.read_bytes().split(b"\0"):
                found.append(int(file.parent.name))
    return found


def main() -> None:
    """Wait for the launcher's end, then clean up."""
    folders = sys.stdin.buffer.read().splitlines()
    end = time.monotonic() + _LONGEST_S
    while (left := _processes(sys.argv[1])) and time.monotonic() < end:
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    for folder in folders:
        shutil.rmtree(os.fsdecode(folder), ignore_errors=True)


if __name__ == "__main__":
    main()
