"""Lifetimes of sharded weights: gathers as few as Belady's rule needs, in the order of the runs, within the limits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.errors import ScheduleError
from parallel3d.schedule.builders import build
from parallel3d.schedule.instructions import COMPUTE_OPS, Instruction, Op, Program
from parallel3d.schedule.lifetimes import ChunkUses, Lifetimes, LiveLimits, Use, live_choices, peak_live


def layers(first: int, count: int) -> ChunkUses:
    """A chunk of layers, each a unit of its own."""
    forward = tuple((unit,) for unit in range(first, first + count))
    return ChunkUses(forward, forward[::-1])


def runs_of(program: Program, uses: list[ChunkUses], rank: int) -> list[Use]:
    computes = [i for i in program.instructions[rank] if i.op in COMPUTE_OPS]
    return list(chain(*(uses[i.chunk].of(i.op) for i in computes)))


def room_in(run: int, room: int, freed: Sequence[int]) -> int:
    return room + (freed[min(run, len(freed) - 1)] if freed else 0)


def belady(runs: list[Use], sizes: dict[int, int], room: int, freed: Sequence[int]) -> int:
    """The number of gathers if, for lack of room, the unit whose next use is farthest is always released."""
    held: set[int] = set()
    gathers = 0
    for k, use in enumerate(runs):
        gathers += len(set(use) - held)
        held |= set(use)
        while sum(sizes[u] for u in held) > room_in(k, room, freed):
            later = {u: next((t for t in range(k + 1, len(runs)) if u in runs[t]), 10**9) for u in held - set(use)}
            held.remove(max(later, key=lambda u: (later[u], sizes[u], u)))
    return gathers


def gathers_of(program: Program, rank: int) -> int:
    return sum(i.op is Op.GATHER_PARAMS for i in program.instructions[rank])


# The design's table: gathers of a step for 2, 4 and 8 live units, and for all.
PIPELINE = build("1f1b", 4, 16, 1, "loop", None), [layers(8 * c, 8) for c in range(4)]
DEPTH_FIRST = build("1f1b", 1, 16, 1, "loop", None), [layers(0, 32)]
BREADTH_FIRST = build("gpipe", 1, 16, 8, "loop", None), [layers(4 * c, 4) for c in range(8)]


@pytest.mark.parametrize(
    ("program", "uses", "counts"),
    [
        (*PIPELINE, {2: 198, 4: 132, 8: 8, 32: 8}),
        (*DEPTH_FIRST, {2: 962, 4: 900, 8: 776, 32: 32}),
        (*BREADTH_FIRST, {2: 702, 4: 60, 8: 56, 32: 32}),
    ],
    ids=["1f1b", "depth first", "breadth first"],
)
def test_gathers_are_those_of_the_designs_table(program: Program, uses: list[ChunkUses], counts: dict[int, int]):
    sizes = dict.fromkeys(range(32), 1)
    found = {live: gathers_of(Lifetimes(uses, sizes, LiveLimits(live, 0)).add_to(program), 0) for live in counts}
    assert found == counts


@st.composite
def cases(draw: st.DrawFn) -> tuple[Program, list[ChunkUses], dict[int, int], LiveLimits, list[list[int]]]:
    schedule, stages, chunks = draw(
        st.sampled_from([("1f1b", 2, 1), ("gpipe", 1, 3), ("interleaved", 2, 2), ("zb-h1", 2, 1), ("zbv", 2, 2)])
    )
    program = build(schedule, stages, draw(st.integers(1, 5)), chunks, "v" if schedule == "zbv" else "loop", None)
    units = draw(st.integers(1, 6))
    use = st.lists(st.integers(0, units - 1), max_size=2, unique=True).map(tuple)
    sequence = st.lists(use, max_size=6).map(tuple)
    uses = [ChunkUses(draw(sequence), draw(sequence)) for _ in range(program.num_chunks)]
    sizes = {unit: draw(st.integers(1, 9)) for unit in range(units)}
    least = sum(sorted(sizes.values())[-2:])
    limits = LiveLimits(
        draw(st.integers(least, least + 20)), draw(st.integers(0, 20)), draw(st.sampled_from([0, 5, 1 << 60]))
    )
    freed = st.lists(st.integers(0, 20), max_size=30)
    return program, uses, sizes, limits, [draw(freed) for _ in range(draw(st.integers(0, stages)))]


def replay(
    instructions: tuple[Instruction, ...],
    uses: list[ChunkUses],
    sizes: dict[int, int],
    most: int,
    freed: Sequence[int] = (),
) -> None:
    """Carry out a rank's list as an executor does: each unit is there when it is used, within the limit, and none is left."""
    live: set[int] = set()
    waiting: list[Instruction] = []
    run = 0

    def carry_out(until: int) -> None:
        while waiting and waiting[0].run <= until:
            i = waiting.pop(0)
            if i.op is Op.GATHER_PARAMS:
                assert i.bucket not in live
                live.add(i.bucket)
            else:
                live.remove(i.bucket)

    for i in instructions:
        if i.run is not None:
            waiting.append(i)
        elif i.op in COMPUTE_OPS:
            for use in uses[i.chunk].of(i.op):
                carry_out(run)
                assert live.issuperset(use)
                assert sum(sizes[u] for u in live) <= room_in(run, most, freed)
                run += 1
            carry_out(run)
            assert not waiting
    assert not live
    assert not waiting


