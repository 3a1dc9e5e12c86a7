"""Zero-bubble schedules against the paper, closed forms, a published table, and over all sizes that the framework promises."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_emulator import SEEDS, Emulator, check, in_flight, unhurried

from parallel3d.errors import ScheduleError
from parallel3d.schedule.builders import build, looped_zero_bubble, one_f_one_b, zb_h1, zbv
from parallel3d.schedule.instructions import Instruction, Op, Program, v_placement
from parallel3d.schedule.lowering import add_communication, lower
from parallel3d.schedule.timing import Cost, Timeline, decoder_cost, simulate, unit_cost


def costs(forward: float, input_gradient: float, weight_gradient: float, transfer: float = 0.0) -> Cost:
    times = {
        Op.FORWARD: forward,
        Op.BACKWARD_INPUT: input_gradient,
        Op.BACKWARD_WEIGHT: weight_gradient,
        Op.BACKWARD: input_gradient + weight_gradient,
        Op.SEND_ACTIVATION: transfer,
        Op.SEND_GRADIENT: transfer,
    }
    return lambda i: times.get(i.op, 0.0)


TRANSFORMER = costs(1, 1.26, 0.84)


def figure(program: Program, first: int) -> list[str]:
    """The rows as a figure prints them: 1 forward, b1 input gradient, w1 weight gradient, 1' on the rank's second chunk."""
    marks = {Op.FORWARD: "", Op.BACKWARD_INPUT: "b", Op.BACKWARD_WEIGHT: "w"}
    return [
        " ".join(f"{marks[i.op]}{i.micro_batch + first}{chr(39) * (i.chunk // program.num_ranks)}" for i in rank)
        for rank in program.instructions
    ]


def spans_of_ranks(timeline: Timeline) -> list[tuple[float, float]]:
    """Start of the first and end of the last compute of each rank."""
    ranks: list[list[tuple[float, float]]] = [[] for _ in range(timeline.num_ranks)]
    for s in timeline.spans:
        if s.instruction.op in (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT):
            ranks[s.rank].append((s.start, s.end))
    return [(min(start for start, _ in times), max(end for _, end in times)) for times in ranks]


# --------------------------------------------------------------------------------------------------------- ZB-H1


def test_zb_h1_is_figure_3_of_its_paper() -> None:
    """In the order in which its authors' implementation for Megatron-DeepSpeed yields it, too."""
    assert figure(zb_h1(4, 8), first=1) == [
        "1 2 3 4 b1 w1 5 b2 w2 6 b3 w3 7 b4 w4 8 b5 w5 b6 w6 b7 w7 b8 w8",
        "1 2 3 b1 4 b2 w1 5 b3 w2 6 b4 w3 7 b5 w4 8 b6 w5 b7 w6 b8 w7 w8",
        "1 2 b1 3 b2 4 b3 w1 5 b4 w2 6 b5 w3 7 b6 w4 8 b7 w5 b8 w6 w7 w8",
        "1 b1 2 b2 3 b3 4 b4 w1 5 b5 w2 6 b6 w3 7 b7 w4 8 b8 w5 w6 w7 w8",
    ]


def test_zb_h1_with_few_micro_batches() -> None:
    assert figure(zb_h1(2, 1), first=0) == ["0 b0 w0", "0 b0 w0"]
    assert figure(zb_h1(2, 2), first=0) == ["0 1 b0 w0 b1 w1", "0 b0 1 b1 w0 w1"]
    assert figure(zb_h1(3, 2), first=0) == ["0 1 b0 w0 b1 w1", "0 1 b0 b1 w0 w1", "0 b0 1 b1 w0 w1"]
    assert figure(zb_h1(1, 2), first=0) == ["0 b0 w0 1 b1 w1"]


@pytest.mark.parametrize("p", range(1, 9))
def test_zb_h1_takes_3_m_plus_p_minus_1(p: int) -> None:
    for m in range(1, 17):
        assert simulate(zb_h1(p, m)).makespan == (3 * m + p - 1 if m >= p else 2 * m + 2 * p - 1)


TIMES = st.integers(1, 9)


@unhurried
@given(st.integers(1, 6), st.integers(0, 6), TIMES, TIMES, TIMES)
def test_the_bubble_of_zb_h1_is_the_papers_for_any_times(p: int, more: int, f: int, b: int, w: int) -> None:
    """(p - 1) (F + B - W) where W is the shortest; where it is not, a longer W fills no more."""
    m = p + more
    assert simulate(zb_h1(p, m), costs(f, b, w)).makespan == m * (f + b + w) + (p - 1) * (f + b - min(f, b, w))


