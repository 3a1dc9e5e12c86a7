"""On CUDA an optimizer by name uses torch's fused kernel where there is one, and is the same optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from parallel3d.optim import build_optimizer

# Whether torch has a fused kernel for CUDA; None where that depends on its version.
NAMES: dict[str, tuple[dict[str, Any], bool | None]] = {
    "Adam": ({"lr": 0.01, "adam_w_mode": False, "weight_decay": 0.1}, True),
    "AdamW": ({"lr": 0.01, "weight_decay": 0.1}, True),
    "SGD": ({"lr": 0.1, "momentum": 0.9}, True),
    "Adagrad": ({"lr": 0.1}, None),
    "RMSprop": ({"lr": 0.01}, False),
    "Lion": ({"lr": 0.01, "weight_decay": 0.1}, False),
}


def trained(name: str, params: dict[str, Any], device: str) -> tuple[torch.optim.Optimizer, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(37, 11, generator=draw).to(device))
    optimizer = build_optimizer(name, [parameter], params)
    for _ in range(4):
        parameter.grad = torch.randn(37, 11, generator=draw).to(device)
        optimizer.step()
    return optimizer, parameter.detach().cpu()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", NAMES)
def test_fused_kernels_are_used_on_cuda_and_change_nothing(name: str):
    params, fused = NAMES[name]
    on_gpu, weights = trained(name, params, "cuda")
    on_cpu, expected = trained(name, params, "cpu")
    assert fused in (None, bool(on_gpu.param_groups[0].get("fused")))
    assert not on_cpu.param_groups[0].get("fused")
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_user_can_turn_the_fused_kernel_off():
    optimizer, _ = trained("AdamW", {"fused": False}, "cuda")
    assert optimizer.param_groups[0]["fused"] is False


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_dampened_momentum_is_not_fused():
    """The fused kernel can't start it beside momentum that runs."""
    assert not trained("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}, "cuda")[0].param_groups[0]["fused"]
