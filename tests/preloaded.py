"""What the server of fork_server.py imports for all of its processes."""

import ctypes
import gc
import importlib
import os
import shlex
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from threading import RLock

import layouts
import layouts3d
import torch

MADV_COLLAPSE = 25  # of Linux 6.1 and later


def import_tests(arguments: Sequence[str]) -> None:
    """Import the modules that pytest collects for these arguments. Each worker of xdist then finds them imported.

    What can't be imported is left to the workers, which say so.
    """
    import pytest

    with redirect_stdout(StringIO()):
        pytest.main([*arguments, "--collect-only", "-p", "no:cacheprovider"])


def use_huge_pages() -> None:
    """Move this process's memory into pages of 2 MiB: a fork has fewer pages to copy the table of, and ends sooner."""
    advise = ctypes.CDLL(None).madvise
    for mapping in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, *_, inode = mapping.split()[:5]
        if rights.startswith("rw") and inode == "0":
            start, end = (int(address, 16) for address in addresses.split("-"))
            advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)  # no matter if it can't


names = ["torch._dynamo", "parallel3d.parity.check", "pytest", "ranks", "planned_memory"]
if not torch.backends.cuda.is_built():  # these look for CUDA, which no fork can use after that
    names += ["torch._inductor.compile_fx", "warm_transformers", "sklearn.datasets"]
for name in names:
    with suppress(ImportError):  # not all are always installed
        importlib.import_module(name)
with suppress(ImportError):  # a killed rank would leave behind the semaphore of tqdm's own lock
    importlib.import_module("tqdm").tqdm.set_lock(RLock())
layouts.all_pairs()  # which are kept, and which each of xdist's workers asks for
layouts3d.cover(max_ranks=8)
tests = os.environ.pop("PRELOADED_TESTS", None)
if tests is not None:  # for the hundreds of forks of a run with xdist
    if not torch.backends.cuda.is_built():
        import_tests(shlex.split(tests))
    gc.freeze()
    use_huge_pages()
