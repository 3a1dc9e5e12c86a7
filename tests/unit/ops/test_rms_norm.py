"""rms_norm beside plain PyTorch in float64: its value, what it hands on, and the gradient of both in one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from parallel3d.kernels.rms_norm import rms_norm

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def distance(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 5e-3), (torch.float16, 1e-3)],
)
@pytest.mark.parametrize("shape", [(3, 7), (2, 5, 1237), (1025, 4096), (1, 3)])
@pytest.mark.parametrize("used", ["both", "norm", "input"])
def test_value_and_gradients(
    device: str, dtype: torch.dtype, tolerance: float, shape: tuple[int, ...], used: str
) -> None:
    torch.manual_seed(len(shape))
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    weight = (1 + 0.1 * torch.randn(shape[-1], device=device)).to(dtype).requires_grad_()
    given = [torch.randn(shape, device=device, dtype=dtype) for _ in range(2)]
    wide, wide_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    normed, kept = rms_norm(x, weight, 1e-5)
    right = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * wide_weight
    assert distance(normed, right) <= tolerance
    assert torch.equal(kept, x)
    which = {"both": (0, 1), "norm": (0,), "input": (1,)}[used]
    torch.autograd.backward([(normed, kept)[k] for k in which], [given[k] for k in which])
    torch.autograd.backward([(right, wide)[k] for k in which], [given[k].double() for k in which])
    assert distance(x.grad, wide.grad) <= tolerance
    if used != "input":
        assert distance(weight.grad, wide_weight.grad) <= tolerance


@pytest.mark.parametrize("device", DEVICES)
def test_it_is_torchs_norm_for_a_strided_input_and_a_frozen_weight(device: str) -> None:
    norm = nn.RMSNorm(6, eps=1e-6, device=device).requires_grad_(False)
    x = torch.randn(6, 4, device=device).t().requires_grad_()
    normed, _ = rms_norm(x, norm.weight, 1e-6)
    (dx,) = torch.autograd.grad(normed, x, torch.ones_like(normed))
    (right,) = torch.autograd.grad(norm(x), x, torch.ones_like(normed))
    assert torch.allclose(normed, norm(x), atol=1e-6)
    assert torch.allclose(dx, right, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_second_derivative_is_refused_by_the_kernel() -> None:
    x, weight = torch.randn(3, 8, device="cuda", requires_grad=True), torch.ones(8, device="cuda")
    normed, _ = rms_norm(x, weight, 1e-5)
    (dx,) = torch.autograd.grad(normed.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_fake_tensors_pass_through(device: str) -> None:
    """Partition method "flops" traces with fake tensors, which have no memory for a kernel."""
    with FakeTensorMode():
        x, weight = torch.randn(3, 8, device=device, requires_grad=True), torch.ones(8, device=device)
        normed, _ = rms_norm(x, weight, 1e-5)
        (dx,) = torch.autograd.grad(normed.sum(), x)
    assert (normed.shape, dx.shape) == (x.shape, x.shape)
