"""Orders of weight gradients that hide reductions: against every order there is, by hand, and the simulator against another."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from schedule_emulator import SEEDS, unhurried

from parallel3d.engine.auto import describe
from parallel3d.errors import ScheduleError
from parallel3d.schedule.auto import Measured, Plan, make_plan, most_held
from parallel3d.schedule.builders import from_lists, placement_of
from parallel3d.schedule.instructions import Op, Program
from parallel3d.schedule.order import validate
from parallel3d.schedule.search import search
from parallel3d.schedule.timing import simulate
from parallel3d.schedule.traffic import Traffic, fuse_backwards, orders_that_hide_reductions, whole_backwards

Letter = tuple[str, int, int]  # F, I, W or B, chunk, micro-batch


def measured(placement: Sequence[int], seed: int, traffic: float, every: bool, gather: float = 0.0) -> Measured:
    """Uneven chunks; traffic: of a chunk's three buckets, in forwards, more or less."""
    rng = random.Random(seed)

    def each(low: float, high: float) -> tuple[float, ...]:
        return tuple(rng.uniform(low, high) for _ in placement)

    input_gradient, weight_gradient = each(1.0, 1.5), each(0.6, 1.1)
    return Measured(
        forward=each(0.8, 1.2),
        input_gradient=input_gradient,
        weight_gradient=weight_gradient,
        backward=tuple(map(sum, zip(input_gradient, weight_gradient, strict=True))),
        transfer=0.0,
        held=(1.0,) * len(placement),
        deferred=(1.0,) * len(placement),
        limit=(99.0,) * (max(placement) + 1),
        gather=each(0.5 * gather, gather),
        reductions=tuple(tuple(rng.uniform(0.5, 1.5) * traffic / 3 for _ in range(3)) for _ in placement),
        reduces_every_micro_batch=every,
    )


# Brute force


def orders(fixed: Sequence[Letter], ready: Counter[int], left: Counter[int]) -> Iterator[list[Letter]]:
    """All ways to put the weight gradients that are left among the rest, each behind an input gradient of its chunk."""
    if not fixed and not left.total():
        yield []
    for chunk in [c for c in left if left[c] and ready[c]]:
        one = Counter({chunk: 1})
        for rest in orders(fixed, ready - one, left - one):
            yield [("W", chunk, 0), *rest]
    if fixed:
        for rest in orders(fixed[1:], ready + Counter({fixed[0][1]: 1} if fixed[0][0] == "I" else {}), left):
            yield [fixed[0], *rest]


def with_whole(order: Sequence[Letter]) -> Iterator[list[Letter]]:
    """The order, and with any of the halves that stand side by side made whole."""
    pairs = [k for k in range(len(order) - 1) if (order[k][0], *order[k + 1][:2]) == ("I", "W", order[k][1])]
    for chosen in product((False, True), repeat=len(pairs)):
        starts = {k for k, is_chosen in zip(pairs, chosen, strict=True) if is_chosen}
        yield [("B", *i[1:]) if k in starts else i for k, i in enumerate(order) if k - 1 not in starts]


def length(lists: Sequence[Sequence[Letter]], m: Measured) -> float:
    """Return the time from the first forward to the end of the last reduction; inf for a deadlock."""
    times = {"F": m.forward, "I": m.input_gradient, "W": m.weight_gradient, "B": m.backward}
    last_chunk = len(m.forward) - 1
    activation: dict[tuple[int, int], float] = {}
    gradient: dict[tuple[int, int], float] = {}
    free, place, line = [0.0] * len(lists), [0] * len(lists), [0.0] * len(lists)
    completed: list[dict[int, tuple[float, float]]] = [{} for _ in lists]

    def reduce(rank: int, chunk: int, start: float, end: float) -> None:
        buckets = m.reductions[chunk]
        for k, seconds in enumerate(buckets):
            full = start + (end - start) * (k + 1) / len(buckets)
            line[rank] = max(line[rank], full) + seconds

    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(lists):
            for op, c, micro_batch in order[place[rank] :]:
                arrived = {"F": activation.get((c - 1, micro_batch)) if c else 0.0, "W": 0.0}
                ready = arrived.get(op, gradient.get((c + 1, micro_batch)) if c < last_chunk else 0.0)
                if ready is None:
                    break
                start = max(free[rank], ready)
                end = free[rank] = start + times[op][c]
                if op != "W":
                    (activation if op == "F" else gradient)[c, micro_batch] = end
                if op in "BW" and m.reduces_every_micro_batch:
                    reduce(rank, c, start, end)
                elif op in "BW":
                    completed[rank].pop(c, None)
                    completed[rank][c] = start, end
                place[rank] += 1
                moved = True
    for rank, chunks in enumerate(completed):
        for chunk, (start, end) in chunks.items():
            reduce(rank, chunk, start, end)
    return max(*free, *line) if place == [len(order) for order in lists] else float("inf")


