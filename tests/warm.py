"""Scripts and commands from a process that has imported torch: to start Python and import it costs seconds."""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import torch
from fork_server import warm_context


def run_and_end(script: Callable[..., None], args: tuple[Any, ...]) -> None:
    """End this process as python ends after a script."""
    gc.freeze()  # what was imported stays: no collection need visit it
    torch.set_num_threads(1)
    code: Any = 0
    try:
        script(*args)
    except SystemExit as exit_:
        code = exit_.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    for end in (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):
        end()
    os._exit(code)  # multiprocessing's way out prints the traceback once more


def _become(folder: str, environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ |= environment
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))


def run_script(path: str, *arguments: str) -> None:
    """Run a script as `python path arguments` does. For FaultRanks.run."""
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def _run_code(folder: str, environment: dict[str, str], code: str) -> None:
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), stream)
    _become(folder, environment)
    run_and_end(exec, (code, {"__name__": "__main__"}))


def run_codes(
    code: str, folder: Path, environments: Sequence[dict[str, str]], most_seconds: float = 100
) -> list[CompletedProcess[str]]:
    """Run `python -c code` in each environment, all at once, from a process that has imported torch."""
    processes = []
    for k, environment in enumerate(environments):
        own = folder / str(k)
        own.mkdir(parents=True)
        processes.append(warm_context().Process(target=_run_code, args=(str(own), environment, code)))
        processes[-1].start()
    done = []
    for k, process in enumerate(processes):
        process.join(most_seconds)
        process.kill()
        process.join()
        out, err = ((folder / str(k) / name).read_text() for name in ("out", "err"))
        done.append(CompletedProcess(code, process.exitcode, out, err))
    return done


def _run_module(
    folder: str, environment: dict[str, str], out: Connection, err: Connection, name: str, arguments: Sequence[str]
) -> None:
    for connection, stream in ((out, 1), (err, 2)):
        os.dup2(connection.fileno(), stream)
        connection.close()
    _become(folder, environment)
    sys.argv = [name, *arguments]
    run_and_end(runpy.run_module, (name, None, "__main__", True))


class WarmProcess:
    """A process that runs `python -m name arguments`, with that part of Popen's interface which tests use."""

    def __init__(self, folder: Path, environment: dict[str, str], name: str, *arguments: str) -> None:
        context = warm_context()
        (ours_out, out), (ours_err, err) = (context.Pipe(duplex=False) for _ in range(2))
        work = (str(folder), environment, out, err, name, arguments)
        self._process = context.Process(target=_run_module, args=work)
        self._process.start()
        out.close()
        err.close()
        self.stdout, self.stderr = (os.fdopen(os.dup(ours.fileno())) for ours in (ours_out, ours_err))
        ours_out.close()
        ours_err.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, timeout: float) -> int | None:
        """Return the exit code, None if it is still running."""
        self._process.join(timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Return what it has printed and not been read yet, when it and all that write there have ended."""
        texts: list[str] = ["", ""]

        def read(k: int, stream: Any) -> None:
            with stream:
                texts[k] = stream.read()

        readers = [
            threading.Thread(target=read, args=item, daemon=True) for item in enumerate((self.stdout, self.stderr))
        ]
        for reader in readers:
            reader.start()
        self._process.join(timeout)
        for reader in readers:
            reader.join(timeout)
        assert self.returncode is not None, "still running"
        return texts[0], texts[1]


THEN = "--then"  # between launchers that one process runs


def run_launcher(
    folder: Path,
    name: str,
    *arguments: str,
    imports: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
    timeout: float = 200,
) -> str:
    """Run `python -m name arguments`, a launcher whose ranks need not import torch, in a folder. Return what was printed.

    After THEN among the arguments, those of another launcher follow. imports: modules imported for all ranks.
    """
    ready = [word for module in imports for word in ("--import", module)]
    job = WarmProcess(folder, dict(environment), "forked_ranks", *ready, name, *arguments)
    output, errors = job.communicate(timeout)
    assert job.returncode == 0, errors
    return output
