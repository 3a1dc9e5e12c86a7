"""Several chunks a stage against brute force over all bounds; memory limits against brute force over what they allow."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, combinations, pairwise, takewhile
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel3d.config import PipelineConfig
from parallel3d.errors import PartitionError
from parallel3d.partition import Method, Partition, StageLimit, partition_layers, resolve_partition, segment_costs
from parallel3d.partition.search import MOST_SPLITS
from parallel3d.pipe.splitting import step_length
from parallel3d.schedule.instructions import loop_placement, v_placement

Objectives = tuple[float, float, float]


def stage_sums(values: Sequence[float], placement: Sequence[int]) -> list[float]:
    return [sum(v for v, s in zip(values, placement, strict=True) if s == stage) for stage in range(max(placement) + 1)]


def objectives(parts: Sequence[float], placement: Sequence[int]) -> Objectives:
    return max(stage_sums(parts, placement)), max(parts), sum(cost * cost for cost in parts)


def part_sums(values: Sequence[float], bounds: Sequence[int]) -> list[float]:
    return [sum(values[a:b]) for a, b in pairwise(bounds)]


def all_bounds(num_layers: int, num_chunks: int) -> list[list[int]]:
    return [[0, *inner, num_layers] for inner in combinations(range(1, num_layers), num_chunks - 1)]


@st.composite
def chunked_chains(draw: st.DrawFn) -> tuple[list[int], tuple[int, ...]]:
    stages, chunks = draw(st.sampled_from([(1, 2), (2, 2), (2, 3), (3, 2), (4, 2)]))
    placement = draw(st.sampled_from([loop_placement(stages, chunks), *([v_placement(stages)] if chunks == 2 else [])]))
    size = st.integers(len(placement), 11)
    costs = draw(size.flatmap(lambda n: st.lists(st.integers(0, 50), min_size=n, max_size=n)))
    return costs, placement


@given(chunked_chains())
@settings(max_examples=150, deadline=None)
def test_few_splits_give_the_best_of_all(case: tuple[list[int], tuple[int, ...]]) -> None:
    costs, placement = case
    found = partition_layers(segment_costs(costs), len(placement), placement=placement)
    best = min(objectives(part_sums(costs, b), placement) for b in all_bounds(len(costs), len(placement)))
    assert list(found.costs) == part_sums(costs, found.bounds)
    assert objectives(found.costs, placement) == best


@given(chunked_chains(), st.integers(0, 400), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_only_splits_within_the_limit_count(
    case: tuple[list[int], tuple[int, ...]], most: int, draw: random.Random
) -> None:
    costs, placement = case
    if draw.random() < 0.4:
        placement = tuple(range(len(placement)))  # one chunk a stage
    state, activations = ([draw.randint(0, 50) for _ in costs] for _ in range(2))
    in_flight = [draw.randint(1, 4) for _ in placement]

    def held(bounds: Sequence[int]) -> float:
        parts = zip(part_sums(state, bounds), part_sums(activations, bounds), in_flight, strict=True)
        return max(stage_sums([s + count * a for s, a, count in parts], placement))

    splits = all_bounds(len(costs), len(placement))
    fitting = [bounds for bounds in splits if held(bounds) <= most]
    limit = StageLimit(most, state, activations, in_flight)
    if fitting:
        found = partition_layers(segment_costs(costs), len(placement), placement=placement, limit=limit)
        assert held(found.bounds) <= most
        assert objectives(found.costs, placement) == min(objectives(part_sums(costs, b), placement) for b in fitting)
    else:
        least = min(map(held, splits))
        with pytest.raises(
            PartitionError, match=rf"stage \d+ holds .* the smallest limit that works is {least:.0f}\. "
        ):
            partition_layers(segment_costs(costs), len(placement), placement=placement, limit=limit)


@pytest.mark.parametrize("seed", range(3))
def test_of_many_splits_one_close_to_the_best_is_found(seed: int) -> None:
    draw, placement = random.Random(seed), loop_placement(2, 3)
    costs = [draw.choice([draw.randint(1, 9), draw.randint(1, 100)]) for _ in range(38)]
    assert comb(len(costs) - 1, len(placement) - 1) > MOST_SPLITS
    found = partition_layers(segment_costs(costs), len(placement), placement=placement)
    assert max(found.loads(placement)) <= 1.005 * sum(costs) / 2


def can_be_lower(costs: Sequence[float], num_stages: int, load: float) -> bool:
    """Whether some split with placement "v" keeps every stage below `load`: from the outside in, stage by stage."""
    sums = [0.0, *accumulate(costs)]
    left = {(0, len(costs))}
    for stage in range(num_stages - 1):
        inside = 2 * (num_stages - 1 - stage)
        left = {
            (a_next, b_next)
            for a, b in left
            for a_next in takewhile(lambda i, a=a: sums[i] - sums[a] < load, range(a + 1, b))
            for b_next in takewhile(
                lambda i, a=a, b=b, taken=a_next: sums[taken] - sums[a] + sums[b] - sums[i] < load,
                range(b - 1, a_next + inside - 1, -1),
            )
        }
    return any(b - a >= 2 and sums[b] - sums[a] < load for a, b in left)


@pytest.mark.parametrize("embedding", [0.1, 2.0, 5.5, 14.5])
def test_half_blocks_of_a_7b_model_in_a_v(embedding: float) -> None:
    costs, placement = [embedding, *[4.3, 5.7] * 32, 5.5], v_placement(4)
    found = partition_layers(segment_costs(costs), 8, placement=placement)
    largest = max(found.loads(placement))
    assert not can_be_lower(costs, 4, largest - 1e-6)
    assert can_be_lower(costs, 4, largest + 1e-6)  # else the line above would prove nothing


@pytest.mark.parametrize("placement", [loop_placement(8, 2), v_placement(8), loop_placement(4, 4)])
def test_130_layers_into_16_chunks_within_2_percent(placement: tuple[int, ...]) -> None:
    draw = random.Random(1)
    costs = [draw.uniform(1, 9) for _ in range(130)]
    found = partition_layers(segment_costs(costs), 16, placement=placement)
    assert max(found.loads(placement)) <= 1.02 * sum(costs) / (max(placement) + 1)
    assert found == partition_layers(segment_costs(costs), 16, placement=placement)


def test_each_stage_its_own_chunk_is_the_exact_min_max() -> None:
    chain = segment_costs([3, 1, 4, 1, 5, 9, 2, 6])
    assert partition_layers(chain, 3, placement=(0, 1, 2)) == partition_layers(chain, 3)


@pytest.mark.parametrize("method", ["parameters", "flops", "profile", {"weights": [8, 1, 1, 1, 1, 1, 1, 2]}])
def test_every_method_with_costs_balances_stages(method: Method) -> None:
    costs, placement = [8, 1, 1, 1, 1, 1, 1, 2], (0, 1, 1, 0)
    names, ties = [f"L{i}" for i in range(8)], [None] * 8
    found = resolve_partition(method, costs, names, ties, 4, placement=placement)
    assert sorted(found.loads(placement)) == [6, 10]  # the smallest that holds the first layer and one more


def test_measured_costs_know_no_ties() -> None:
    ties, names = ["embed", None, "embed"], ["Embedding", "Block", "Head"]
    assert resolve_partition("parameters", [5, 1, 8], names, ties, 1).costs == (9,)
    assert resolve_partition("flops", [5, 1, 8], names, ties, 1).costs == (14,)


def test_tied_state_is_held_once_a_part() -> None:
    limit = StageLimit(60, [50, 10, 50], [0, 0, 0], [1], ["embed", None, "embed"])
    assert partition_layers(segment_costs([1, 1, 1]), 1, limit=limit).bounds == (0, 3)
    with pytest.raises(PartitionError, match="the smallest limit that works is 110"):
        partition_layers(segment_costs([1, 1, 1]), 1, limit=StageLimit(60, [50, 10, 50], [0, 0, 0], [1]))


def test_bounds_that_break_the_limit() -> None:
    limit = StageLimit(100, [10] * 4, [20] * 4, [3, 1])  # 70 a layer on the first stage, 30 on the second
    names, ties = ["L"] * 4, [None] * 4
    assert resolve_partition([0, 1, 4], [1] * 4, names, ties, 2, limit=limit) == Partition((0, 1, 4), (1, 3))
    assert resolve_partition("uniform", [1] * 4, names, ties, 2, limit=limit).bounds == (0, 1, 4)
    with pytest.raises(PartitionError, match=r"bounds \[0, 2, 4\] stage 0 holds 140 bytes, .* is 100; set it to 140"):
        resolve_partition([0, 2, 4], [1] * 4, names, ties, 2, limit=limit)


@given(chunked_chains(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_a_steps_length_decides_among_splits_that_weigh_evenness_more(case, rng: random.Random) -> None:
    """Any length; none is longer than that of the split which is chosen without it."""
    costs, placement = case
    weights = [rng.random() for _ in placement]

    def step(parts: Sequence[float]) -> float:
        return sum(w * cost for w, cost in zip(weights, parts, strict=True)) + max(parts)

    plain = partition_layers(segment_costs(costs), len(placement), placement=placement)
    chosen = partition_layers(segment_costs(costs), len(placement), placement=placement, step=step)
    assert list(chosen.costs) == part_sums(costs, chosen.bounds)
    assert step(chosen.costs) <= step(plain.costs)


def test_the_schedules_step_decides_where_costs_are_times() -> None:
    """Half-blocks in a V: the split with the smallest stage has a long chunk in the middle of the pipeline."""
    costs, placement = [0.3, *[4.2, 5.7] * 32, 4.8], v_placement(4)
    config = PipelineConfig(stages=4, schedule="auto", num_chunks=2, placement="v")
    length = partial(step_length, config, 4, 2, "v")
    names, ties = ["layer"] * len(costs), [None] * len(costs)
    split = partial(resolve_partition, {"weights": costs}, costs, names, ties, 8, placement=placement)
    plain, chosen = split(), split(step=length)
    assert length(chosen.costs) < 0.995 * length(plain.costs)
    assert resolve_partition("parameters", costs, names, ties, 8, placement=placement, step=length) == plain
