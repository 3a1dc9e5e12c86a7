"""The simulator against closed forms, published numbers and an emulator that steps the ranks tick by tick."""

from __future__ import annotations

import random
from graphlib import CycleError
from itertools import pairwise

import pytest
from hypothesis import given
from schedule_emulator import SEEDS, Emulator, programs, unhurried

from parallel3d.schedule.builders import from_lists, gpipe, inference, interleaved, one_f_one_b
from parallel3d.schedule.instructions import COMPUTE_OPS, Instruction, Op, Program
from parallel3d.schedule.lowering import add_communication, add_gradient_reduction, add_replica_reduction, lower
from parallel3d.schedule.timing import Simulation, Span, Timeline, simulate


def costs(**by_op: float):
    """costs(F=1, B=2) -> the cost function; what is not named is free."""
    return lambda i: by_op.get(i.op.value, 0)


def spans_of(timeline: Timeline) -> dict[tuple[int, str], tuple[float, float]]:
    return {(s.rank, str(s.instruction)): (s.start, s.end) for s in timeline.spans}


@pytest.mark.parametrize("p", range(1, 9))
def test_1f1b_takes_3_times_m_plus_p_minus_1(p: int) -> None:
    for m in range(1, 17):
        assert simulate(one_f_one_b(p, m)).makespan == 3 * (m + p - 1)


@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 5), (2, 1), (3, 2), (4, 4), (4, 16), (5, 7), (8, 3), (8, 16)])
def test_gpipe_takes_as_long_and_its_bubble_is_the_papers(p: int, m: int) -> None:
    timeline = simulate(gpipe(p, m))
    assert timeline.makespan == 3 * (m + p - 1)
    assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize(
    ("p", "m", "v"),
    [(1, 3, 2), (2, 2, 2), (2, 6, 3), (3, 9, 2), (4, 4, 4), (4, 8, 2), (4, 16, 4), (8, 8, 2), (8, 16, 3)],
)
def test_chunks_divide_the_bubble_where_stages_divide_the_micro_batches(p: int, m: int, v: int) -> None:
    for program in (interleaved(p, m, v), gpipe(p, m, v)):
        timeline = simulate(program)
        assert timeline.makespan == 3 * (v * m + p - 1)
        assert timeline.bubble == pytest.approx((p - 1) / (v * m + p - 1))
    assert simulate(inference(p, m, v)).makespan == v * m + p - 1


@pytest.mark.parametrize(("m", "published_1f1b", "published_v4"), [(8, 0.275, 0.092), (16, 0.160, 0.048)])
def test_bubbles_of_a_transformers_costs_are_the_published_ones(
    m: int, published_1f1b: float, published_v4: float
) -> None:
    """forward : input gradient : weight gradient = 1 : 1.26 : 0.84, 4 stages."""
    transformer = costs(F=1, B=1.26 + 0.84)
    bubble = simulate(one_f_one_b(4, m), transformer).bubble
    assert bubble == pytest.approx(3 / (m + 3), abs=1e-12)
    assert bubble == pytest.approx(published_1f1b, abs=0.008)
    assert simulate(interleaved(4, m, 4), transformer).bubble == pytest.approx(published_v4, abs=0.008)


def test_transfers_delay_what_waits_for_them() -> None:
    assert spans_of(simulate(one_f_one_b(2, 1), costs(F=1, B=2, SA=0.5, SG=0.25))) == {
        (0, "F0@0"): (0, 1),
        (0, "SA0@0"): (1, 1.5),
        (1, "RA0@1"): (1, 1.5),
        (1, "F0@1"): (1.5, 2.5),
        (1, "B0@1"): (2.5, 4.5),
        (1, "SG0@1"): (4.5, 4.75),
        (0, "RG0@0"): (4.5, 4.75),
        (0, "B0@0"): (4.75, 6.75),
    }


