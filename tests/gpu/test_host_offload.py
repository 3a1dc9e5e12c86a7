"""Inputs of recomputed regions that wait in host memory: same gradients, lower peak, dropout masks kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from parallel3d.autograd.recomputation import Checkpointer
from parallel3d.config import ActivationCheckpointingConfig

ROWS, WIDE, LAYERS = 1 << 14, 1024, 12

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def gradients(cpu_checkpointing: bool) -> tuple[list[Tensor], int]:
    """Return the gradients of a chain of blocks on the current GPU, and its peak memory in bytes."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        blocks = [nn.Sequential(nn.Linear(WIDE, WIDE), nn.Dropout(0.3), nn.GELU()) for _ in range(LAYERS)]
        x = torch.randn(ROWS, WIDE)
    run = Checkpointer(ActivationCheckpointingConfig(cpu_checkpointing=cpu_checkpointing))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for block in blocks:
        x = run(block, x)
    x.square().mean().backward()
    torch.cuda.synchronize()
    return [p.grad for b in blocks for p in b.parameters()], torch.cuda.max_memory_allocated() - before


def test_the_peak_falls_and_the_gradients_stay():
    wanted, held = gradients(False)
    got, offloaded = gradients(True)
    assert all(torch.equal(g, w) for g, w in zip(got, wanted, strict=True))
    # All but what a region and its neighbours work on has left.
    assert offloaded < held - (LAYERS - 7) * ROWS * WIDE * 4


def test_masks_are_kept_where_no_argument_is_on_the_gpu():
    weight = torch.ones(1000, device="cuda", requires_grad=True)
    masks = []

    def region(count: int) -> Tensor:
        y = nn.functional.dropout(weight * count)
        masks.append(y.detach() > 0)
        return y.tanh()

    Checkpointer()(region, 3).sum().backward()
    assert len(masks) == 2
    assert torch.equal(*masks)
