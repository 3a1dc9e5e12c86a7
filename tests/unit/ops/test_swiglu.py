"""swiglu beside plain PyTorch in float64, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, library
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from parallel3d.autograd.selective import recomputed_in_graph
from parallel3d.engine.compile import torch_options
from parallel3d.kernels.swiglu import swiglu

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def plain(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def distance(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-3), (torch.float16, 5e-4)])
@pytest.mark.parametrize("shape", [(3, 14), (2, 5, 2 * 1237), (7, 1, 2 * 1024), (2,)])
def test_value_and_gradient(device: str, dtype: torch.dtype, tolerance: float, shape: tuple[int, ...]) -> None:
    torch.manual_seed(sum(shape))
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    given = torch.randn(*shape[:-1], shape[-1] // 2, device=device, dtype=dtype)
    y = swiglu(x)
    (dx,) = torch.autograd.grad(y, x, given)
    wide = x.detach().double().requires_grad_()
    right = plain(wide)
    (right_dx,) = torch.autograd.grad(right, wide, given.double())
    assert (y.dtype, dx.dtype, y.shape) == (dtype, dtype, right.shape)
    assert distance(y, right) <= tolerance
    assert distance(dx, right_dx) <= tolerance


@pytest.mark.parametrize("device", DEVICES)
def test_strided_and_empty_inputs(device: str) -> None:
    x = torch.randn(6, 4, device=device).t().requires_grad_()
    given = torch.randn(3, 4, device=device).t()
    (dx,) = torch.autograd.grad(swiglu(x), x, given)
    (right,) = torch.autograd.grad(plain(x), x, given)
    assert torch.allclose(dx, right, atol=1e-6)
    assert swiglu(torch.empty(0, 8, device=device)).shape == (0, 4)


def test_the_operator_keeps_torchs_rules() -> None:
    x = torch.randn(3, 14, dtype=torch.float64)
    library.opcheck(torch.ops.parallel3d.swiglu.default, (x,))
    for backward in (torch.ops.parallel3d.swiglu_backward, torch.ops.parallel3d.swiglu_backward_and_result):
        library.opcheck(backward.default, (x[:, :7].contiguous(), x))
    assert torch.autograd.gradcheck(swiglu, (x.requires_grad_(),))


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_watched_it_is_one_operator_each_way_and_the_numbers_are_those_of_unwatched_calls() -> None:
    torch.manual_seed(0)
    x, given = torch.randn(5, 14, dtype=torch.bfloat16, requires_grad=True), torch.randn(5, 7, dtype=torch.bfloat16)
    with Operators() as seen:
        y = swiglu(x)
        (dx,) = torch.autograd.grad(y, x, given)
    assert [name for name in seen.names if "parallel3d" in name] == [
        "parallel3d.swiglu.default",
        "parallel3d.swiglu_backward.default",
    ]
    assert not [name for name in seen.names if "silu" in name or "sigmoid" in name]
    unwatched = swiglu(x)
    assert torch.equal(unwatched, y)
    assert torch.equal(torch.autograd.grad(unwatched, x, given)[0], dx)


def test_a_call_takes_no_operator_of_torchs_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("its wrappers take longer than the kernels")

    x = torch.randn(3, 14, requires_grad=True)
    monkeypatch.setattr(torch._ops.OpOverloadPacket, "__call__", refuse)
    monkeypatch.setattr(torch._ops.OpOverload, "__call__", refuse)
    (dx,) = torch.autograd.grad(swiglu(x).sum(), x)
    (right,) = torch.autograd.grad(plain(x).sum(), x)
    assert torch.allclose(dx, right, atol=1e-6)


def test_compiled_it_is_one_node_and_right() -> None:
    x = torch.randn(3, 14, requires_grad=True)
    y = torch.compile(lambda z: swiglu(z) + 1, backend="aot_eager", fullgraph=True)(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    (right,) = torch.autograd.grad(plain(x).sum(), x)
    assert torch.allclose(y, plain(x) + 1)
    assert torch.allclose(dx, right, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("after", "is_joined"),
    [(torch.Tensor.contiguous, True), (lambda y: y @ y.T @ y, False)],  # whose gradient is computed from the result
    ids=["product", "cube"],
)
def test_a_compiled_backward_recomputes_it_in_the_kernel_of_its_gradient(
    device: str, after: Callable[[Tensor], Tensor], is_joined: bool
) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    x, w, given = (torch.randn(*shape, device=device) for shape in ((3, 14), (7, 5), (3, 5)))
    leaves = x.requires_grad_(), w.requires_grad_()

    def project(x: Tensor, w: Tensor) -> Tensor:
        return after(swiglu(x)) @ w

    region = recomputed_in_graph(project, "cheap")
    compiled = torch.compile(region, fullgraph=True, **torch_options({"backend": "inductor"}))
    torch.autograd.grad(compiled(*leaves), leaves, given)
    y = compiled(*leaves)
    with profile(activities=[ProfilerActivity.CPU]) as backward:
        gradients = torch.autograd.grad(y, leaves, given)
    names = {event.key for event in backward.key_averages() if event.key.startswith("parallel3d::")}
    apart, joined = {"parallel3d::swiglu", "parallel3d::swiglu_backward"}, {"parallel3d::swiglu_backward_and_result"}
    assert names == (joined if is_joined else apart)
    for got, wanted in zip(gradients, torch.autograd.grad(project(*leaves), leaves, given), strict=True):
        torch.testing.assert_close(got, wanted)
