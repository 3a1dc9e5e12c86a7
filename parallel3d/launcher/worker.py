"""Program of each worker process: runs the user's script as python would, and records its exception.

`python worker.py LAUNCHER_PID [-m] SCRIPT ARGS...`. It is run by path and uses only the standard library, so that the script
alone decides what is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import json
import os
import re
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType

_PR_SET_PDEATHSIG = 1
_EXIT_TIMEOUT_S = 10.0
"""Limit to the shutdown of a failed rank (threads, exit handlers, process groups), after which it is killed."""

BINDS_CORES = "PARALLEL3D_BINDS_CORES"
_MOST_SHOWN = 30_000  # characters
_CONTROL = re.compile(r"(?!\x1b\[[\d;]*m)[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def main() -> None:
    """Run the script named on the command line and exit as it does; record an exception, show it, and exit with code 1."""
    launcher_pid, is_module = int(sys.argv[1]), sys.argv[2] == "-m"
    sys.argv = sys.argv[3:] if is_module else sys.argv[2:]
    _die_with(launcher_pid)
    if BINDS_CORES in os.environ:
        os.sched_setaffinity(0, own_cores(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])))
    faulthandler.enable()
    print_lines()
    error_file = os.environ["TORCHELASTIC_ERROR_FILE"]
    try:
        _run(sys.argv[0], is_module)
    except SystemExit as exit_:
        if isinstance(exit_.code, str):  # sys.exit("why")
            _record(exit_, error_file)
        if exit_.code:
            sys.last_value = exit_  # as python does for other exceptions, so that exit handlers see a failure
        raise
    except KeyboardInterrupt:
        # Ctrl-C is no failure: end by the signal, as python does, but without N tracebacks.
        sys.excepthook = lambda *_: None
        raise
    except BaseException as error:
        _record(error, error_file)
        _show(error)
        # A rank that hangs while it shuts down would keep the job alive: C code ends it, whoever holds the GIL.
        faulthandler.dump_traceback_later(_EXIT_TIMEOUT_S, exit=True)
        sys.exit(1)


def own_cores(rank: int, size: int, root: str = "/sys/devices/system/cpu") -> list[int]:
    """Return the rank's share of this process's cores: neighbours, on as few sockets and physical cores as possible.

    root: the folder in which the kernel says where cores are. Where there are fewer cores than ranks, all have all.
    """

    def place(core: int) -> tuple[int, ...]:
        try:
            files = [f"{root}/cpu{core}/topology/{name}" for name in ("physical_package_id", "core_id")]
            return tuple([int(Path(file).read_text()) for file in files])
        except OSError:
            return ()

    cores = sorted(os.sched_getaffinity(0), key=lambda core: (place(core), core))
    return cores[len(cores) * rank // size : len(cores) * (rank + 1) // size] if len(cores) >= size else cores


def print_lines() -> None:
    """Print line by line, as on a terminal: at once, and not mixed with what other ranks print."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _run(target: str, is_module: bool) -> None:
    path = os.getcwd() if is_module else os.path.dirname(os.path.realpath(target))
    if not sys.flags.safe_path:  # with it, the user wants no such entry
        sys.path[0] = path
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(os.path.abspath(target), run_name="__main__")


def _die_with(launcher_pid: int) -> None:
    """Have the kernel kill this process when the launcher dies, even by SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != launcher_pid:  # it died before the line above
        sys.exit(f"the launcher, process {launcher_pid}, is gone")


def _record(error: BaseException, path: str) -> None:
    """Write `error` to `path` in torch elastic's format, unless an error is there already.

    The script's own `@record` may have written one: the first exception is the cause.
    """
    if os.path.exists(path):
        return
    extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):  # a full disk: the ranks' verdict, which the launcher has, gives the reason
        with open(path + ".part", "w") as file:
            json.dump({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}, file)
        os.replace(path + ".part", path)  # atomically: the launcher may end this rank right now


def _show(error: BaseException) -> None:
    """Print `error` with the script's excepthook, in one write: other ranks may be printing theirs.

    A very long text loses its middle; escape sequences are escaped themselves, except those of colors.
    """
    error = error.with_traceback(_script_frames(error.__traceback__))
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        sys.excepthook(type(error), error, error.__traceback__)
    shown, half = text.getvalue(), _MOST_SHOWN // 2
    if len(shown) > _MOST_SHOWN:
        shown = f"{shown[:half]} ... ({len(shown) - 2 * half} characters left out) ... {shown[-half:]}"
    with contextlib.suppress(OSError):
        sys.stderr.write(_CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", shown))
        sys.stderr.flush()


def _script_frames(frames: TracebackType | None) -> TracebackType | None:
    """Return `frames` without the leading ones of this file and of runpy."""
    own = {main.__code__.co_filename, runpy.run_path.__code__.co_filename}
    while frames is not None and frames.tb_frame.f_code.co_filename in own:
        frames = frames.tb_next
    return frames


if __name__ == "__main__":
    main()
