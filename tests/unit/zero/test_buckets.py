"""Where gradients lie in flat buckets."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from parallel3d.comm.collectives import Group
from parallel3d.parameters import ParameterInfo
from parallel3d.zero.buckets import make_buckets
from parallel3d.zero.layout import ALIGNMENT, BucketLayout, lay_out
from parallel3d.zero.policy import ZeroPolicy

# A loaded machine is no failure.
unhurried = settings(deadline=None)
# Below this many elements a bucket is never cut for the sake of overlap alone.
SMALLEST, SMALLEST_SHARD = 1 << 20, 1 << 17
sizes = st.lists(st.one_of(st.integers(0, 100), st.integers(0, 10**6), st.integers(0, 10**9)), max_size=40)
bucket_sizes = st.one_of(st.integers(1, 2000), st.integers(1, 10**9))


def cut(sizes: list[int], bucket_size: int, num_shards: int = 1) -> list[BucketLayout]:
    parameters = [nn.Parameter(torch.empty(size, device="meta")) for size in sizes]
    infos = [ParameterInfo(f"p{k}", parameter, (0,)) for k, parameter in enumerate(parameters)]
    layouts = lay_out(infos, ZeroPolicy(int(num_shards > 1), bucket_size), num_shards)
    assert [info for layout in layouts for info in layout.infos] == infos, "each in one bucket, in their order"
    return layouts


@unhurried
@given(sizes, bucket_sizes)
@example([], 1)
@example([33, 33], 65)
@example([0, 0, 1], 1)
def test_every_parameter_is_in_one_bucket_aligned_and_apart(sizes: list[int], bucket_size: int):
    layouts = cut(sizes, bucket_size)
    for layout in layouts:
        assert layout.offsets[0] == 0
        assert all(offset % ALIGNMENT == 0 for offset in (*layout.offsets, layout.numel))
        ends = [offset + size for offset, size in zip(layout.offsets, layout.sizes, strict=True)]
        following = (*layout.offsets[1:], layout.numel)
        assert all(end <= offset < end + ALIGNMENT for end, offset in zip(ends, following, strict=True))


@unhurried
@given(sizes, bucket_sizes, st.sampled_from([1, 2, 8, 64]))
@example([2**21] * 4, 2**30, 16)  # 16 shards of 2^17 each
def test_buckets_keep_to_their_limit_and_are_no_smaller_than_need_be(
    sizes: list[int], bucket_size: int, num_shards: int
):
    limit = min(bucket_size, max(SMALLEST, num_shards * SMALLEST_SHARD, -(-sum(sizes) // (16 * num_shards))))
    layouts = cut(sizes, bucket_size, num_shards)
    for layout in layouts:
        assert len(layout.offsets) == 1 or layout.offsets[-1] + layout.sizes[-1] <= limit
    for layout, following in pairwise(layouts):
        end = layout.offsets[-1] + layout.sizes[-1]
        assert -(-end // ALIGNMENT) * ALIGNMENT + following.sizes[0] > limit, "the next parameter would have fitted"


@unhurried
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 5), max_size=3), st.sampled_from([torch.float32, torch.float64]), st.booleans()
        ),
        max_size=20,
    ),
    st.integers(1, 300),
)
def test_views_are_the_parameters_gradients_and_a_bucket_has_one_dtype(specs: list, bucket_size: int):
    infos = []
    for k, (shape, dtype, turned) in enumerate(specs):
        zeros = torch.zeros(shape, dtype=dtype)
        parameter = nn.Parameter(zeros.mT if turned and zeros.dim() > 1 else zeros)
        infos.append(ParameterInfo(f"layers.{k}", parameter, (0,)))
    buckets = make_buckets(infos, ZeroPolicy(0, bucket_size), Group((0,), None), 0)
    held = [info.name for bucket in buckets for info in bucket.infos]
    assert sorted(held) == sorted(info.name for info in infos)
    for dtype in (torch.float32, torch.float64):  # in the order given, a dtype at a time
        names = [info.name for bucket in buckets for info in bucket.infos if info.parameter.dtype is dtype]
        assert names == [info.name for info in infos if info.parameter.dtype is dtype]
    for number, bucket in enumerate(buckets, 1):
        flat = bucket.gradients
        assert not flat.any()
        for k, info in enumerate(bucket.infos):
            view = bucket.view(flat, k)
            assert (view.shape, view.dtype) == (info.parameter.shape, info.parameter.dtype)
            view.add_(number)
        # Each element was written once: no views overlap; what is left is padding.
        assert ((flat == number) | (flat == 0)).all()
        assert int((flat == number).sum()) == sum(info.parameter.numel() for info in bucket.infos)


@unhurried
@given(st.lists(st.integers(0, 70), min_size=1, max_size=6), st.sets(st.integers(0, 5)), st.integers(1, 3))
def test_what_no_gradient_was_written_to_is_cleared(sizes: list[int], kept: set[int], num_shards: int):
    infos = [ParameterInfo(f"p{k}", nn.Parameter(torch.ones(size)), (0,)) for k, size in enumerate(sizes)]
    partition = Group(tuple(range(num_shards)), None)
    (bucket,) = make_buckets(infos, ZeroPolicy(stage=1, bucket_size=10_000), partition, rank=0)
    kept &= set(range(len(sizes)))
    flat = torch.full((bucket.numel + 3,), torch.nan)
    expected = torch.zeros(bucket.numel + 3)
    for k in kept:
        for tensor in (flat, expected):
            bucket.view(tensor, k).fill_(k + 1)
    expected[bucket.numel :] = torch.nan  # the next bucket's part of a buffer that is larger
    bucket.clear_all_but(flat, kept)
    assert torch.equal(flat.nan_to_num(-1), expected.nan_to_num(-1))
