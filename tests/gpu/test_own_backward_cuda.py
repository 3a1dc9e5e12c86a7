"""A backward that the script runs itself, whose hooks and last callback run on autograd's own threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import parallel3d

WIDTH, ROWS, ACCUMULATION, STEPS = 256, 16, 3, 2
BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "loss_scale": 64}}


def norms(zero: dict[str, Any], half: dict[str, Any], own: bool) -> list[float]:
    """Return the gradient norms of the steps. own: by loss.backward(); else by plain PyTorch in fp32."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))).to(device)
    parameters = list(model.parameters())
    batches = torch.randn(STEPS, ACCUMULATION, ROWS, WIDTH, device=device)
    if not own:
        optimizer, found = torch.optim.SGD(parameters, lr=0.1), []
        for step in batches:
            optimizer.zero_grad()
            (sum(model(x).float().square().mean() for x in step) / ACCUMULATION).backward()
            found.append(torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm().item())
            optimizer.step()
        return found
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": ACCUMULATION,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"reduce_bucket_size": WIDTH * WIDTH, **zero},
        "steps_per_print": None,
        **half,
    }
    engine, *_ = parallel3d.initialize(model=model, config=config)
    found = []
    for step in batches:
        for x in step:
            engine.scale(engine(x).float().square().mean()).backward()
            engine.step()
        found.append(engine.get_global_grad_norm().item())
    return found


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("half", [{}, BF16, FP16], ids=str)
@pytest.mark.parametrize("zero", [{"stage": 0}, {"stage": 2, "reduce_per_micro_batch": True}, {"stage": 3}], ids=str)
def test_the_scripts_own_backward_equals_plain_pytorch(zero: dict[str, Any], half: dict[str, Any]):
    assert norms(zero, half, own=True) == pytest.approx(norms(zero, half, own=False), rel=2e-2 if half else 1e-4)
