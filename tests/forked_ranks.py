"""A launcher whose ranks are forks of it, so that they need not import torch: `python -m forked_ranks parallel3d.launcher ...`.

It starts them by subprocess.Popen as ever, but each goes on in this process's copy instead of executing Python. Before the
launcher's name, `--import MODULE` says what else is imported here for all ranks. Modules of Hugging Face, which look for
DeepSpeed when they are imported, are imported anew where there is a package of that name. After `--then`, the name
and arguments of another launcher follow, which runs if the one before it has succeeded.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch._dynamo  # which optimizers import
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

import parallel3d.initialization  # noqa: F401 (the ranks' imports)


def fork_rank(args: Sequence[str], env: dict[str, str], **options: Any) -> subprocess.Popen[bytes]:
    """Popen of `python -u? program arguments`."""
    rank = args[args[1] == "-u" :]
    # Python ignores SIGPIPE and SIGXFSZ, which Popen restores for other programs.
    return subprocess.Popen(args, env=env, preexec_fn=lambda: become(rank, env), restore_signals=False, **options)


def become(args: Sequence[str], environment: dict[str, str]) -> None:
    """Go on as a new Python that runs the program, up to its end."""
    gc.enable()
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    atexit._clear()  # what the launcher is to do at its end
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ |= environment
    torch.set_num_threads(1)
    if args[1] == "-m":
        sys.argv = list(args[2:])
        code = run(runpy.run_module, sys.argv[0], None, "__main__", True)
    else:
        sys.argv = list(args[1:])
        sys.path.insert(0, os.path.dirname(sys.argv[0]))
        code = run(runpy.run_path, sys.argv[0], None, "__main__")
    for end in (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):
        end()
    if code == -signal.SIGINT:  # as python ends by it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def run(program: Any, *args: Any) -> int:
    """Return the program's exit code."""
    try:
        program(*args)
    except SystemExit as exit_:
        if isinstance(exit_.code, str):
            print(exit_.code, file=sys.stderr)
            return 1
        return exit_.code or 0
    except BaseException as error:
        sys.last_value = error  # as python does
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def forget(packages: Sequence[str]) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] in packages:
            del sys.modules[name]


if __name__ == "__main__":
    subprocess_handler.Popen = fork_rank
    # For each event, which goes nowhere, torch walks the stack and all modules: seconds of a processor where there are many.
    dynamic_rendezvous.get_method_name = str
    del sys.argv[0]
    if importlib.util.find_spec("deepspeed") is not None:
        forget(["accelerate", "transformers", "peft", "warm_transformers"])
    while sys.argv[0] == "--import":
        importlib.import_module(sys.argv[1])
        del sys.argv[:2]
    gc.freeze()  # what was imported stays: no collection of a rank's need visit it
    while "--then" in sys.argv:
        end = sys.argv.index("--then")
        first = os.fork()
        if not first:
            del sys.argv[end:]
        elif status := os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]):
            sys.exit(status)
        else:
            del sys.argv[: end + 1]
    runpy.run_module(sys.argv[0], None, "__main__", True)
