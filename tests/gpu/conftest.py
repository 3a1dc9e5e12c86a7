"""Tests that need CUDA devices; without them they are skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks import RankPools

from parallel3d.kernels.cuda_library import build, find_library, find_nvcc

os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")  # as init_distributed sets it


@pytest.fixture(scope="session")
def num_gpus() -> int:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs at least 2 CUDA devices")
    return count


@pytest.fixture(scope="session")
def gpu_pool(num_gpus: int) -> Iterator[RankPools]:
    pools = RankPools("cuda")
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def compiled_kernels() -> Path:
    found = find_library()
    if found is None and find_nvcc() is None:
        pytest.skip("the kernels are not compiled, and there is no nvcc: run p3d build-kernels where there is one")
    return found or build()
