"""Options of the test run, and the pool of worker processes that distributed tests share."""

from __future__ import annotations

import fcntl
import gc
import os
import pickle
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from allpairspy import AllPairs
from fork_server import forked_python, join_fork_server, share_fork_server
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
# Before torch is imported. The models are small: a second thread would only spin on the core of another test's process.
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}  # of all that import transformers
# Inductor's kernels aren't tested here: without vector instructions they compile in half the time, and in this process.
os.environ |= {"TORCHINDUCTOR_VEC_ISA_OK": "0", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
# For throughput: a woken process preempts no other. A rank that is preempted while it holds the lock of a gloo connection
# lets gloo's thread of that rank poll the connection in a loop until it runs again.
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
# For tests/gpu, and set here as the fork server's processes have the environment of its start. cuBLAS reads the first when a
# process first multiplies, for deterministic algorithms. Without the second, the compiler may choose other kernels by their
# times in a run that is to have the same bits.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
gc.disable()  # until the tests are collected: what is imported, a million objects, stays

if TYPE_CHECKING:
    from ranks import RankPool

# How long an example takes says more of the machine than of what is tested.
settings.register_profile("unhurried", settings(), deadline=None, max_examples=50)  # others in each run
settings.register_profile("full", settings.get_profile("unhurried"), max_examples=100)
settings.register_profile("long", settings.get_profile("unhurried"), max_examples=5000)  # of make fuzz
settings.load_profile("unhurried")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run whole products where the default is an all-pairs cover")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Of xdist: its workers share one fork server, and are its forks. Cluster tests need none, nor torch."""
    if not any("clustered" in argument for argument in config.args):
        for spec in specs:
            spec.python = forked_python()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    if node.gateway.spec.python:
        node.workerinput["fork_server"] = share_fork_server()


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("full") and not config.getoption("--hypothesis-profile"):
        settings.load_profile("full")
    if "fork_server" in getattr(config, "workerinput", {}):
        join_fork_server(config.workerinput["fork_server"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep an all-pairs cover of each product of three parametrize marks or more, unless --full asks for all.

    Of a product of two that is marked so, keep every n-th case, where each value meets some of the others. What is marked
    full_only runs with --full alone.
    """
    products: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if len(list(item.iter_markers("parametrize"))) > 2:
            products[item.nodeid.partition("[")[0]].append(item)
    if config.getoption("full"):
        return
    left_out = others_of_n(items) | {item for item in items if item.get_closest_marker("full_only")}
    for cases in products.values():
        rows = [tuple(map(repr, case.callspec.params.values())) for case in cases]
        known = {row[:length] for row in rows for length in range(1, len(rows[0]) + 1)}
        axes = [list(dict.fromkeys(column)) for column in zip(*rows, strict=True)]
        cover = {tuple(row) for row in AllPairs(axes, filter_func=lambda row, known=known: tuple(row) in known)}
        left_out |= {case for case, row in zip(cases, rows, strict=True) if row not in cover}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Let the garbage collector visit nothing that was imported or collected. Of xdist's workers and of what starts them.

    It runs more seldom than by default, where a plan's many small objects had it take a tenth of the time.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def others_of_n(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the marked cases in which n doesn't divide the sum of the places of the values in their parametrize marks."""
    tests, others = defaultdict(list), set()
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        for case in cases:
            one_in = case.get_closest_marker("one_in")
            if one_in is None:
                break
            places = 0
            for mark in case.iter_markers("parametrize"):
                names = [mark.args[0]] if isinstance(mark.args[0], str) else mark.args[0]
                values = [repr([each.callspec.params[name] for name in names]) for each in cases]
                places += list(dict.fromkeys(values)).index(values[cases.index(case)])
            if places % one_in.args[0]:
                others.add(case)
    return others


@pytest.fixture(scope="session")
def full(pytestconfig: pytest.Config) -> bool:
    return bool(pytestconfig.getoption("--full"))


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], Any]], tuple[Path, Any]]:
    """`made_once(name, make)` returns a folder and the result of make(folder), which one worker calls for all of them.

    The tests of a module are spread over workers, and each would set up the module's fixtures for itself.
    """

    def once(name: str, make: Callable[[Path], Any]) -> tuple[Path, Any]:
        own = tmp_path_factory.getbasetemp()
        folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name
        folder.mkdir(exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            result = folder / "made.pickle"
            if not result.exists():
                result.write_bytes(pickle.dumps(make(folder)))
            return folder, pickle.loads(result.read_bytes())

    return once


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    from ranks import RankPool  # and torch, which not all test processes need

    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def run_ranks(rank_pool: RankPool):
    return rank_pool.run