def test_a_channel_carries_one_transfer_at_a_time_while_compute_goes_on() -> None:
    spans = spans_of(simulate(inference(2, 3), costs(F=1, SA=3)))
    assert [spans[0, f"F{m}@0"] for m in range(3)] == [(0, 1), (1, 2), (2, 3)]
    assert [spans[0, f"SA{m}@0"] for m in range(3)] == [(1, 4), (4, 7), (7, 10)]
    assert [spans[1, f"F{m}@1"] for m in range(3)] == [(4, 5), (7, 8), (10, 11)]


def test_buckets_are_reduced_as_their_share_of_the_backward_is_through() -> None:
    program = add_gradient_reduction(lower(one_f_one_b(1, 1)), [4])
    spans = spans_of(simulate(program, costs(F=1, B=4, RED=1.5)))
    assert spans[0, "B0@0"] == (1, 5)
    assert [spans[0, f"RED0@0#{b}"] for b in range(4)] == [(2, 3.5), (3.5, 5), (5, 6.5), (6.5, 8)]
    spans = spans_of(simulate(program, costs(F=1, B=4, RED=0.5)))
    assert [spans[0, f"RED0@0#{b}"] for b in range(4)] == [(2, 2.5), (3, 3.5), (4, 4.5), (5, 5.5)]


def test_replicas_are_reduced_together_behind_each_owners_own_reductions() -> None:
    program = add_gradient_reduction(lower(one_f_one_b(2, 1)), [1, 1])
    spans = spans_of(simulate(add_replica_reduction(program, [(0, 1)]), costs(F=1, B=2, RED=1, REP=5)))
    assert spans[1, "RED0@1#0"] == (4, 5)
    assert spans[0, "RED0@0#0"] == (6, 7)
    assert spans[0, "REP0@0#0"] == spans[1, "REP0@0#0"] == (7, 12)


@pytest.mark.parametrize("p", [2, 3, 4, 8, 16])
def test_messages_on_the_way_are_in_the_pace_of_1f1b_which_holds_no_more_micro_batches_for_them(p: int) -> None:
    sending = costs(F=1, B=2, SA=0.25, SG=0.25)
    length = Simulation(lower(one_f_one_b(p, 2 * p))).length(sending)
    assert length.pace == pytest.approx(3 + 2 * 0.25 * (p - 1) / p)
    for m in (3 * p, 12 * p):
        whole = simulate(lower(one_f_one_b(p, m)), sending).makespan
        assert length.makespan + (m - 2 * p) * length.pace == pytest.approx(whole, rel=0.005)
        assert length.makespan + (m - 2 * p) * 3 < whole


def test_a_slow_message_holds_up_the_chunk_with_the_fewest_micro_batches_on_their_way_over_it() -> None:
    """Chunk 1 of 3 has two micro-batches on their way there and back, for 6 and the message's 4; chunk 0 three, for 9 and 4."""

    def cost(i: Instruction) -> float:
        return 4.0 if (i.op, i.chunk) == (Op.SEND_ACTIVATION, 1) else costs(F=1, B=2)(i)

    assert Simulation(lower(one_f_one_b(3, 6))).length(cost).pace == (6 + 4) / 2
    more = simulate(lower(one_f_one_b(3, 40)), cost).makespan - simulate(lower(one_f_one_b(3, 30)), cost).makespan
    assert more == 10 * (6 + 4) / 2


def test_where_all_micro_batches_may_be_in_flight_no_pace_is_known() -> None:
    assert Simulation(lower(gpipe(3, 4))).length(costs(F=1, B=2)) == (18, 0.0)


def test_what_is_called_late_ends_no_earlier() -> None:
    quick, slow = costs(F=1, B=2), costs(F=3, B=4)
    one = Simulation(lower(one_f_one_b(1, 4)))
    assert one.length(quick, slow).makespan == 4 * (3 + 4)
    assert one.length(slow, quick) == one.length(slow)
    # The last stage's host calls as much as any; what the first one waits for in the end is the last backward's message.
    two = Simulation(lower(one_f_one_b(2, 4)))
    assert two.length(costs(), slow).makespan == 4 * (3 + 4)
    assert two.length(costs(SG=5), slow).makespan == 4 * (3 + 4) + 5


