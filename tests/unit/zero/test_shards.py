"""Partition -> reduce -> update -> gather on all ranks of a partition, played in one process."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from parallel3d.comm.collectives import Group
from parallel3d.parameters import ParameterInfo
from parallel3d.zero import buckets as buckets_module
from parallel3d.zero.buckets import Bucket, make_buckets
from parallel3d.zero.layout import ALIGNMENT
from parallel3d.zero.memory import StateBytes, piece_sizes, predict_state, unit_sizes, update_traffic
from parallel3d.zero.policy import WeightOffload, ZeroPolicy

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=8)


def build(shapes: list[tuple[int, ...]], owners: tuple[int, ...], seed: int) -> list[ParameterInfo]:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    return [ParameterInfo(f"layers.{k}.weight", nn.Parameter(v), owners) for k, v in enumerate(values)]


def buckets_of_ranks(
    shapes: list[tuple[int, ...]], owners: tuple[int, ...], num_ranks: int, policy: ZeroPolicy
) -> list[list[Bucket]]:
    partition = tuple(range(num_ranks)) if policy.stage else None
    return [
        make_buckets(build(shapes, owners, seed=1), policy, Group(partition or (rank,), None), rank)
        for rank in range(num_ranks)
    ]


@settings(deadline=None, max_examples=150)
@given(
    shapes=SHAPES,
    owners=st.sampled_from([(0,), (0, 3)]),
    num_ranks=st.integers(1, 5),
    stage=st.sampled_from([0, 1, 2]),
    per_micro_batch=st.booleans(),
    weight_dtype=st.sampled_from([None, torch.bfloat16]),
    gradient_dtype=st.sampled_from([None, torch.float64]),
    copied_numel=st.integers(1, 800),
    bucket_size=st.integers(1, 400),
)
def test_partition_reduce_update_gather_is_the_identity_on_layout(
    shapes: list[tuple[int, ...]],
    owners: tuple[int, ...],
    num_ranks: int,
    stage: int,
    per_micro_batch: bool,
    weight_dtype: torch.dtype | None,
    gradient_dtype: torch.dtype | None,
    copied_numel: int,
    bucket_size: int,
):
    per_micro_batch = stage == 2 and per_micro_batch
    policy = ZeroPolicy(stage, bucket_size, weight_dtype, gradient_dtype, reduce_per_micro_batch=per_micro_batch)
    with mock.patch.object(buckets_module, "COPIED_NUMEL", copied_numel):
        ranks = buckets_of_ranks(shapes, owners, num_ranks, policy)
    for span in [span for b in ranks[0] for span in b.spans if b.copies_gradients and b.master is not None]:
        assert len(span.shards) == 1 or span.part.stop - span.part.start <= copied_numel // 4
    masters = [info.parameter.detach().clone() for info in build(shapes, owners, seed=1)]
    gradients = [info.parameter.detach().clone() for info in build(shapes, owners, seed=2)]
    for same in zip(*ranks, strict=True):  # one bucket, as each rank sees it
        reduce_update_gather(list(same), dict(zip((f"layers.{k}.weight" for k in range(99)), gradients, strict=False)))
    for buckets in ranks:
        found = {info.name: info.parameter for bucket in buckets for info in bucket.infos}
        assert len(found) == len(shapes)
        for k, (master, gradient) in enumerate(zip(masters, gradients, strict=True)):
            expected = master - 0.5 * num_ranks * gradient
            actual = found[f"layers.{k}.weight"]
            assert actual.shape == master.shape
            assert torch.equal(actual.detach(), expected.to(weight_dtype or torch.float32))


def reduce_update_gather(same: list[Bucket], gradients: dict[str, torch.Tensor]) -> None:
    """Return the result of the collectives and an SGD step of rate 0.5 on a bucket that every rank holds."""
    for bucket in same:
        flat = torch.full((bucket.numel,), torch.nan, dtype=bucket.gradient_dtype)
        bucket.clear_all_but(flat, set())
        for k, info in enumerate(bucket.infos):
            bucket.view(flat, k).add_(gradients[info.name])
        bucket.gradient_shard.copy_(flat[bucket.shard] * len(same))
    for bucket in same:
        for span in bucket.spans:
            bucket.assign_gradients(span, untouched=set())
        for shard in bucket.shards:
            assert shard.master.grad is not None
            shard.master.data.sub_(0.5 * shard.master.grad)
        bucket.write_back()
    if same[0].partition.size > 1:
        assert same[0].weights is not None
        whole = torch.cat([bucket.weights[bucket.shard] for bucket in same if bucket.weights is not None])
        for bucket in same:
            assert bucket.weights is not None
            bucket.weights.copy_(whole)


@settings(deadline=None)
@given(shapes=SHAPES, num_ranks=st.integers(1, 5), bucket_size=st.integers(1, 400))
def test_pieces_cover_every_element_once(shapes: list[tuple[int, ...]], num_ranks: int, bucket_size: int):
    ranks = buckets_of_ranks(shapes, (0,), num_ranks, ZeroPolicy(1, bucket_size))
    for k, shape in enumerate(shapes):
        name = f"layers.{k}.weight"
        shards = [p for buckets in ranks for b in buckets for p in b.shards if p.info.name == name]
        assert sum(p.master.numel() for p in shards) == torch.Size(shape).numel()
        values = [p.master.detach().flatten() for p in shards]
        whole = build(shapes, (0,), seed=1)[k].parameter.detach().flatten()
        assert torch.equal(torch.cat(values) if values else whole[:0], whole)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_shards_are_aligned_and_equally_long(num_ranks: int):
    for buckets in buckets_of_ranks([(3, 5), (), (70,)], (0,), num_ranks, ZeroPolicy(1, 50)):
        for bucket in buckets:
            size = bucket.shard.stop - bucket.shard.start
            assert size * num_ranks == bucket.numel
            assert size % ALIGNMENT == 0


@pytest.mark.parametrize(
    ("stage", "per_micro_batch", "expected"),
    [(0, False, 2 + 4 + 12), (1, False, 2 + 4 + 12 / 8), (2, True, 2 + 16 / 8), (3, True, 18 / 8)],
    ids=["stage 0", "stage 1", "stage 2, per micro-batch", "stage 3, per micro-batch"],
)
def test_model_state_is_what_the_zero_paper_has(stage: int, per_micro_batch: bool, expected: float):
    """arXiv:1910.02054, section 3, with fp32 accumulators; 7 G parameters on 8 ranks, buckets counted."""
    parameters = [nn.Parameter(torch.empty(70_000_000, device="meta")) for _ in range(100)]
    infos = [ParameterInfo(f"layers.{k}.weight", parameter, (0,), k) for k, parameter in enumerate(parameters)]
    policy = ZeroPolicy(stage, 500_000_000, torch.bfloat16, reduce_per_micro_batch=per_micro_batch)
    predicted = predict_state(infos, policy, data_size=8)
    assert predicted.backward / (100 * 70_000_000) == pytest.approx(expected, rel=0.05)


def test_parameters_that_a_rank_has_no_part_of_take_nothing():
    infos = [ParameterInfo("layers.0.weight", nn.Parameter(torch.empty(0, 4)), (0,))]
    policy = ZeroPolicy(1, 500, torch.bfloat16, gradient_dtype=torch.bfloat16)
    assert predict_state(infos, policy, data_size=2) == StateBytes()
    assert piece_sizes(infos, policy, data_size=2) == (0, 0)


def test_an_update_moves_gradients_masters_moments_and_weights():
    """By hand, for each element of a shard: the gradient three times, master and two moments twice, the weight once."""
    infos = [ParameterInfo("layers.0.weight", nn.Parameter(torch.empty(1000, device="meta")), (0,))]
    half = ZeroPolicy(1, 5000, torch.bfloat16)
    assert update_traffic(infos, half, 4, moments=2).on_device == 256 * (
        3 * 4 + 2 * 3 * 4 + 2
    )  # 1024 elements with padding
    assert update_traffic(infos, replace(half, weight_dtype=None), 4, moments=2).on_device == 256 * (3 * 4 + 2 * 3 * 4)


def test_units_are_the_layers_whose_weights_live_as_shards_frozen_ones_included():
    def infos(sizes: list[int], first: int, dtype: torch.dtype = torch.float32) -> list[ParameterInfo]:
        parameters = (nn.Parameter(torch.empty(n, device="meta", dtype=dtype), dtype.is_floating_point) for n in sizes)
        return [ParameterInfo(f"layers.{k}", p, (0,), k) for k, p in enumerate(parameters, first)]

    shared = ParameterInfo("layers.9", nn.Parameter(torch.empty(10_000, device="meta")), (0, 1), 9)
    policy = ZeroPolicy(3, 5000, torch.bfloat16, largest_whole=100)
    trained = [*infos([1000, 100, 6000], 0), shared]
    frozen = [*infos([640], 2), *infos([999], 4, torch.int64)]
    found = unit_sizes(trained, frozen, policy, data_size=4)
    # Padded to 4 shards of 32 elements; a unit of 100 elements, a tied one and integers are whole.
    assert found == {0: (1024, 2048, 0, 0), 2: (6016 + 640, 2 * (6016 + 640), 0, 0)}
    assert unit_sizes(trained, frozen, replace(policy, stage=2), data_size=4) == {}
    assert unit_sizes(trained, frozen, policy, data_size=1) == {}
    on_host = unit_sizes(trained, frozen, replace(policy, weight_offload=WeightOffload()), data_size=4)
    assert on_host == {0: (1024, 2048, 2 * 256, 0), 2: (6656, 2 * 6656, 2 * 1664, 0)}
    whole = 2 * (128 + 10_112)
    assert predict_state(trained, policy, data_size=4).weights == whole + 2 * (1024 + 6016) // 4
