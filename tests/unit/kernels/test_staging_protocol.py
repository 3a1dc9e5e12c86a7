"""Accesses to peers' staging, in all interleavings: no stale read, race or lost signal unless a rule is broken."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from staging_protocol import Call, Fault, Model, Rules, explore, play

ONE, TWO, SCATTER = Call("one-shot", 1), Call("two-shot", 1), Call("scatter", 1)
ONE_WIDE, TWO_WIDE, SCATTER_WIDE = Call("one-shot", 2), Call("two-shot", 2), Call("scatter", 2)


@pytest.mark.parametrize("first", [ONE, TWO, ONE_WIDE, TWO_WIDE], ids=str)
def test_two_ranks_in_any_order_of_calls_and_numbers_of_blocks(first: Call, full: bool) -> None:
    """Without --full half of the orders, in which every two calls meet at every two places."""
    kinds = (ONE, TWO, ONE_WIDE, TWO_WIDE)
    for sequence in itertools.product([first], kinds, kinds):
        if full or sum(map(kinds.index, sequence)) % 2 == 0:
            assert explore(Model(2, sequence)) > 100


def test_two_ranks_with_calls_enough_to_use_each_half_twice() -> None:
    for sequence in itertools.product((ONE, TWO), repeat=5):
        assert explore(Model(2, sequence)) > 100
    assert explore(Model(2, (ONE_WIDE, TWO, ONE, TWO_WIDE, ONE_WIDE))) > 1000


@pytest.mark.parametrize("sequence", list(itertools.product((ONE, TWO), repeat=3)), ids=str)
def test_three_ranks_in_any_order_of_calls(sequence: Sequence[Call]) -> None:
    assert explore(Model(3, sequence)) > 4000


def test_one_meeting_is_enough_for_what_is_pushed_into_two_halves() -> None:
    for sequence in itertools.product((SCATTER, SCATTER_WIDE), repeat=3):
        assert explore(Model(2, sequence)) > 100
    assert explore(Model(2, (SCATTER,) * 5)) > 100
    assert explore(Model(3, (SCATTER,) * 3)) > 4000


CALLS = st.builds(Call, st.sampled_from(["one-shot", "two-shot", "scatter"]), st.integers(1, 3))


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 4), st.lists(CALLS, min_size=2, max_size=7), st.integers(0, 2**32))
def test_more_ranks_blocks_and_calls_at_random(ranks: int, sequence: list[Call], seed: int) -> None:
    play(Model(ranks, sequence, width=3), random.Random(seed))


@pytest.mark.parametrize(
    ("rules", "sequence", "fault"),
    [
        (Rules(half=lambda number, own: 0), (ONE, ONE), "race|stale"),
        (Rules(half=lambda number, own: 0), (SCATTER, SCATTER), "race|stale"),
        (Rules(half=lambda number, own: own % 2), (ONE_WIDE, ONE, ONE_WIDE, ONE, ONE_WIDE), "race|stale"),
        (Rules(meets=(False, True)), (ONE,), "race|stale"),
        (Rules(meets=(True, False)), (TWO,), "race|stale"),
        (Rules(meets=(False, True)), (SCATTER,), "race|stale"),
        (Rules(signals_first=True), (ONE,), "race|stale"),
        (Rules(enough=lambda found, epoch: found == epoch), (TWO,), "lost signal"),
        (Rules(waits_for_own_kernel=False), (ONE_WIDE, ONE_WIDE, ONE_WIDE), "race|stale"),
    ],
    ids=[
        "one half",
        "one half for what is pushed",
        "a half by the block's own count",
        "one-shot without meeting",
        "two-shot with one meeting",
        "pushes without meeting",
        "signals before what they tell of",
        "flags instead of epochs",
        "calls on two streams at once",
    ],
)
def test_each_rule_is_needed(rules: Rules, sequence: Sequence[Call], fault: str) -> None:
    assert explore(Model(2, sequence)) > 10
    with pytest.raises(Fault, match=fault):
        explore(Model(2, sequence, rules))
