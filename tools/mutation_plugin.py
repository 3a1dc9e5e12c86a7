"""Pytest plugin of tools/mutation.py: notes which test reaches which mutant, in the test's process and all that it starts."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

HITS = os.environ.get("MUTATION_HITS")
_SIZE = 4096
_seen: set[tuple[bytes, int]] = set()
_current: dict[str, mmap.mmap] = {}


def _shared() -> mmap.mmap:
    """Return the memory that holds the current test's phase and name, shared by all processes of one pytest worker."""
    name = os.environ.setdefault("MUTATION_WORKER", os.environ.get("PYTEST_XDIST_WORKER", "main"))
    if name not in _current:
        path = Path(str(HITS)) / f"{name}.current"
        if not path.exists():
            path.write_bytes(bytes(_SIZE))
        with path.open("r+b") as file:
            _current[name] = mmap.mmap(file.fileno(), _SIZE)
    return _current[name]


def hit(mutants: list[int]) -> None:
    """Note that the current test reaches these mutants."""
    if not HITS:
        return
    now = bytes(_shared()[:_SIZE]).rstrip(b"\0")
    for mutant in mutants:
        if now and (now, mutant) not in _seen:
            _seen.add((now, mutant))
            with (Path(HITS) / f"{os.getpid()}.hits").open("a") as file:
                file.write(f"{mutant}\t{now.decode()}\n")


def _begin(phase: str, item: pytest.Item) -> None:
    if HITS:
        _shared()[:_SIZE] = f"{phase}\t{item.nodeid}".encode().ljust(_SIZE, b"\0")


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
