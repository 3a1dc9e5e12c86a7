"""A server of processes that have imported what takes long. It imports that for all of them, and this module nothing of it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shlex
import sys
from multiprocessing import forkserver, resource_tracker
from types import ModuleType
from typing import Any


def warm_context() -> multiprocessing.context.ForkServerContext:
    """Return the context of processes that have imported what takes long, by one server."""
    import pytest  # which forked_python does without

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    with pytest.MonkeyPatch.context() as patch:  # the server isn't told sys.path, and leaves out what it doesn't find
        patch.setenv("PYTHONPATH", os.path.dirname(__file__), prepend=os.pathsep)
        forkserver._forkserver.ensure_running()  # before anything else starts it without these
    return context


def share_fork_server() -> dict[str, Any]:
    """Start the server. Return where it is, for join_fork_server of other test processes, whose end doesn't end it."""
    warm_context()
    found = vars(forkserver._forkserver)
    return {name: found[name] for name in ("_forkserver_address", "_forkserver_authkey") if name in found}


def join_fork_server(found: dict[str, Any]) -> None:
    """Use the server that another process keeps running."""
    server = forkserver._forkserver
    server._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)
    server.ensure_running = resource_tracker.ensure_running
    vars(server).update(found)


def use_streams_of(process: int) -> None:
    """Write where another process does."""
    for stream in (1, 2):
        os.dup2(os.open(f"/proc/{process}/fd/{stream}", os.O_WRONLY | os.O_APPEND), stream)


def forked_python() -> str:
    """Return a command that does what `python -u -c CODE` does, in a process of this server."""
    return shlex.join([sys.executable, __file__, pickle.dumps(share_fork_server()).hex()])


def _run_code(code: str, caller: int) -> None:
    use_streams_of(caller)
    os.dup2(os.open(f"/proc/{caller}/fd/0", os.O_RDONLY), 0)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.argv = ["-c"]
    multiprocessing.set_start_method(None, force=True)  # as in a process of Python's own
    sys.modules["__main__"] = ModuleType("__main__")
    exec(code, vars(sys.modules["__main__"]))


if __name__ == "__main__":
    join_fork_server(pickle.loads(bytes.fromhex(sys.argv[1])))
    process = multiprocessing.get_context("forkserver").Process(target=_run_code, args=(sys.argv[-1], os.getpid()))
    process.start()
    process.join()
    sys.exit(process.exitcode)