@given(cases())
def test_each_unit_is_there_when_it_is_used_within_the_limits(case):
    program, uses, sizes, limits, freed = case
    with_lifetimes = Lifetimes(uses, sizes, limits).add_to(program, freed)
    for rank, (instructions, more) in enumerate(zip_longest(with_lifetimes.instructions, freed, fillvalue=())):
        replay(instructions, uses, sizes, limits.live, more)
        assert tuple(i for i in instructions if i.run is None) == program.instructions[rank]
        assert len(set(instructions)) == len(instructions)


@given(cases())
def test_gathers_are_as_few_as_beladys_rule_needs_in_the_room(case):
    program, uses, sizes, limits, freed = case
    limits = LiveLimits(limits.live, limits.ahead)
    with_lifetimes = Lifetimes(uses, sizes, limits).add_to(program, freed)
    for rank, (_, more) in enumerate(zip_longest(with_lifetimes.instructions, freed, fillvalue=())):
        runs = runs_of(program, uses, rank)
        has_room_for_all = sum(sizes[u] for u in set(chain(*runs))) <= limits.live
        room = limits.live - (0 if has_room_for_all else limits.fit(sizes, runs).ahead)
        assert gathers_of(with_lifetimes, rank) == belady(runs, sizes, room, more)


@given(cases())
def test_peak_is_what_an_executor_holds_at_most(case):
    program, uses, sizes, limits, freed = case
    with_lifetimes = Lifetimes(uses, sizes, limits).add_to(program, freed)
    for instructions, more in zip_longest(with_lifetimes.instructions, freed, fillvalue=()):
        peak = peak_live(instructions, sizes, more)
        replay(instructions, uses, sizes, peak, more)  # fits
        if peak:
            with pytest.raises(AssertionError):
                replay(instructions, uses, sizes, peak - 1, more)


def test_a_gather_ahead_runs_while_the_layer_before_it_does():
    program = build("1f1b", 1, 1, 1, "loop", None)
    lifetimes = Lifetimes([layers(0, 3)], dict.fromkeys(range(3), 4), LiveLimits(live=8, ahead=4))
    [instructions] = lifetimes.add_to(program).instructions
    assert list(map(str, instructions)) == [
        *("AG0@0#0.0", "AG0@0#1.0", "RL0@0#0.1", "AG0@0#2.1", "RL0@0#1.2", "AG0@0#1.2", "F0@0"),
        *("RL0@0#2.4", "AG0@0#0.4", "RL0@0#1.5", "RL0@0#0.6", "B0@0"),
    ]


def test_weights_stay_while_the_activations_have_left_room_for_them():
    # Eight layers of 2, whose activations take 3 each; two of them are live where all activations are there.
    program = build("1f1b", 1, 8, 1, "loop", None)
    held = [*range(8), *reversed(range(8))] * 8
    freed = [[3 * (7 - layers) for layers in held]]
    lifetimes = Lifetimes([layers(0, 8)], dict.fromkeys(range(8), 2), LiveLimits(live=4, ahead=2))
    assert gathers_of(lifetimes.add_to(program), 0) == 8 + 15 * 7
    filled = lifetimes.add_to(program, freed)
    # The first forward gathers all, and each backward all but the last layer: the forward had to release them.
    assert gathers_of(filled, 0) == 8 + 8 * 7
    [instructions] = filled.instructions
    assert peak_live(instructions, dict.fromkeys(range(8), 2)) == 16
    assert peak_live(instructions, dict.fromkeys(range(8), 2), freed[0]) == 4


def test_a_far_next_use_releases_at_once():
    program = build("1f1b", 1, 2, 1, "loop", None)
    lifetimes = Lifetimes([layers(0, 3)], dict.fromkeys(range(3), 4), LiveLimits(live=100, ahead=0, reuse=4))
    # Of each pass of three layers, the last is used again at once, and the one before it after 4 elements + its own.
    assert gathers_of(lifetimes.add_to(program), 0) == 9


def test_too_little_room_is_an_error_that_names_the_key_and_the_number():
    lifetimes = Lifetimes([layers(0, 3)], {0: 5, 1: 7, 2: 4}, LiveLimits(live=11, ahead=0))
    message = r"11 elements .* two largest layers have 12; set zero_optimization.stage3_max_live_parameters"
    with pytest.raises(ScheduleError, match=message):
        lifetimes.add_to(build("1f1b", 1, 2, 1, "loop", None))


def test_limits_to_choose_from_have_room_for_the_largest_units_of_each_rank():
    ranks = [{0: 9, 1: 2, 2: 2, 3: 2, 4: 2}, {5: 6, 6: 6, 7: 1}]
    assert live_choices(ranks) == [12, 13, 15, 17]
    assert live_choices([{0: 4}]) == [4]
    for live in live_choices(ranks):
        for own in ranks:
            program = build("1f1b", 1, 2, 1, "loop", None)
            Lifetimes([layers(min(own), len(own))], own, LiveLimits(live, 0)).add_to(program)
