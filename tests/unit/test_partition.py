"""Partitions against brute force over all bounds, and against an independent bisection with a greedy fill."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest

from parallel3d.errors import PartitionError
from parallel3d.partition import Partition, partition_layers, resolve_partition, segment_costs

GPT = ["Embedding", *["Block"] * 6, "LayerNorm", "Embedding"]
GPT_COSTS = [50, *[10] * 6, 1, 50]
GPT_TIES = ["embed", *[None] * 7, "embed"]


def part_cost(costs: Sequence[float], ties: Sequence[str | None], layers: range) -> float:
    """The rule itself: untied layers each, a tie key once, at its largest cost in the whole chain."""
    keys = {ties[i] for i in layers if ties[i] is not None}
    shared = (max(c for c, tie in zip(costs, ties, strict=True) if tie == key) for key in sorted(map(str, keys)))
    return sum(costs[i] for i in layers if ties[i] is None) + sum(shared)


def all_splits(costs: Sequence[float], ties: Sequence[str | None], num_parts: int) -> Iterator[list[float]]:
    for inner in combinations(range(1, len(costs)), num_parts - 1):
        yield [part_cost(costs, ties, range(a, b)) for a, b in pairwise([0, *inner, len(costs)])]


def resolve(method: Any, num_parts: int, **changes: Any) -> Partition:
    given: dict[str, Any] = {"chain_costs": GPT_COSTS, "names": GPT, "tie_keys": GPT_TIES, **changes}
    return resolve_partition(method, num_parts=num_parts, **given)


@pytest.mark.parametrize("seed", range(10))
def test_1000_random_chains_agree_with_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    for case in range(100):
        n = draw.randint(1, 9)
        num_parts = draw.randint(1, n)
        costs = [draw.choice([0, draw.randint(0, 9), draw.randint(0, 1000)]) for _ in range(n)]
        ties = [draw.choice([None, "embed", "norm"]) if case % 2 else None for _ in range(n)]
        found = partition_layers(segment_costs(costs, tie_keys=ties), num_parts)
        assert found.bounds[0] == 0
        assert found.bounds[-1] == n
        assert all(len(found.layers(part)) >= 1 for part in range(num_parts))
        assert list(found.costs) == [part_cost(costs, ties, found.layers(part)) for part in range(num_parts)]
        # Costs are whole numbers, so both criteria are compared exactly.
        best = min((max(split), sum(c * c for c in split)) for split in all_splits(costs, ties, num_parts))
        assert (found.bottleneck, sum(c * c for c in found.costs)) == best


@pytest.mark.parametrize("seed", range(5))
def test_stages_of_unlike_paces_agree_with_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(50):
        num_parts = draw.randint(1, 4)
        costs = [draw.randint(1, 100) for _ in range(draw.randint(num_parts, 9))]
        paces = [draw.choice([1, 2, 5]) for _ in range(num_parts)]
        found = partition_layers(segment_costs(costs), num_parts, paces=paces)
        best = min(
            max(cost * pace for cost, pace in zip(split, paces, strict=True))
            for split in all_splits(costs, [None] * len(costs), num_parts)
        )
        assert found.bottleneck == best
        parts = zip(range(num_parts), paces, strict=True)
        assert list(found.costs) == [pace * sum(costs[i] for i in found.layers(part)) for part, pace in parts]


def test_fractional_costs_agree_with_brute_force() -> None:
    draw = random.Random(0)
    for _ in range(50):
        n = draw.randint(2, 8)
        num_parts = draw.randint(1, n)
        costs = [10 ** draw.uniform(-150, 150) if draw.random() < 0.5 else draw.random() for _ in range(n)]
        found = partition_layers(segment_costs(costs), num_parts)
        assert found.bottleneck == pytest.approx(min(map(max, all_splits(costs, [None] * n, num_parts))), rel=1e-12)


def test_400_layers_into_32_parts_agree_with_bisection_and_greedy_fill() -> None:
    draw = random.Random(7)
    costs = [draw.randint(1, 1000) for _ in range(400)]
    ties = [f"tie{i % 20}" if i % 5 == 0 else None for i in range(400)]

    def fits(limit: int) -> bool:
        parts, first = 1, 0
        for i in range(400):
            if part_cost(costs, ties, range(first, i + 1)) > limit:
                parts, first = parts + 1, i
        return parts <= 32

    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    assert partition_layers(segment_costs(costs, tie_keys=ties), 32).bottleneck == low


def test_a_tied_layer_costs_on_every_part_that_holds_it_but_once_a_part() -> None:
    chain = segment_costs([50, 10, 10, 50], tie_keys=["embed", None, None, "embed"])
    assert partition_layers(chain, 1).costs == (70.0,)
    assert partition_layers(chain, 2).costs == (60.0, 60.0)


def test_a_tie_key_costs_the_largest_of_its_layers() -> None:
    chain = segment_costs([5, 1, 8], tie_keys=["embed", None, "embed"])
    assert partition_layers(chain, 3).costs == (8.0, 1.0, 8.0)


def test_zero_costs_still_give_every_part_a_layer() -> None:
    assert partition_layers(segment_costs([0, 0, 0]), 3) == Partition((0, 1, 2, 3), (0.0, 0.0, 0.0))


@pytest.mark.parametrize("num_parts", range(1, 10))
def test_uniform_parts_differ_by_at_most_one_layer(num_parts: int) -> None:
    sizes = resolve("uniform", num_parts).costs
    assert max(sizes) - min(sizes) <= 1
    assert sorted(sizes, reverse=True) == list(sizes)  # DeepSpeed, too, gives the first parts the extra layers


def test_parameters_counts_ties() -> None:
    assert resolve("parameters", 3).bounds == (0, 2, 8, 9)
    assert resolve("Parameters", 3).costs == (60.0, 51.0, 50.0)
    assert resolve("parameters", 1).costs == (111.0,)


def test_type_balances_the_layers_that_match() -> None:
    found = resolve("type:block|linear", 3)
    assert found.costs == (2.0, 2.0, 2.0)
    assert found.part_of(0) == 0
    assert found.part_of(8) == 2


def test_type_matches_class_names_and_keeps_the_pattern_as_it_is() -> None:
    types = ["nn.Embedding", *["my Block"] * 6, "nn.LayerNorm", "nn.Linear"]
    assert resolve(r"type:^\S+$", 3, names=types).costs == (1.0, 1.0, 1.0)


def test_fewer_matches_than_parts() -> None:
    found = resolve("type:layernorm", 3)
    assert sorted(found.costs) == [0.0, 0.0, 1.0]


def test_explicit_bounds_are_costed_by_parameters() -> None:
    assert resolve([0, 1, 7, 9], 3) == Partition((0, 1, 7, 9), (50.0, 60.0, 51.0))
    assert resolve((0, 9), 1).costs == (111.0,)


def test_explicit_weights_ignore_ties() -> None:
    found = resolve({"weights": [3, 1, 1, 1, 1, 1, 1, 0.5, 3]}, 3)
    assert found.bounds == (0, 2, 6, 9)
    assert found.costs == (4.0, 4.0, 4.5)


def test_part_of_and_layers_are_inverse() -> None:
    found = resolve("parameters", 4)
    assert [found.part_of(i) for part in range(4) for i in found.layers(part)] == sorted(
        part for part in range(4) for _ in found.layers(part)
    )
    with pytest.raises(PartitionError, match="no layer 9: the chain has layers 0 to 8"):
        found.part_of(9)


def test_table_literally() -> None:
    assert resolve([0, 5, 8, 9], 3).table(GPT).splitlines() == [
        "stage  layers  count  cost  of max",
        "    0     0-4      5    90    100%  Embedding, 4 x Block",
        "    1     5-7      3    21     23%  2 x Block, LayerNorm",
        "    2       8      1    50     56%  Embedding",
    ]


def test_table_of_large_fractional_and_zero_costs() -> None:
    names = [f"L{i}" for i in range(6)]
    costs = [1_000_000, 234_567, 0.125, 0, 0, 0]
    rows = resolve([0, 2, 6], 2, names=names, chain_costs=costs, tie_keys=[None] * 6).table(names, "part").splitlines()
    assert rows[0].split() == ["part", "layers", "count", "cost", "of", "max"]
    assert "1,234,567" in rows[1]
    assert " 0.125 " in rows[2]
    assert rows[2].endswith("L2, L3, L4, L5")
    assert partition_layers(segment_costs([0.0] * 5), 1).table(list("abcde")).endswith("-  a, b, c, d, ...")


@pytest.mark.parametrize(
    ("method", "num_parts", "message"),
    [
        ("uniform", 10, r"9 layers can't fill 10 stages; .* make stages x chunks at most 9, or add layers"),
        ("parameters", 0, r"0 parts asked for; ask for 1 or more"),
        ("best", 2, r"unknown partition method 'best'\. Use 'uniform', .*, 'flops', 'profile', bounds"),
        ("parameter", 2, r"unknown partition method 'parameter'\. Did you mean 'parameters'\?"),
        ("types:block", 2, r"unknown partition method 'types:block'\. Did you mean 'type:REGEX'\?"),
        ("type", 2, r"unknown partition method 'type'\. Did you mean 'type:REGEX'\?"),
        (None, 2, r"unknown partition method None\. Use"),
        ("type:attention", 2, r"'type:attention' matches none of the 9 .* classes are Embedding, Block, LayerNorm$"),
        ("type:(", 2, r"'type:\(' is not a regular expression: .*; correct the pattern"),
        ([0, 3, 9], 3, r"bounds \[0, 3, 9\] make 2 parts, but there are 3; give 4 bounds"),
        ([0, 3, 3, 9], 3, r"bounds \[0, 3, 3, 9\] give part 1 no layer"),
        ([0, 4, 3, 9], 3, r"bounds \[0, 4, 3, 9\] give part 1 no layer"),
        ([1, 3, 8], 2, r"leave out 2 of 9 layers: 0 \(Embedding\), 8 \(Embedding\); start at 0 and end at 9"),
        ([0, 1, 2], 2, r"leave out 7 of 9 layers: 2 \(Block\), .*, 5 \(Block\), \.\.\.; start"),
        ([0, 3, 10], 2, r"bounds \[0, 3, 10\] reach outside layers 0 to 8; start at 0 and end at 9"),
        ([-1, 3, 9], 2, r"bounds \[-1, 3, 9\] reach outside"),
        ([0, 3.5, 9], 2, r"bounds \[0, 3\.5, 9\] must be whole numbers"),
        ({"weights": [1, 2]}, 2, r"2 weights for 9 layers; give one weight a layer"),
        ({"weights": 3}, 2, r"weights are 3; give a list of 9 numbers, one a layer"),
        ({"weight": [1] * 9}, 2, r"keys \['weight'\]; write \{\"weights\": \[\.\.\.\]\}"),
        ({"weights": [1, -2, *[1] * 7]}, 2, r"layer 1 \(Block\) costs -2; a cost must be a finite number >= 0"),
        ({"weights": [1, "2", *[1] * 7]}, 2, r"layer 1 \(Block\) costs '2'"),
    ],
)
def test_methods_that_cannot_be_carried_out(method: Any, num_parts: int, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        resolve(method, num_parts)


def test_too_many_parts_are_called_what_the_caller_calls_them() -> None:
    with pytest.raises(PartitionError, match=r"24 layers can't fill 5 stages x 5 chunks; .* at most 24"):
        partition_layers(segment_costs([1] * 24), 25, what="5 stages x 5 chunks")


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_a_cost_that_is_no_finite_number(cost: float) -> None:
    with pytest.raises(PartitionError, match=rf"layer 2 \(head\) costs {cost}; a cost must be a finite number >= 0"):
        partition_layers(segment_costs([1, 2, cost], ["embed", "block", "head"]), 2)


def test_lengths_that_differ() -> None:
    with pytest.raises(PartitionError, match="2 costs, 1 names and 2 tie keys; give one of each a layer"):
        segment_costs([1, 2], ["a"])
