"""Tests that need CUDA devices; without them they are skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from ranks import RankPool

# For deterministic algorithms; cuBLAS reads it when a worker first multiplies.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(scope="session")
def num_gpus() -> int:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs at least 2 CUDA devices")
    return count


@pytest.fixture(scope="session")
def gpu_pool(num_gpus: int) -> Iterator[RankPool]:
    pool = RankPool("cuda")
    yield pool
    pool.close()
