"""The search against brute force, closed forms and its memory; what fusing backwards keeps; what a plan promises."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_emulator import SEEDS, in_flight, unhurried

from parallel3d.errors import ScheduleError
from parallel3d.schedule.auto import Measured, Plan, first_plan, limits, make_plan, most_held
from parallel3d.schedule.builders import build, from_lists, placement_of
from parallel3d.schedule.instructions import Instruction, Op, Program
from parallel3d.schedule.order import validate
from parallel3d.schedule.search import ListClock, Memory, search
from parallel3d.schedule.timing import Cost, decoder_cost, simulate
from parallel3d.schedule.traffic import fuse_backwards, whole_backwards


def chunk_costs(seed: int, num_chunks: int) -> Cost:
    rng = random.Random(seed)
    times = {
        (op, c): rng.randint(2, 9)
        for op in (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
        for c in range(num_chunks)
    }
    for c in range(num_chunks):
        times[Op.BACKWARD, c] = times[Op.BACKWARD_INPUT, c] + times[Op.BACKWARD_WEIGHT, c]
    return lambda i: times.get((i.op, i.chunk), 0)


# Brute force


def orders(queues: Sequence[str]) -> Iterator[str]:
    """All ways to merge queues, each in its order."""
    if not any(queues):
        yield ""
    for k, queue in enumerate(queues):
        if queue:
            for rest in orders([*queues[:k], queue[1:], *queues[k + 1 :]]):
                yield queue[0] + rest


def makespan_of_two_stages(first: str, second: str, times: dict[str, int]) -> float:
    """Return the makespan of orders of F, I and W on stages 0 (lower case) and 1; inf for a deadlock."""
    lists, place, free = (first.lower(), second), [0, 0], [0.0, 0.0]
    count: Counter[str] = Counter()
    ended: dict[tuple[str, int], float] = {}
    needs = {"f": "", "F": "f", "I": "F", "i": "I", "W": "I", "w": "i"}
    while place != [len(first), len(second)]:
        moved = False
        for rank in (0, 1):
            while place[rank] < len(lists[rank]):
                kind = lists[rank][place[rank]]
                need = (needs[kind], count[kind])
                if needs[kind] and need not in ended:
                    break
                free[rank] = max(free[rank], ended.get(need, 0.0)) + times[kind]
                ended[kind, count[kind]] = free[rank]
                count[kind] += 1
                place[rank] += 1
                moved = True
        if not moved:
            return float("inf")
    return max(free)


@pytest.mark.parametrize("seed", range(6))
def test_two_stages_are_as_short_as_any_order(seed: int) -> None:
    """Compare with all orders in which each kind of instruction goes from micro-batch to micro-batch."""
    cost, m = chunk_costs(seed, 2), 2
    letters = {"f": (Op.FORWARD, 0), "F": (Op.FORWARD, 1), "i": (Op.BACKWARD_INPUT, 0), "I": (Op.BACKWARD_INPUT, 1)}
    letters |= {"w": (Op.BACKWARD_WEIGHT, 0), "W": (Op.BACKWARD_WEIGHT, 1)}
    times = {letter: cost(Instruction(op, c, 0)) for letter, (op, c) in letters.items()}
    possible = list(orders(["F" * m, "I" * m, "W" * m]))
    shortest = min(makespan_of_two_stages(a, b, times) for a, b in product(possible, possible))
    found = search("s", (0, 1), m, Memory.of_activations((0, 1), 2.0), cost)
    assert simulate(found, cost).makespan == shortest


# Memory


def replay(program: Program, held: Sequence[float], deferred: Sequence[float]) -> list[float]:
    """The most that each rank holds: `held` from F to I, `deferred` from I to W, the larger of both set aside until I."""
    peaks = []
    for instructions in program.instructions:
        now: dict[tuple[int, int], float] = {}
        peak = 0.0
        for i in instructions:
            place = (i.chunk, i.micro_batch)
            if i.op is Op.FORWARD:
                now[place] = max(held[i.chunk], deferred[i.chunk])
            elif i.op is Op.BACKWARD_INPUT:
                now[place] = deferred[i.chunk]
            else:
                del now[place]
            peak = max(peak, sum(now.values()))
        peaks.append(peak)
    return peaks


@unhurried
@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 4), st.sampled_from(["loop", "v"]), st.floats(0, 8), SEEDS)
def test_any_placement_times_and_bytes_within_each_ranks_limit(
    p: int, m: int, v: int, kind: str, spare: float, seed: int
) -> None:
    placement = placement_of(kind, p, 2 if kind == "v" else v)
    rng = random.Random(seed)
    held, deferred = ([rng.uniform(0.5, 3) for _ in placement] for _ in range(2))
    without = Memory(held=tuple(held), deferred=tuple(deferred), limit=())
    limit = tuple(rng.uniform(1, 1 + spare) * x for x in without.least(placement))
    memory = without.model_copy(update={"limit": limit})
    program = search("s", placement, m, memory, chunk_costs(seed, len(placement)))
    validate(program)
    peaks = replay(program, held, deferred)
    assert all(peak <= most * (1 + 1e-6) for peak, most in zip(peaks, memory.limit, strict=True))
    assert most_held(program, memory) == pytest.approx(peaks)


def test_a_whole_backward_defers_nothing() -> None:
    memory = Memory(held=(2.0, 3.0), deferred=(5.0, 1.0), limit=())
    assert most_held(build("1f1b", 2, 4, 1, "loop"), memory) == (2 * 2.0, 3.0)  # two and one in flight
    split = from_lists([["F0@0", "F1@0", "B0@0", "I1@0", "W1@0"], ["F0@1", "B0@1", "F1@1", "I1@1", "W1@1"]], (0, 1))
    assert most_held(split, memory) == (2.0 + 5.0, 3.0)


def test_backwards_are_whole_where_deferring_would_leave_room_for_one_micro_batch() -> None:
    measured = Measured.of((0, 1, 1, 0), decoder_cost, (1.0,) * 4, (4.0,) * 4, 1.5, (8.0, 8.0))
    plan = make_plan((0, 1, 1, 0), 6, measured)
    split = search("split", (0, 1, 1, 0), 6, measured, measured.cost)
    assert plan.makespan < 0.8 * simulate(split, measured.cost).makespan
    assert max(plan.held) <= 8.0


def test_less_than_one_micro_batch_needs_is_refused() -> None:
    with pytest.raises(ScheduleError, match="stage 1 may hold 3, but one micro-batch on its chunks needs 5"):
        search("s", (0, 1, 1, 0), 2, Memory(held=(1, 2, 3, 4), deferred=(0,) * 4, limit=(9, 3)), decoder_cost)


@pytest.mark.parametrize(("kind", "v"), [("loop", 2), ("loop", 4), ("v", 2)])
def test_with_memory_to_spare_only_the_way_to_the_last_rank_is_lost(kind: str, v: int) -> None:
    placement = placement_of(kind, 4, v)
    found = search("s", placement, 12, Memory.of_activations(placement, 99), decoder_cost)
    assert simulate(found, decoder_cost).makespan == pytest.approx(12 * v * 3.1 + 3)


# Whole backwards


def test_halves_side_by_side_become_one_and_the_other_weight_gradients_keep_their_order() -> None:
    program = from_lists([["F0@0", "F1@0", "F2@0", "I0@0", "I1@0", "W0@0", "I2@0", "W1@0", "W2@0"]], (0,))
    fused = fuse_backwards(program, decoder_cost)
    assert [str(i) for i in fused.instructions[0]] == ["F0@0", "F1@0", "F2@0", "I0@0", "B1@0", "B2@0", "W0@0"]


def test_no_backward_is_fused_that_another_stage_waits_for() -> None:
    """The last stage's weight gradient of micro-batch 0 would hold up its input gradient's way."""
    program = from_lists([["F0@0", "I0@0", "W0@0"], ["F0@1", "I0@1", "W0@1"]], (0, 1))
    fused = fuse_backwards(program, decoder_cost)
    assert [[str(i) for i in rank] for rank in fused.instructions] == [["F0@0", "B0@0"], ["F0@1", "I0@1", "W0@1"]]


@unhurried
@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 3), SEEDS)
def test_fusing_makes_nothing_later_and_holds_no_more(p: int, m: int, v: int, seed: int) -> None:
    placement = placement_of("loop", p, v)
    cost = chunk_costs(seed, len(placement))
    program = search("s", placement, m, Memory.of_activations(placement, 1.5 * p * v), cost)
    fused = fuse_backwards(program, cost)
    validate(fused)
    assert simulate(fused, cost).makespan <= simulate(program, cost).makespan * (1 + 1e-6)
    assert all(a <= b for a, b in zip(in_flight(fused), in_flight(program), strict=True))


def test_whole_backwards_stand_where_the_input_gradients_stood() -> None:
    split = build("zb-h1", 2, 3, 1, "loop")
    whole = whole_backwards(split, range(3))
    validate(whole)
    assert whole.instructions == build("1f1b", 2, 3, 1, "loop").instructions
    mixed = whole_backwards(split, [1])
    validate(mixed)
    assert [str(i) for i in mixed.instructions[0]] == "F0@0 F1@0 I0@0 W0@0 F2@0 B1@0 I2@0 W2@0".split()


# Plans


def measured(placement: Sequence[int], max_in_flight: float, transfer: float = 0.01, backward: float = 2.1) -> Measured:
    n = len(placement)
    held = (100.0,) * n
    return Measured(
        forward=(1.0,) * n,
        input_gradient=(1.26,) * n,
        weight_gradient=(0.84,) * n,
        backward=(backward,) * n,
        transfer=transfer,
        held=held,
        deferred=(60.0,) * n,
        limit=limits(placement, held, max_in_flight),
    )


def test_a_plan_is_pure_and_its_file_brings_it_back() -> None:
    plan = make_plan((0, 1, 1, 0), 6, measured((0, 1, 1, 0), 1.5))
    assert plan == make_plan((0, 1, 1, 0), 6, measured((0, 1, 1, 0), 1.5))
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    plan.check((0, 1, 1, 0))
    timeline = simulate(plan.program(6), measured((0, 1, 1, 0), 1.5).cost)
    assert (plan.makespan, plan.bubble) == (timeline.makespan, timeline.bubble)


def test_fewer_micro_batches_get_a_plan_of_their_own() -> None:
    placement = (0, 1, 0, 1)
    plan = make_plan(placement, 8, measured(placement, 1.5))
    assert plan.program(3) == make_plan(placement, 3, measured(placement, 1.5)).program(3)
    validate(plan.program(3))


def test_within_1f1bs_memory_a_plan_is_no_longer_than_zbv() -> None:
    placement = placement_of("v", 4, 2)
    m = measured(placement, 1.0)
    plan = make_plan(placement, 16, m)
    assert plan.makespan <= simulate(build("zbv", 4, 16, 2, "v"), m.cost).makespan
    assert all(h <= most for h, most in zip(plan.held, m.limit, strict=True))


def test_backwards_that_are_shorter_whole_are_whole() -> None:
    """This is so where a weight gradient hides a layer's communication."""
    slow = make_plan((0, 1), 8, measured((0, 1), 1.5))
    fast = make_plan((0, 1), 8, measured((0, 1), 1.5, backward=1.8))
    whole = [sum(text.startswith("B") for rank in plan.instructions for text in rank) for plan in (slow, fast)]
    assert fast.makespan < slow.makespan
    assert whole[1] >= whole[0] > 0


def test_the_first_plan_splits_every_backward() -> None:
    """Both halves can then be measured."""
    plan = first_plan((0, 1, 1, 0), 5, 1.0)
    assert {text[0] for rank in plan.instructions for text in rank} == set("FIW")
    plan.check((0, 1, 1, 0))


@unhurried
@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 3), SEEDS)
def test_the_quick_length_of_a_step_is_the_simulators(p: int, m: int, v: int, seed: int) -> None:
    """Split, whole and mixed backwards, where transfers take time but never meet in a channel."""
    placement = placement_of("loop", p, v)
    own = chunk_costs(seed, len(placement))

    def cost(i: Instruction) -> float:
        return 0.001 if i.op in (Op.SEND_ACTIVATION, Op.SEND_GRADIENT) else own(i)

    split = search("s", placement, m, Memory.of_activations(placement, 1.5 * p * v), cost)
    clock = ListClock(split, cost)
    for program in (split, whole_backwards(split, range(0, m, 2)), whole_backwards(split, range(m))):
        makespan = clock.makespan(clock.lists(program))
        assert makespan == pytest.approx(simulate(program, cost).makespan, rel=1e-6)
