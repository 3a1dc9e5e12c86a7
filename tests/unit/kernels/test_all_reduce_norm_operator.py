"""The all-reduce with a norm behind it: reference, operator and cutting into calls, without a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, library

from parallel3d.comm.collectives import Group
from parallel3d.comm.environment import get_rank
from parallel3d.kernels.all_reduce import HALF_BYTES, MAX_BLOCKS, all_reduce_ref
from parallel3d.kernels.all_reduce_norm import LONGEST, all_reduce_norm_ref, empty_normed, rows_pieces
from parallel3d.kernels.all_reduce_norm_kernel import GatheredNorms
from parallel3d.kernels.peers import WORLD_SIZES

THREADS, WARP, HELD = 512, 32, 32
KIB = 1024


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)],
)
def test_the_reference_is_torchs_norm_of_what_is_rounded_twice(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(3)
    parts = [torch.randn(7, 3, 50).to(dtype) for _ in range(4)]
    residual, weight = torch.randn(7, 3, 50).to(dtype), torch.randn(50).to(dtype)
    hidden, normed, scale = all_reduce_norm_ref(parts, residual, weight, 1e-5)
    assert torch.equal(hidden, residual + all_reduce_ref(parts))
    right = F.rms_norm(hidden.double(), (50,), weight.double(), 1e-5)
    assert ((normed.double() - right).abs() <= tolerance * right.abs()).all()
    assert scale.dtype == torch.promote_types(dtype, torch.float32)
    squares = hidden.double().square().mean(-1).flatten()
    assert torch.allclose(scale.double(), (squares + 1e-5) ** -0.5, rtol=max(1e-14, 1e-6 * (dtype != torch.float64)))


def test_the_operator_keeps_torchs_rules() -> None:
    norms = GatheredNorms(Group((0,), None))
    for x in (torch.randn(3, 5), torch.randn(4, 2, 6, dtype=torch.bfloat16).transpose(0, 1), torch.empty(0, 2)):
        weight = torch.ones(x.shape[-1], dtype=x.dtype)
        operands = (x, torch.randn(x.shape).to(x.dtype), weight, 1e-5, norms.number, *empty_normed(x))
        library.opcheck(torch.ops.parallel3d.all_reduce_rms_norm.default, operands)


def on_ranks() -> list[Tensor]:
    """Results of strided tensors, of which a half is written into."""
    world = Group(tuple(range(torch.distributed.get_world_size())), torch.distributed.group.WORLD)
    norms = GatheredNorms(world)
    x = torch.tensor([2.0**24, 1.0, -1.0])[torch.arange(3).roll(get_rank())].repeat(2, 1).t().contiguous().t()
    out = empty_normed(torch.empty(4, 3))
    half = (result[2:] for result in out)
    torch.ops.parallel3d.all_reduce_rms_norm(
        x, torch.full((2, 3), -(2.0**24)), torch.full((3,), 2.0), 0.0, norms.number, *half
    )
    return [result[2:].clone() for result in out]


def test_ranks_agree_over_gloo_on_sums_in_rank_order(run_ranks) -> None:
    """((2^24 - 1) + 1), ((1 + 2^24) - 1) and ((-1 + 1) + 2^24), each in rank order and rounded to fp32, less 2^24."""
    for hidden, normed, scale in run_ranks(3, on_ranks):
        assert hidden.tolist() == [[0.0, -1.0, 0.0]] * 2
        assert scale.tolist() == pytest.approx([3**0.5] * 2)
        assert normed[:, 1].tolist() == pytest.approx([-2 * 3**0.5] * 2)


@given(
    st.integers(1, 40_000),
    st.integers(1, LONGEST),
    st.sampled_from([2, 4]),
    st.sampled_from(WORLD_SIZES),
)
def test_pieces_are_whole_rows_within_the_staging_buffer(rows: int, columns: int, width: int, world: int) -> None:
    cut = rows_pieces(rows, columns, width, world, THREADS)
    row_bytes = -(-columns * width // 16) * 16
    assert [piece.start for piece in cut] == [sum(p.rows for p in cut[:k]) for k in range(len(cut))]
    assert sum(piece.rows for piece in cut) == rows
    for piece in cut:
        assert 0 < piece.rows * row_bytes <= HALF_BYTES
        assert piece.team in (32, 64, 128, 256, 512)
        assert columns <= piece.team * HELD, "a thread holds no more"
        assert piece.team == WARP or (piece.team // 2) * 16 < row_bytes, "no half of a team idles"
        own = -(-piece.rows // world) if piece.two_shot else piece.rows
        assert 1 <= piece.blocks <= MAX_BLOCKS
        assert piece.blocks * (THREADS // piece.team) >= min(own, MAX_BLOCKS * (THREADS // piece.team))
        assert (piece.blocks - 1) * (THREADS // piece.team) < own, "no block idles"


@pytest.mark.parametrize(
    ("rows", "columns", "world", "two_shot", "team", "blocks"),
    [
        (1, 1, 2, False, 32, 1),
        (8, 4096, 2, False, 512, 8),
        (64, 4096, 4, False, 512, 64),
        (65, 4096, 4, True, 512, 17),
        (256, 4096, 2, True, 512, 128),
        (512, 4096, 2, True, 256, 128),
        (4096, 4096, 2, True, 128, 128),
        (4096, 4096, 8, True, 128, 128),
        (1024, 16384, 2, True, 512, 128),
        (8192, 1024, 2, True, 32, 128),
    ],
)
def test_rows_have_few_threads_where_there_are_many(
    rows: int, columns: int, world: int, two_shot: bool, team: int, blocks: int
) -> None:
    (piece,) = rows_pieces(rows, columns, 2, world, THREADS)
    assert (piece.two_shot, piece.team, piece.blocks) == (two_shot, team, blocks)