def test_zb_h1_orders_forwards_and_input_gradients_as_1f1b() -> None:
    for rank, whole in zip(zb_h1(4, 8).instructions, one_f_one_b(4, 8).instructions, strict=True):
        kept = [(i.op is Op.FORWARD, i.micro_batch) for i in rank if i.op is not Op.BACKWARD_WEIGHT]
        assert kept == [(i.op is Op.FORWARD, i.micro_batch) for i in whole]


# ----------------------------------------------------------------------------------------------------------- ZBV


def test_zbv_of_two_stages() -> None:
    program = zbv(2, 4)
    assert program.placement == (0, 1, 1, 0)
    assert figure(program, first=1) == [
        "1 2 3 1' b1' w1' 2' b2' w2' 4 b1 w1 3' b3' w3' b2 w2 4' b4' w4' b3 w3 b4 w4",
        "1 1' 2 2' b1' w1' 3 b1 w1 3' b2' w2' 4 b2 w2 4' b3' w3' b3 b4' b4 w3 w4' w4",
    ]


def test_zbv_with_fewer_micro_batches_than_fill_the_pipeline() -> None:
    assert figure(zbv(2, 1), first=1) == ["1 1' b1' w1' b1 w1", "1 1' b1' w1' b1 w1"]
    assert figure(zbv(1, 2), first=1) == ["1 1' b1' w1' 2 b1 w1 2' b2' w2' b2 w2"]


@pytest.mark.parametrize("p", range(1, 9))
def test_zbv_takes_6_m_plus_p_minus_1_and_no_rank_waits_in_between(p: int) -> None:
    for m in range(1, 17):
        timeline = simulate(zbv(p, m))
        assert timeline.makespan == max(6 * m + p - 1, 4 * m + 4 * p - 2)
        if m >= 2 * p - 1:
            assert spans_of_ranks(timeline) == [(rank, rank + 6 * m) for rank in range(p)]


