"""Pytest plugin of tools/mutation.py: notes which test reaches which mutant, in the test's process and all that it starts."""

from __future__ import annotations

import mmap
import multiprocessing
import os
from contextlib import suppress
from pathlib import Path

import pytest

HITS = os.environ.get("MUTATION_HITS")
_SIZE = 4096
_seen: set[tuple[bytes, int]] = set()
_current: list[mmap.mmap] = []


def _shared() -> mmap.mmap | None:
    """Return the memory that holds the current test's phase and name, shared by all processes of one pytest worker.

    Its file has the worker's process id. Ranks come from a fork server that all workers share: their parent is their worker.
    """
    if not _current:
        parent = multiprocessing.parent_process()
        ids = [str(parent.pid) if parent else "none", os.environ.get("MUTATION_WORKER", "none")]
        found = [path for path in (Path(str(HITS)) / f"{name}.current" for name in ids) if path.exists()]
        if not found:
            return None
        os.environ["MUTATION_WORKER"] = found[0].stem
        with found[0].open("r+b") as file:
            _current.append(mmap.mmap(file.fileno(), _SIZE))
    return _current[0]


def hit(mutants: list[int]) -> None:
    """Note that the current test reaches these mutants; in a compiled function, when it is traced."""
    if not HITS or (shared := _shared()) is None:
        return
    now = bytes(shared[:_SIZE]).rstrip(b"\0")
    for mutant in mutants:
        if now and (now, mutant) not in _seen:
            _seen.add((now, mutant))
            # Some tests leave no room for files.
            with suppress(OSError), (Path(HITS) / f"{os.getpid()}.hits").open("a") as file:
                file.write(f"{mutant}\t{now.decode()}\n")


hit._dynamo_marked_constant = True  # type: ignore[attr-defined] # torch.compile calls it as it traces, without a graph break


def _begin(phase: str, item: pytest.Item) -> None:
    if not HITS:
        return
    if _shared() is None:
        (Path(HITS) / f"{os.getpid()}.current").write_bytes(bytes(_SIZE))
        os.environ["MUTATION_WORKER"] = str(os.getpid())
    shared = _shared()
    assert shared is not None
    shared[:_SIZE] = f"{phase}\t{item.nodeid}".encode().ljust(_SIZE, b"\0")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Name the test whose fixtures are set up."""
    _begin("setup", item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Name the test that runs."""
    _begin("call", item)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write down the tests that pass and their seconds, in the process that reports."""
    if HITS and report.when == "call" and report.passed and not os.environ.get("PYTEST_XDIST_WORKER"):
        with (Path(HITS) / "main.passed").open("a") as file:
            file.write(f"{report.nodeid}\t{report.duration:.3f}\n")
