"""Pipeline x data x tensor over NCCL gives the numbers of one GPU in plain PyTorch (DESIGN 5)."""

from __future__ import annotations

import pytest
import torch
from layouts3d import Layout, check, cover, train, train_alone
from ranks import RankPools


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "layout" in metafunc.fixturenames:
        count = min(4, torch.cuda.device_count())
        metafunc.parametrize("layout", cover(count) if count > 1 else [], ids=str)


def test_losses_norms_and_weights_equal_one_gpu(gpu_pool: RankPools, layout: Layout):
    (wanted,) = gpu_pool.run(1, train_alone, layout.dp, layout.tied, layout.clipping, layout.optimizer, "cuda")
    check(gpu_pool.run(layout.num_ranks, train, layout), wanted)
