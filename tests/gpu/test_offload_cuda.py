"""Offload on a GPU: copies on streams of their own change no bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from offload_runs import CASES, WORLDS, Case, compare
from ranks import RankPool, RankPools

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def one_gpu() -> Iterator[RankPool]:
    pool = RankPool("cuda")
    yield pool
    pool.close()


def compare_behind(case: Case, directory: Path) -> list[str]:
    """Compare while the device is far behind the host: a copy that doesn't wait for what it needs comes too early."""
    torch.use_deterministic_algorithms(True)
    for _ in range(3):
        torch.cuda._sleep(300_000_000)
        problems = compare(case, directory, lambda: torch.cuda._sleep(300_000_000))
        if problems:
            return problems
    return []


@pytest.mark.parametrize("name", [name for name, world in WORLDS.items() if world == 1])
def test_the_numbers_are_those_without_offload(one_gpu: RankPool, name: str, tmp_path: Path):
    [problems] = one_gpu.run(1, compare_behind, CASES[name], tmp_path)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", ["dp2-fp16", "dp2-per-micro-batch", "pp2-zero0"])
def test_the_numbers_of_two_gpus_are_those_without_offload(gpu_pool: RankPools, name: str, tmp_path: Path):
    for problems in gpu_pool.run(2, compare_behind, CASES[name], tmp_path):
        assert not problems, "\n".join(problems)
