"""Which rank holds what: the parts cover the whole once, fused segments and attention heads stay whole."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.errors import PartitionError
from parallel3d.parameters import sliced, slicing_of
from parallel3d.tensor_parallel.slicing import AttentionHeads, Cut, cut

PARTS = st.integers(1, 9)


def rows(c: Cut, rank: int) -> list[int]:
    return [i for start, stop in c.ranges[rank] for i in range(start, stop)]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), PARTS)
def test_parts_cover_every_segment_once_and_evenly(sizes: list[int], parts: int) -> None:
    c = cut(sum(sizes), sizes, parts)
    assert sorted(i for rank in range(parts) for i in rows(c, rank)) == list(range(sum(sizes)))
    assert c.lengths == tuple(len(rows(c, rank)) for rank in range(parts))
    assert not c.shared
    for k, end in enumerate(accumulate(sizes)):
        segment = range(end - sizes[k], end)
        owners = Counter(rank for rank in range(parts) for i in rows(c, rank) if i in segment)
        counts = [owners[rank] for rank in range(parts)]
        assert max(counts) - min(counts) <= 1
        # In order: the parts of a segment, one rank's behind the other's, are the segment.
        assert [i for rank in range(parts) for i in rows(c, rank) if i in segment] == list(segment)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=3), PARTS, st.integers(0, 1))
def test_slices_of_a_tensor_are_its_rows_and_make_it_again(sizes: list[int], parts: int, dim: int) -> None:
    c, size = cut(sum(sizes), sizes, parts), sum(sizes)
    whole = torch.arange(size * 3.0).view(size, 3).movedim(0, dim)
    again = torch.full_like(whole, torch.nan)
    for rank in range(parts):
        parameter = sliced(whole, c.slicing(dim, rank))
        assert slicing_of(parameter) == c.slicing(dim, rank)
        assert torch.equal(parameter, whole.index_select(dim, torch.tensor(rows(c, rank), dtype=torch.long)))
        c.slicing(dim, rank).write(again, parameter.detach())
    assert torch.equal(again, whole)


@st.composite
def heads_and_parts(draw: st.DrawFn) -> tuple[AttentionHeads, int]:
    kv, ratio = draw(st.integers(1, 8)), draw(st.integers(1, 6))
    return AttentionHeads(kv * ratio, kv, draw(st.integers(1, 3))), draw(st.integers(1, kv * ratio))


@given(heads_and_parts())
def test_every_query_head_is_on_one_rank_and_there_its_key_and_value(case: tuple[AttentionHeads, int]) -> None:
    heads, parts = case
    ratio = heads.num_heads // heads.num_kv_heads
    found = []
    for rank in range(parts):
        queries, kvs = range(*heads.query_heads(parts, rank)), range(*heads.kv_heads(parts, rank))
        found += queries
        # scaled_dot_product_attention(enable_gqa=True) gives local query head j the local kv head j // local ratio.
        local_ratio, rest = divmod(len(queries), len(kvs))
        assert rest == 0
        assert [kvs[j // local_ratio] for j in range(len(queries))] == [head // ratio for head in queries]
    assert found == list(range(heads.num_heads))
    assert heads.query.size == heads.num_heads * heads.head_dim
    assert heads.key_value.size == heads.num_kv_heads * heads.head_dim


@given(heads_and_parts())
def test_heads_are_cut_into_rows_and_the_whole_is_found_again(case: tuple[AttentionHeads, int]) -> None:
    heads, parts = case
    for segment, of_rank in ((heads.query, heads.query_heads), (heads.key_value, heads.kv_heads)):
        c = cut(segment.size, [segment], parts)
        for rank in range(parts):
            start, stop = of_rank(parts, rank)
            assert rows(c, rank) == list(range(start * heads.head_dim, stop * heads.head_dim))
        assert c.shared == (segment is not heads.query and segment.size != sum(c.lengths))
        # As a gathering does: each rank's part, then what `sources` takes of them.
        assert [rows(c, rank)[i] for rank, at, n in c.sources() for i in range(at, at + n)] == list(range(c.size))
    query_rows = [len(rows(cut(heads.query.size, [heads.query], parts), rank)) for rank in range(parts)]
    kv_on_a_rank = -(-heads.num_kv_heads // parts)
    sharers = max(1, parts // heads.num_kv_heads)
    ratio = heads.num_heads // heads.num_kv_heads
    assert max(query_rows) <= heads.head_dim * (kv_on_a_rank * ratio if sharers == 1 else -(-ratio // sharers))


def test_kv_heads_fewer_than_ranks_are_shared() -> None:
    heads = AttentionHeads(8, 2, 16)
    assert [heads.query_heads(4, r) for r in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [heads.kv_heads(4, r) for r in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert [heads.query_heads(3, r) for r in range(3)] == [(0, 2), (2, 4), (4, 8)]
    assert [heads.kv_heads(3, r) for r in range(3)] == [(0, 1), (0, 1), (1, 2)]
    assert cut(32, [heads.key_value], 4).sources() == [(0, 0, 16), (2, 0, 16)]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(PartitionError, match=r"3 \+ 4 = 7 rows don't make up 8"):
        cut(8, (3, 4), 2)
    with pytest.raises(PartitionError, match="6 query heads can't share 4"):
        AttentionHeads(6, 4, 8)
    with pytest.raises(PartitionError, match="4 attention heads can't be split over 5 ranks"):
        cut(32, [AttentionHeads(4, 2, 8).query], 5)
