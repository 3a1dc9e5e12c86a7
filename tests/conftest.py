"""Options of the test run, and the pool of worker processes that distributed tests share."""

from __future__ import annotations

import gc
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from allpairspy import AllPairs
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
# Before torch is imported. The models are small: a second thread would only spin on the core of another test's process.
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
gc.disable()  # until the tests are collected: what is imported, a million objects, stays

from ranks import RankPool  # noqa: E402

# How long an example takes says more of the machine than of what is tested.
settings.register_profile("unhurried", settings(), deadline=None)
settings.register_profile("long", settings.get_profile("unhurried"), max_examples=5000)  # of make fuzz
settings.load_profile("unhurried")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run whole products where the default is an all-pairs cover")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep an all-pairs cover of each product of three parametrize marks or more, unless --full asks for all.

    Of a product of two that is marked so, keep every second case, where each value meets some of the others.
    """
    products: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if len(list(item.iter_markers("parametrize"))) > 2 and not config.getoption("full"):
            products[item.nodeid.partition("[")[0]].append(item)
    full = config.getoption("full")
    left_out = {item for item in items if not full and item.get_closest_marker("every_second") and is_odd(item)}
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
    """Let the garbage collector visit nothing that was imported or collected. Of xdist's workers and of what starts them."""
    gc.freeze()
    gc.enable()


def is_odd(item: pytest.Item) -> bool:
    """Whether the places of its values in their parametrize marks sum to an odd number."""
    firsts = [
        mark.args[0] if isinstance(mark.args[0], str) else mark.args[0][0] for mark in item.iter_markers("parametrize")
    ]
    return sum(item.callspec.indices[name] for name in firsts) % 2 == 1


@pytest.fixture(scope="session")
def full(pytestconfig: pytest.Config) -> bool:
    return bool(pytestconfig.getoption("--full"))


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def run_ranks(rank_pool: RankPool):
    return rank_pool.run
