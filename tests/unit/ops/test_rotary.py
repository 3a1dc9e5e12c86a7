"""Rotary positions beside what autograd makes of the same operators: no bit differs; and beside rotations in the plane."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from parallel3d.kernels.rotary import rotate

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
BATCH, SEQ, DIM = 2, 5, 6


def plain(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        c, s = cos[..., None, :], sin[..., None, :]
        return torch.cat([first * c - second * s, second * c + first * s], dim=-1)

    return turned(query), turned(key)


Rotation = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def operands(dtype: torch.dtype, device: str, angles: tuple[int, ...] = (SEQ, DIM // 2)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(BATCH, SEQ, 4, DIM, generator=generator).to(device, dtype).requires_grad_()
    key = torch.randn(BATCH, SEQ, 2, DIM, generator=generator).to(device, dtype).requires_grad_()
    theta = torch.randn(angles, generator=generator)
    return [query, key, theta.cos().to(device, dtype), theta.sin().to(device, dtype)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("angles", [(SEQ, DIM // 2), (BATCH, SEQ, DIM // 2)])
def test_values_and_gradients_are_bitwise_autograds(device: str, dtype: torch.dtype, angles: tuple[int, ...]) -> None:
    def run(rotation: Rotation) -> list[Tensor]:
        query, key, cos, sin = operands(dtype, device, angles)
        turned = rotation(query, key, cos, sin)
        given = [torch.linspace(-1, 1, y.numel(), device=device).to(dtype).view_as(y) for y in turned]
        return [*turned, *torch.autograd.grad(turned, (query, key), given)]

    assert all(torch.equal(a, b) for a, b in zip(run(rotate), run(plain), strict=True))


def test_pairs_turn_by_their_angles() -> None:
    query, key, cos, sin = operands(torch.float32, "cpu")
    turned, _ = rotate(query, key, cos, sin)
    first, second = query.chunk(2, dim=-1)
    wanted = torch.complex(first, second) * torch.complex(cos, sin)[:, None, :]
    assert torch.allclose(turned, torch.cat([wanted.real, wanted.imag], dim=-1), atol=1e-6)


@pytest.mark.parametrize("which", [0, 1])
def test_one_alone_may_want_a_gradient_or_be_used(which: int) -> None:
    given = operands(torch.float32, "cpu")
    (both,) = torch.autograd.grad(rotate(*given)[which].square().sum(), given[which])
    given[1 - which].requires_grad_(False)
    (alone,) = torch.autograd.grad(sum(y.square().sum() for y in rotate(*given)), given[which])
    (wanted,) = torch.autograd.grad(plain(*given)[which].square().sum(), given[which])
    assert torch.equal(both, wanted)
    assert torch.equal(alone, wanted)


def test_it_is_differentiable_twice() -> None:
    query, key, cos, sin = operands(torch.float64, "cpu")
    assert torch.autograd.gradgradcheck(lambda q, k: rotate(q, k, cos, sin), (query, key))


def test_compiled_it_breaks_no_graph() -> None:
    given = operands(torch.float32, "cpu")
    turned = torch.compile(rotate, backend="aot_eager", fullgraph=True)(*given)
    gradients = torch.autograd.grad([y.square().sum() for y in turned], given[:2])
    wanted = torch.autograd.grad([y.square().sum() for y in plain(*given)], given[:2])
    assert all(torch.allclose(a, b) for a, b in zip(gradients, wanted, strict=True))