def shortest(program: Program, m: Measured) -> float:
    """Return the shortest of all programs with forwards and input gradients in this order, split or whole."""
    ranks = []
    for instructions in program.instructions:
        fixed = [
            ("I" if i.op is Op.BACKWARD else i.op.value, i.chunk, i.micro_batch)
            for i in instructions
            if i.op is not Op.BACKWARD_WEIGHT
        ]
        left = Counter(c for op, c, _ in fixed if op == "I")
        ranks.append([whole for order in orders(fixed, Counter(), left) for whole in with_whole(order)])
    return min(length(lists, m) for lists in product(*ranks))


CASES = [("loop", 1, 3), ("v", 2, 2), ("loop", 2, 2)]


@pytest.mark.parametrize("every", [False, True], ids=["once", "every micro-batch"])
@pytest.mark.parametrize(("kind", "num_chunks", "num_micro_batches"), CASES)
@pytest.mark.parametrize("traffic", [0.5, 2.0])
def test_no_order_of_the_weight_gradients_is_3_percent_shorter(
    kind: str, num_chunks: int, num_micro_batches: int, traffic: float, every: bool
) -> None:
    placement = placement_of(kind, 2, num_chunks)
    m = measured(placement, 7, traffic, every)
    plan = make_plan(placement, num_micro_batches, m)
    assert plan.makespan <= 1.03 * shortest(plan.program(num_micro_batches), m)


# By hand


def one_rank(traffic: float, every: bool = False) -> Measured:
    ones = (1.0, 1.0)
    return Measured(
        forward=ones,
        input_gradient=ones,
        weight_gradient=ones,
        backward=(2.0, 2.0),
        transfer=0.0,
        held=ones,
        deferred=ones,
        limit=(9.0,),
        reductions=((traffic,), (traffic,)),
        reduces_every_micro_batch=every,
    )


TWO_CHUNKS = "F0@0 F0@1 F1@0 F1@1 I0@1 I0@0 I1@1 I1@0 W0@0 W0@1 W1@0 W1@1".split()


def test_weight_gradients_complete_one_chunk_after_the_other_or_follow_at_once() -> None:
    passes = TWO_CHUNKS[:8]
    found = [
        list(map(str, order.instructions[0])) for order in orders_that_hide_reductions(from_lists([TWO_CHUNKS], (0, 0)))
    ]
    assert found[0] == [*passes, *"W0@1 W1@1 W0@0 W1@0".split()]
    assert found[1] == [*passes, *"W0@0 W1@0 W0@1 W1@1".split()]
    assert found[2] == [*passes[:4], *"I0@1 W0@1 I0@0 W0@0 I1@1 W1@1 I1@0 W1@0".split()]
    assert found[5] == [*passes[:4], *"I0@1 W0@1 I0@0 W0@0 I1@1 I1@0 W1@0 W1@1".split()]  # half of them
    assert found[6] == [*passes, *"W0@0 W0@1 W1@0 W1@1".split()]  # the last one, which is chunk 1's


def test_chunks_are_completed_one_after_the_other() -> None:
    """Of 72 of compute the weight gradients are the last 24: complete at 56, 64 and 72, and reduced 6 later each."""
    ones = (1.0,) * 3
    m = one_rank(6.0).model_copy(
        update={"reductions": ((6.0,),) * 3, "backward": (2.0,) * 3, "held": ones, "deferred": ones}
    )
    m = m.model_copy(update=dict.fromkeys(("forward", "input_gradient", "weight_gradient"), ones))
    batches = range(8)
    passes = [
        f"{op}{k}@{c}" for op, chunks in (("F", "012"), ("I", "210"), ("W", "012")) for k in batches for c in chunks
    ]
    orders = orders_that_hide_reductions(from_lists([passes], (0, 0, 0)))
    assert min(simulate(m.with_traffic(order), m.cost).makespan for order in orders) == 78


def test_a_plan_says_how_much_is_exposed() -> None:
    """Nothing avoids that a rank has the last chunk's gradients to reduce when its last backward is through."""
    for traffic in (0.0, 1.0, 3.0):
        plan = make_plan((0, 0), 4, one_rank(traffic))
        assert (plan.makespan, plan.exposed, plan.bubble) == (24 + traffic, traffic, 0)
        line = f"  gathers and reductions of up to {2e3 * traffic:.4g} ms a stage, {1e3 * traffic:.4g} ms exposed"
        assert (line in describe(plan).splitlines()) == (traffic > 0)


def test_what_a_rank_exchanges_in_a_step() -> None:
    reductions = ((0.5, 0.25), (1.0,))
    assert Traffic(gather=(2.0, 0.0), reductions=reductions).busy((0, 1), 2) == 2.75
    assert Traffic(reductions=reductions, reduces_every_micro_batch=True).busy((0, 1), 2) == 2.0
    assert not Traffic(reductions=((), (0.0,))).has_reductions


