"""Updates of weights by kernels, without a GPU: the references, and how shards are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_stand_ins import Part, adamw_ref, reduce_scatter_ref
from torch import nn

from parallel3d.kernels.fused_adamw import MAX_GROUPS, check_adam, settings_array
from parallel3d.kernels.reduce_scatter import HALF_BYTES, MAX_BLOCKS, ReduceScatter
from parallel3d.kernels.workspace import MOST_BLOCKS, PAD_BYTES, WORLD_SIZES

THREADS = 512
WIRES = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.mark.parametrize("wire", list(WIRES), ids=str)
def test_the_reference_rounds_once_and_sums_in_fp32(wire: torch.dtype) -> None:
    torch.manual_seed(3)
    parts = [torch.randn(7, 5) for _ in range(8)]
    total = reduce_scatter_ref(parts, wire)
    exact = torch.stack([part.double() for part in parts]).sum(0)
    scale = torch.stack([part.double().abs() for part in parts]).sum(0)
    assert total.dtype == torch.float32
    assert ((total.double() - exact).abs() <= (WIRES[wire] + 8 * 2**-24) * scale).all()
    # What the dtype holds is summed as in fp32, where the dtype itself would lose the small ones.
    held = [torch.tensor([value]) for value in (1024.0, 1.0, 1.0, 1.0)]
    assert reduce_scatter_ref(held, wire).item() == 1027


@given(
    st.integers(1, HALF_BYTES), st.sampled_from([2, 4]), st.sampled_from(WORLD_SIZES), st.sampled_from([HALF_BYTES, 0])
)
def test_calls_cover_a_shard_within_the_staging_buffer(size: int, width: int, world: int, extra: int) -> None:
    size += extra
    cut = ReduceScatter.calls(size, width, world, THREADS)
    assert [call.start for call in cut] == [sum(p.size for p in cut[:k]) for k in range(len(cut))]
    assert sum(call.size for call in cut) == size
    for call in cut:
        # What every rank gets from each, in whole vectors.
        assert world * -(-call.size * width // 16) * 16 <= HALF_BYTES
        assert call.start * width % 16 == 0, "as aligned as the shard"
        assert 1 <= call.blocks <= MAX_BLOCKS <= MOST_BLOCKS
    assert ReduceScatter.staging_bytes() == 2 * HALF_BYTES + PAD_BYTES


def made_part(numel: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Part:
    master, average = (torch.randn(numel, generator=generator) for _ in range(2))
    gradient, square_average = torch.randn(numel, generator=generator), torch.rand(numel, generator=generator)
    return Part(master, gradient.to(dtype), average, square_average, torch.tensor(7.0), 0, 0)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("divisor", [None, 3.0])
def test_the_reference_is_torchs_step(decoupled: bool, divisor: float | None) -> None:
    """In float64, of which the reference's fp32 is a few roundings away."""
    part = made_part(100, torch.Generator().manual_seed(1))
    plain = nn.Parameter(part.master.double())
    cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = cls([plain], lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    moments = {"exp_avg": part.average.double(), "exp_avg_sq": part.square_average.double()}
    optimizer.state[plain] = {"step": torch.tensor(6.0), **moments}
    plain.grad = part.gradient.double() / (divisor or 1.0)
    optimizer.step()
    weights = adamw_ref(
        part, optimizer.param_groups[0], None if divisor is None else torch.tensor(divisor).double(), torch.bfloat16
    )
    assert (part.master.double() - plain).abs().max() < 1e-6
    assert (part.average.double() - moments["exp_avg"]).abs().max() < 1e-6
    assert (part.square_average.double() - moments["exp_avg_sq"]).abs().max() < 1e-6
    assert torch.equal(weights, part.master.bfloat16())


def test_settings_are_handed_over_in_double_precision() -> None:
    settings = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], 1e-4, (0.9, 0.999), 1e-8, 0.1).param_groups[0]
    assert list(settings_array([settings] * 2)) == [1e-4, 0.9, 0.999, 1e-8, 0.1, 1.0] * 2


def made(cls: Any = torch.optim.AdamW, **settings: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = cls([nn.Parameter(torch.zeros(2))], **settings)
    return optimizer


def watched() -> torch.optim.Optimizer:
    optimizer = made(fused=True)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


class Mine(torch.optim.AdamW):
    pass


@pytest.mark.parametrize("optimizer", [made(fused=True), made(torch.optim.Adam, fused=True, weight_decay=0.1)])
def test_adam_and_adamw_can_step_by_the_kernel(optimizer: torch.optim.Optimizer) -> None:
    assert check_adam(optimizer) is None


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (made(torch.optim.SGD, fused=True), "the optimizer is SGD"),
        (made(Mine, fused=True), "the optimizer is Mine"),
        (made(), "without fused=True"),
        (made(fused=True, amsgrad=True), "has amsgrad=True"),
        (made(fused=True, maximize=True), "has maximize=True"),
        (made(fused=True, capturable=True, lr=torch.tensor(0.1)), "has capturable=True"),
        (watched(), "has step hooks"),
        (
            torch.optim.AdamW([{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(MAX_GROUPS + 1)], fused=True),
            f"has {MAX_GROUPS + 1} parameter groups",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_optimizers_are_left_to_torch(optimizer: torch.optim.Optimizer, why: str) -> None:
    assert why in str(check_adam(optimizer))
