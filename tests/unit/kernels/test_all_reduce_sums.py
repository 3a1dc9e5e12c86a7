"""The all-reduce's reference, its sums in layers and its cutting into calls, without a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_stand_ins import GatheredSums, all_reduce_ref
from torch import Tensor

from parallel3d.comm.collectives import Group, Work
from parallel3d.comm.differentiable import reduce_from_region, reduce_from_region_
from parallel3d.comm.environment import get_rank
from parallel3d.kernels.all_reduce import (
    HALF_BYTES,
    MAX_BLOCKS,
    AllReduce,
)
from parallel3d.kernels.workspace import MOST_BLOCKS, PAD_BYTES, WORLD_SIZES

THREADS = 512
KIB = 1024


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)]
)
def test_the_reference_sums_in_fp32_in_rank_order(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(3)
    parts = [torch.randn(7, 5).to(dtype) for _ in range(8)]
    total = all_reduce_ref(parts)
    exact = torch.stack([part.double() for part in parts]).sum(0)
    assert total.dtype == dtype
    scale = torch.stack([part.double().abs() for part in parts]).sum(0)
    assert ((total.double() - exact).abs() <= tolerance * scale).all()
    # In bf16 each small part would be lost beside the large one; fp32 keeps all of them.
    small = [torch.tensor([value]).to(dtype) for value in (256.0, 1.0, 1.0, 0.0)]
    assert all_reduce_ref(small).item() == 258
    lost = [torch.tensor([value]) for value in (2.0**24, 1.0, 1.0)]
    assert (all_reduce_ref(lost).item(), all_reduce_ref(lost[::-1]).item()) == (2.0**24, 2.0**24 + 2)


class StandIn(GatheredSums):
    def takes(self, x: Tensor) -> bool:
        return True

    def start(self, x: Tensor) -> Work:
        raise AssertionError("nothing runs at the same time")


def on_ranks() -> tuple[list[float], bool, bool, list[float]]:
    world = Group(tuple(range(torch.distributed.get_world_size())), torch.distributed.group.WORLD)
    world.use_all_reduce(StandIn(world))
    x = torch.tensor([2.0**24, 1.0, -1.0])[torch.arange(3).roll(get_rank())].repeat(2, 1)
    out = reduce_from_region(x, world)
    in_place = reduce_from_region_(x.clone(), world)
    strided = reduce_from_region(x.t().contiguous().t(), world)
    compiled = torch.compile(lambda z: reduce_from_region(z * 2, world) / 2, backend="aot_eager")
    return out[0].tolist(), torch.equal(in_place, out), torch.equal(strided, out), compiled(x)[1].tolist()


def test_ranks_sum_over_gloo_with_the_same_bits(run_ranks) -> None:
    """((2^24 - 1) + 1), ((1 + 2^24) - 1) and ((-1 + 1) + 2^24), each in rank order and rounded to fp32."""
    right = [2.0**24, 2.0**24 - 1, 2.0**24]
    assert run_ranks(3, on_ranks) == [(right, True, True, right)] * 3


@given(st.integers(1, 5 * HALF_BYTES // 2), st.sampled_from([2, 4]), st.sampled_from(WORLD_SIZES), st.integers(-2, 2))
def test_calls_cover_a_message_within_the_staging_buffer(size: int, width: int, world: int, extra: int) -> None:
    size = max(1, size + extra)
    cut = list(AllReduce.calls(size, width, world, THREADS))
    assert [call.start for call in cut] == [sum(p.size for p in cut[:k]) for k in range(len(cut))]
    assert sum(call.size for call in cut) == size
    for call in cut:
        assert 0 < call.size * width <= HALF_BYTES
        assert call.start * width % 16 == 0, "as aligned as the message"
        assert 1 <= call.blocks <= MAX_BLOCKS
    assert AllReduce.staging_bytes() >= 2 * HALF_BYTES + PAD_BYTES
    assert MAX_BLOCKS <= MOST_BLOCKS
    assert 8 * MOST_BLOCKS * world <= PAD_BYTES


@pytest.mark.parametrize(
    ("num_bytes", "world", "two_shot", "blocks"),
    [
        (2, 8, False, 1),
        (64 * KIB, 2, False, 8),
        (64 * KIB, 8, False, 8),
        (256 * KIB, 8, False, 32),
        (256 * KIB + 2, 8, True, 5),
        (512 * KIB, 4, False, 64),
        (512 * KIB + 2, 4, True, 17),
        (512 * KIB + 2, 2, True, 33),
        (32 * KIB * KIB, 2, True, 128),
        (32 * KIB * KIB, 4, True, 128),
    ],
)
def test_small_messages_are_read_whole_and_large_ones_in_slices(
    num_bytes: int, world: int, two_shot: bool, blocks: int
) -> None:
    (call,) = AllReduce.calls(num_bytes // 2, 2, world, THREADS)
    assert (call.two_shot, call.blocks) == (two_shot, blocks)