def test_an_order_that_does_not_fit_is_not_taken() -> None:
    """The weight gradients of the small chunk at once, those of the large one at the end: that would hold 3.1."""
    bytes_of = {"held": (1.0, 0.1), "deferred": (1.0, 0.1)}
    plans = [
        make_plan((0, 0), 3, one_rank(3.0).model_copy(update=bytes_of | {"limit": (most,)})) for most in (9.0, 2.5)
    ]
    assert plans[1].held[0] <= 2.5 < plans[0].held[0]


# What holds for any program


@settings(unhurried, max_examples=40)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 3), SEEDS)
def test_orders_are_programs_with_the_same_forwards_and_input_gradients(p: int, m: int, v: int, seed: int) -> None:
    placement = placement_of("loop", p, v)
    times = measured(placement, seed, 1.0, False).model_copy(update={"limit": (1.0 * p * v,) * p})
    fused = fuse_backwards(search("s", placement, m, times, times.cost), times.cost)
    for order in orders_that_hide_reductions(fused):
        validate(order)
        for new, old in zip(order.instructions, fused.instructions, strict=True):
            kept = [[i for i in rank if i.op is not Op.BACKWARD_WEIGHT] for rank in (new, old)]
            assert kept[0] == kept[1]


@settings(unhurried, max_examples=40)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 3), st.booleans(), st.floats(0.0, 4.0), SEEDS)
def test_a_plan_stays_within_memory(p: int, m: int, v: int, every: bool, traffic: float, seed: int) -> None:
    placement = placement_of("loop", p, v)
    times = measured(placement, seed, traffic, every, gather=1.0)
    rng = random.Random(seed)
    deferred = tuple(rng.uniform(0.2, 1.0) for _ in placement)
    times = times.model_copy(update={"deferred": deferred, "limit": (1.0 * p * v,) * p})
    program = make_plan(placement, m, times).program(m)
    validate(program)
    assert all(h <= most * (1 + 1e-6) for h, most in zip(most_held(program, times), times.limit, strict=True))


@settings(unhurried, max_examples=40)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 3), st.booleans(), st.floats(0.0, 4.0), SEEDS)
def test_a_plan_is_no_longer_than_one_made_without_knowing_of_reductions(
    p: int, m: int, v: int, every: bool, traffic: float, seed: int
) -> None:
    placement = placement_of("loop", p, v)
    times = measured(placement, seed, traffic, every, gather=1.0)
    without = make_plan(placement, m, times.model_copy(update={"reductions": ()}))
    before = simulate(times.with_traffic(without.program(m)), times.cost).makespan
    assert make_plan(placement, m, times).makespan <= before * (1 + 1e-5)


def letters(program: Program) -> list[list[Letter]]:
    return [[(i.op.value, i.chunk, i.micro_batch) for i in rank] for rank in program.instructions]


@unhurried
@given(st.integers(1, 4), st.integers(1, 6), st.booleans(), st.floats(0.0, 4.0), SEEDS)
@example(4, 4, False, 0.0, 210471)  # a gradient that its receiver takes only after the sender's last instruction
def test_the_simulator_ends_a_step_with_its_last_reduction(
    p: int, m: int, every: bool, traffic: float, seed: int
) -> None:
    """With one chunk a rank messages are needed in the order in which they are sent, as in `length`."""
    placement = placement_of("loop", p, 1)
    times = measured(placement, seed, traffic, every)
    split = search("s", placement, m, times, times.cost)
    for program in (split, whole_backwards(split, range(0, m, 2)), whole_backwards(split, range(m))):
        timeline = simulate(times.with_traffic(program), times.cost)
        assert timeline.makespan == pytest.approx(length(letters(program), times))


# A plan's file


def test_a_plan_without_traffic_in_its_file_has_none() -> None:
    plan = make_plan((0, 1, 1, 0), 4, measured((0, 1, 1, 0), 1, 0.0, False))
    stored = plan.model_dump()
    del stored["exposed"]
    for key in ("gather", "reductions", "reduces_every_micro_batch"):
        del stored["measured"][key]
    old = Plan.model_validate(stored)
    old.check((0, 1, 1, 0))
    assert not old.measured.has_reductions
    assert old.program(4) == plan.program(4)
    assert old.program(3) == plan.program(3)
    assert old.exposed == plan.exposed == 0


def test_a_plan_with_traffic_comes_back_from_its_file() -> None:
    plan = make_plan((0, 1), 4, measured((0, 1), 1, 1.0, True, gather=0.5))
    assert plan.exposed > 0
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    for key, value in (("gather", (1.0,)), ("reductions", ((1.0,), (1.0,), (1.0,)))):
        wrong = plan.model_copy(update={"measured": plan.measured.model_copy(update={key: value})})
        with pytest.raises(ScheduleError, match="gathers or reductions are not of 2 chunks"):
            wrong.check((0, 1))
