"""The gradients' norm on a GPU: as exact as in float64, and without a copy in it."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_in_float64_take_no_copy(dtype: torch.dtype):
    shards = [torch.randn(size, device="cuda").mul_(1e-3).to(dtype) for size in (2**24 + 3, 5, 2**20)]
    wanted = [shard.cpu().double().square().sum().sqrt().item() for shard in shards]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    norms = torch._foreach_norm(shards, 2, dtype=torch.float64)
    assert [norm.item() for norm in norms] == pytest.approx(wanted, rel=1e-12)
    assert torch.cuda.max_memory_allocated() - before < 2**20