@unhurried
@given(programs(), SEEDS)
def test_hosts_make_a_program_longer_by_no_more_than_they_are_busy(program: Program, seed: int) -> None:
    rng = random.Random(seed)
    device = {i: rng.uniform(0, 3) for i in program.rank_of}
    called = {i: rng.uniform(0, 3) for i in program.rank_of}
    simulation = Simulation(program)
    alone = simulation.makespan(lambda i: device.get(i, 0.0))
    busiest = max(sum(called[i] for i in rank if i.op in COMPUTE_OPS) for rank in program.instructions)
    both = simulation.length(lambda i: device.get(i, 0.0), called.__getitem__).makespan
    assert max(alone, busiest) <= both * (1 + 1e-12)
    assert both <= (alone + busiest) * (1 + 1e-12)
    path = simulation.critical_path(lambda i: device.get(i, 0.0), called.__getitem__)
    assert path.host + sum(seconds for _, seconds in path.instructions) == pytest.approx(both)


def test_split_backwards_fill_the_bubble() -> None:
    lists = [["F0@0", "F1@0", "I0@0", "W0@0", "I1@0", "W1@0"], ["F0@1", "I0@1", "F1@1", "I1@1", "W0@1", "W1@1"]]
    split = simulate(from_lists(lists, (0, 1)))
    assert split.makespan == 7
    assert split.bubble == pytest.approx(2 / 14)
    assert simulate(one_f_one_b(2, 2)).makespan == 9


def test_a_program_that_deadlocks_is_not_simulated() -> None:
    with pytest.raises(CycleError):
        simulate(from_lists([["B0@0", "F0@0"]], (0,)))


def test_a_timeline_starts_at_0_in_order_of_ranks_and_counts_compute_alone_as_busy() -> None:
    def span(rank: int, text: str, start: float, end: float) -> Span:
        return Span(rank, Instruction.parse(text), start, end)

    measured = [span(1, "F0@1", 103.0, 104.0), span(0, "SA0@0", 101.0, 103.0), span(0, "F0@0", 100.0, 101.0)]
    timeline = Timeline.of(measured, num_ranks=2)
    assert timeline.spans == (span(0, "F0@0", 0, 1), span(0, "SA0@0", 1, 3), span(1, "F0@1", 3, 4))
    assert timeline.makespan == 4
    assert timeline.bubble == 1 - 2 / 8
    assert Timeline.of([], num_ranks=2).makespan == Timeline.of([], num_ranks=2).bubble == 0


@unhurried
@given(programs(), SEEDS)
def test_every_instruction_of_a_random_program_runs_when_the_emulator_runs_it(program: Program, seed: int) -> None:
    rng = random.Random(seed)
    drawn: dict[Instruction, int] = {}

    def cost(i: Instruction) -> int:
        transfer = i.op in (Op.SEND_ACTIVATION, Op.SEND_GRADIENT)
        return drawn.setdefault(i, rng.randint(0, 3) if transfer else rng.randint(0, 4))

    timeline = simulate(program, cost)
    emulated = Emulator(add_communication(program), cost).run()
    assert {(s.rank, s.instruction): (s.start, s.end) for s in timeline.spans} == emulated
    assert timeline.makespan == max(end for _, end in emulated.values())


@unhurried
@given(programs())
def test_compute_runs_in_list_order_and_never_twice_at_once(program: Program) -> None:
    for rank, instructions in enumerate(program.instructions):
        ran = [s for s in simulate(program).spans if s.rank == rank and s.instruction in instructions]
        assert [s.instruction for s in ran] == list(instructions)
        assert all(a.end <= b.start for a, b in pairwise(ran))
