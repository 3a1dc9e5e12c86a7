"""A loss scale beyond fp16's numbers is an overflow, on CUDA as on the CPU, and no error."""

from __future__ import annotations

import pytest
import torch

from parallel3d.pipe.executor import loss_gradient


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gradient_beyond_half_is_infinite():
    loss = torch.zeros((), dtype=torch.float16, device="cuda")
    assert loss_gradient(loss, 2.0**22).item() == float("inf")
    assert loss_gradient(loss, 2.0**15).item() == 2.0**15
    assert loss_gradient(loss.double(), 1 / 3).item() == 1 / 3