@unhurried
@given(st.integers(1, 5), st.integers(0, 4), st.data())
def test_the_bubble_of_zbv_is_an_input_gradient_a_rank_where_that_is_the_longest(p: int, more: int, data) -> None:
    b = data.draw(TIMES)
    f, w = data.draw(st.integers(1, b)), data.draw(st.integers(-(-b // 2), b))
    m = 2 * p + more
    assert simulate(zbv(p, m), costs(f, b, w)).makespan == 2 * m * (f + b + w) + (p - 1) * b


# -------------------------------------------------------------------------------------------------- looped chunks


def test_looped_of_two_stages() -> None:
    program = looped_zero_bubble(2, 2, 2)
    assert (program.name, program.placement) == ("zb-looped", (0, 1, 0, 1))
    assert figure(program, first=1) == [
        "1 2 1' 2' b1' w1' b2' b1 w2' w1 b2 w2",
        "1 2 1' b1' 2' b2' b1 w1' w2' b2 w1 w2",
    ]


@pytest.mark.parametrize(("m", "published"), [(8, (0.149, 0.074, 0.030)), (16, (0.080, 0.038, 0.015))])
def test_bubbles_of_a_transformers_times_are_no_larger_than_published(m: int, published: tuple[float, ...]) -> None:
    """4 stages."""
    for program, bubble in zip((zb_h1(4, m), zbv(4, m), looped_zero_bubble(4, m, 4)), published, strict=True):
        assert simulate(program, TRANSFORMER).bubble < bubble


def test_looped_reaches_the_least_makespan(full: bool) -> None:
    """The last rank waits p - 1 forwards for its first, then no more."""
    for p, m, v in [case for case in cases(full) if case[1] >= case[0]]:
        assert simulate(looped_zero_bubble(p, m, v, cost=unit_cost)).makespan == 3 * m * v + p - 1


@pytest.mark.parametrize(("p", "m", "v"), [(4, 9, 4), (4, 16, 4), (2, 8, 4)])
def test_looped_hides_transfers_of_a_tenth_of_a_forward(p: int, m: int, v: int) -> None:
    """All but those of the first micro-batch on its way to the last rank."""
    slow = simulate(looped_zero_bubble(p, m, v, cost=unit_cost), costs(1, 1, 1, transfer=0.1)).makespan
    assert slow == pytest.approx(3 * m * v + (p - 1) * 1.1)


def test_looped_plans_for_the_times_it_is_given() -> None:
    long_weight_gradients = costs(1, 1, 3)
    told = simulate(looped_zero_bubble(4, 8, 2, cost=long_weight_gradients), long_weight_gradients)
    assert told.bubble == pytest.approx(3 / (5 * 8 * 2 + 3))
    assert simulate(looped_zero_bubble(4, 8, 2), long_weight_gradients).bubble > 2 * told.bubble


@pytest.mark.parametrize("multiple", [1 / 3, 0.4, 0.75, 1, 1.25, 2, float("inf")])
def test_looped_keeps_within_the_memory_it_is_given(multiple: float) -> None:
    for m, v in ((1, 3), (4, 2), (7, 4), (12, 3)):
        bound = min(3 * v * multiple + 1e-6, v * m)
        check(looped_zero_bubble(3, m, v, max_in_flight=multiple), [int(bound)] * 3)


def test_looped_is_no_slower_with_more_memory() -> None:
    makespans = [simulate(looped_zero_bubble(4, 8, 4, x, unit_cost)).makespan for x in (0.25, 0.5, 0.75, 1, 1.5)]
    assert makespans == sorted(makespans, reverse=True)
    assert makespans[-1] == 3 * 8 * 4 + 3


def test_equal_arguments_give_equal_programs() -> None:
    assert looped_zero_bubble(4, 9, 3) == looped_zero_bubble(4, 9, 3)
    assert looped_zero_bubble(4, 9, 3) == looped_zero_bubble(4, 9, 3, 1.5, decoder_cost)


def test_a_rough_order_is_nearly_as_short_and_within_the_same_memory() -> None:
    def transfers_count(i: Instruction) -> float:
        return 0.05 if i.op in (Op.SEND_ACTIVATION, Op.SEND_GRADIENT) else decoder_cost(i)

    for p, m, v in ((2, 8, 4), (4, 8, 2), (4, 12, 4), (8, 18, 2)):
        whole, rough = (looped_zero_bubble(p, m, v, roughly=roughly) for roughly in (False, True))
        check(rough, [int(1.5 * p * v)] * p)
        assert simulate(rough, transfers_count).makespan <= 1.02 * simulate(whole, transfers_count).makespan


def random_costs(seed: int) -> Callable[[Instruction], int]:
    """Any times, of each instruction its own; transfers may be free."""
    rng, drawn = random.Random(seed), dict[Instruction, int]()

    def cost(i: Instruction) -> int:
        if i not in drawn:
            drawn[i] = rng.randint(0, 4) if i.op in (Op.SEND_ACTIVATION, Op.SEND_GRADIENT) else rng.randint(1, 9)
        return drawn[i]

    return cost


@unhurried
@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 3), st.floats(1, 20), SEEDS)
def test_looped_is_valid_for_any_times_and_memory(p: int, m: int, v: int, activations: float, seed: int) -> None:
    multiple = max(activations, v) / (p * v)
    program = looped_zero_bubble(p, m, v, multiple, random_costs(seed))
    assert program == looped_zero_bubble(p, m, v, multiple, random_costs(seed))
    check(program, [int(p * v * multiple + 1e-6)] * p)
    assert placed(program) == expected(program.num_chunks, m)


# ------------------------------------------------------------------------------------------------------ all of them


Case = tuple[int, int, int]
WHOLE = [(p, m, v) for p in range(1, 9) for m in range(1, 17) for v in range(1, 5)]
# Every pair (m, v) once, every pair (p, v) twice, and half of the pairs (p, m); (8, 16, 4) is among them.
COVER = [(p, m, v) for p, m, v in WHOLE if (m - p - 2 * v) % 8 == 0]
SCHEDULES: dict[str, tuple[Callable[[int, int, int], Program], Callable[[int, int, int], int]]] = {
    "zb-h1": (lambda p, m, v: zb_h1(p, m), lambda p, m, v: min(m, p)),
    "zbv": (lambda p, m, v: zbv(p, m), lambda p, m, v: 2 * min(m, p)),
    "zb-looped": (looped_zero_bubble, lambda p, m, v: min(m * v, 3 * p * v // 2)),
}


def cases(full: bool) -> list[Case]:
    return WHOLE if full else COVER


def placed(program: Program) -> Counter[str]:
    return Counter(str(i) for rank in program.instructions for i in rank)


def expected(num_chunks: int, m: int) -> Counter[str]:
    return Counter(f"{op}{k}@{c}" for op in "FIW" for c in range(num_chunks) for k in range(m))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_size_is_complete_free_of_deadlock_and_within_its_memory(schedule: str, full: bool) -> None:
    make, bound = SCHEDULES[schedule]
    for p, m, v in cases(full) if schedule == "zb-looped" else dict.fromkeys((p, m, 1) for p, m, _ in cases(full)):
        program = make(p, m, v)
        assert program.num_ranks == p
        assert placed(program) == expected(program.num_chunks, m)
        check(lower(program), [bound(p, m, v)] * p)


@pytest.mark.parametrize("p", range(1, 9))
def test_memory_is_that_of_1f1b(p: int) -> None:
    for m in (1, 2 * p, 16):
        first = in_flight(one_f_one_b(p, m))[0]
        assert in_flight(zb_h1(p, m)) == (first,) * p
        assert in_flight(zbv(p, m)) == (2 * first,) * p  # of half the size
        assert zbv(p, m).placement == v_placement(p)


@pytest.mark.parametrize(
    "program", [zb_h1(4, 7), zbv(3, 6), zbv(4, 3), looped_zero_bubble(3, 7, 2)], ids=lambda p: p.name
)
def test_simulation_and_emulation_agree(program: Program) -> None:
    for seed in range(3):
        cost = random_costs(seed)
        emulated = Emulator(add_communication(program), cost).run()
        assert {(s.rank, s.instruction): (s.start, s.end) for s in simulate(program, cost).spans} == emulated


def test_build_finds_each_by_its_name_and_hands_on_the_memory() -> None:
    assert build("zb-h1", 4, 8, 1, "loop") == zb_h1(4, 8)
    assert build("zbv", 4, 8, 2, "v") == zbv(4, 8)
    assert build("zb-looped", 4, 8, 2, "loop") == looped_zero_bubble(4, 8, 2)
    assert build("zb-looped", 4, 8, 2, "loop", max_in_flight=1) == looped_zero_bubble(4, 8, 2, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: zb_h1(0, 4), "num_stages is 0; a schedule needs at least 1"),
        (lambda: zbv(2, 0), "num_micro_batches is 0"),
        (lambda: looped_zero_bubble(2, 4, 0), "num_chunks is 0"),
        (
            lambda: looped_zero_bubble(3, 4, 2, max_in_flight=0.3),
            "max_in_flight 0.3 lets a stage hold 1.8 activations of a chunk, but a micro-batch alone needs those of its 2 "
            r"chunks; set pipeline.max_in_flight to 0.3334 or more",
        ),
        (lambda: looped_zero_bubble(2, 4, 2, max_in_flight=float("nan")), "max_in_flight nan"),
        (
            lambda: build("zb-h1", 2, 4, 2, "loop"),
            '"zb-h1" needs num_chunks 1, but num_chunks is 2 .* or schedule to "zb-looped"',
        ),
        (
            lambda: build("zbv", 2, 4, 2, "loop"),
            'needs num_chunks 2 and placement "v", but num_chunks is 2 and placement is .loop.',
        ),
        (lambda: build("zbv", 2, 4, 1, "loop"), 'needs num_chunks 2 and placement "v", but num_chunks is 1'),
        (
            lambda: build("zb-looped", 2, 4, 2, "v"),
            '"zb-looped" needs placement "loop", but num_chunks is 2 and placement is .v.',
        ),
        (lambda: build("zb-v", 2, 4, 2, "v"), r"unknown schedule 'zb-v'.*Did you mean 'zbv'\?"),
        (lambda: build("zbv", 2, 4, 2, "v", max_in_flight=1), "bounds schedule 'zb-looped', but the schedule is 'zbv'"),
        (lambda: build([["F0@0", "B0@0"]], 1, 1, 1, "loop", 1.0), "the schedule is written as lists; leave it out"),
    ],
)
def test_errors_say_the_value_and_the_remedy(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        call()


def test_the_least_memory_that_the_error_names_suffices() -> None:
    for p in range(1, 9):
        with pytest.raises(ScheduleError) as error:
            looped_zero_bubble(p, 3, 3, max_in_flight=0.01)
        least = float(str(error.value).split("max_in_flight to ")[1].split(" or more")[0])
        check(looped_zero_bubble(p, 3, 3, least), [3] * p)
