"""The validator against planted faults, and its verdict on deadlock against ranks that are stepped one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_emulator import SEEDS, Emulator, Stuck, disturbed, programs, unhurried

from parallel3d.errors import ScheduleError
from parallel3d.schedule.builders import from_lists, inference, one_f_one_b
from parallel3d.schedule.instructions import Instruction, Program
from parallel3d.schedule.lowering import add_communication, lower
from parallel3d.schedule.order import validate


def program_of(lists: Sequence[str], placement: tuple[int, ...], num_micro_batches: int) -> Program:
    parsed = tuple(tuple(Instruction.parse(text) for text in instructions.split()) for instructions in lists)
    return Program("by hand", placement, num_micro_batches, parsed)


def changed(program: Program, rank: int, before: str, after: str) -> Program:
    """`program` with one rank's list edited as text."""
    lists = [" ".join(map(str, i)) for i in program.instructions]
    assert before in lists[rank]
    lists[rank] = lists[rank].replace(before, after)
    return program_of(lists, program.placement, program.num_micro_batches)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("F2@1 ", "", r"F2@1 is missing: every micro-batch passes every chunk"),
        ("B2@1 ", "", r"micro-batch 2 on chunk 1 needs either B, or I and W; it has \[\]"),
        ("B2@1", "I2@1", r"micro-batch 2 on chunk 1 needs either B, or I and W; it has \['I'\]"),
        ("B2@1", "B2@1 I2@1 W2@1", r"micro-batch 2 on chunk 1 .* it has \['B', 'I', 'W'\]"),
        ("F2@1", "F2@1 F2@1", r"F2@1 occurs 2 times in the schedule"),
        (
            "F2@1",
            "F2@0",
            r"F2@0 is in the list of stage 1, which holds chunks \[1\]; move it to the stage of chunk 0",
        ),
        ("F2@1", "F2@9", r"F2@9 is outside a program of 3 chunks"),
    ],
)
def test_a_planted_fault_is_found_and_named(before: str, after: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        validate(changed(one_f_one_b(3, 4), 1, before, after))


def test_a_swap_that_deadlocks_is_refused_with_the_instructions_that_wait_for_each_other() -> None:
    # Stage 0 won't run F1 before B0, stage 1 won't run F0, so B0, before F1.
    program = from_lists([["F0@0", "B0@0", "F1@0", "B1@0"], ["F1@1", "F0@1", "B0@1", "B1@1"]], (0, 1))
    with pytest.raises(ScheduleError, match="deadlock") as error:
        validate(program)
    for text in ("B0@0", "F1@0", "F1@1", "F0@1", "B0@1"):
        assert text in str(error.value)
    assert "(" not in str(error.value), "no bare (rank, position) of the graph"


def test_a_backward_before_its_forward_deadlocks() -> None:
    with pytest.raises(ScheduleError, match=r"deadlocks.*B0@0"):
        validate(from_lists([["B0@0", "F0@0"]], (0,)))


def test_a_weight_gradient_before_its_input_gradient_deadlocks() -> None:
    with pytest.raises(ScheduleError, match=r"deadlocks.*W0@0"):
        validate(from_lists([["F0@0", "W0@0", "I0@0"]], (0,)))


def test_a_receive_behind_its_consumer_deadlocks() -> None:
    with pytest.raises(ScheduleError, match=r"deadlocks.*RA0@1"):
        validate(program_of(["F0@0 SA0@0", "F0@1 RA0@1"], (0, 1), 1), training=False)


def test_a_transfer_with_one_end_is_refused() -> None:
    with pytest.raises(ScheduleError, match="SA1@0 in the list of stage 0 has no other end RA1@1"):
        validate(changed(add_communication(one_f_one_b(2, 2)), 1, "RA1@1 ", ""))


@pytest.mark.parametrize(
    ("lists", "placement", "num_micro_batches"),
    [
        pytest.param(["F0@0 SA0@0 F1@0 SA1@0", "RA1@1 RA0@1 F0@1 F1@1"], (0, 1), 2, id="posted not as sent"),
        pytest.param(["F0@0 SA0@0 F1@0", "RA0@1 F0@1 F1@1"], (0, 1), 2, id="a transfer lacks both ends"),
        pytest.param(["F0@0", "SA0@0 RA0@1 F0@1"], (0, 1), 1, id="sent by the receiver"),
        pytest.param(["F0@0 SA0@0 RA0@1", "F0@1"], (0, 1), 1, id="received by the sender"),
        pytest.param(["F0@0 F7@0"], (0,), 1, id="a micro-batch past the number"),
    ],
)
def test_transfers_that_would_hand_over_the_wrong_thing_are_refused(
    lists: list[str], placement: tuple[int, ...], num_micro_batches: int
) -> None:
    with pytest.raises(ScheduleError):
        validate(program_of(lists, placement, num_micro_batches), training=False)


def test_replicas_reduced_in_another_order_on_one_owner_deadlock() -> None:
    lists = ["F0@0 SA0@0 REP0@0#0 REP0@0#1", "RA0@1 F0@1 REP0@0#1 REP0@0#0"]
    with pytest.raises(ScheduleError, match=r"deadlocks.*REP0@0#"):
        validate(program_of(lists, (0, 1), 1), training=False)


def test_a_backward_has_no_place_in_evaluation() -> None:
    validate(inference(2, 2), training=False)
    with pytest.raises(ScheduleError, match="micro-batch 0 on chunk 0 has a backward in a program for evaluation"):
        validate(one_f_one_b(2, 2), training=False)


def accepted(program: Program) -> bool:
    try:
        validate(program)
    except ScheduleError as error:
        if "deadlock" not in str(error):
            raise
        return False
    return True


def runs(program: Program) -> bool:
    try:
        Emulator(add_communication(program), cost=lambda i: 1).run()
    except Stuck:
        return False
    return True


@unhurried
@given(programs())
def test_every_order_that_can_run_is_accepted(program: Program) -> None:
    assert accepted(program)
    assert accepted(lower(program))
    assert runs(program)


@settings(unhurried, max_examples=200)
@given(programs(), SEEDS, st.integers(1, 3))
def test_the_verdict_on_a_disturbed_order_is_that_of_ranks_stepped_one_by_one(
    program: Program, seed: int, swaps: int
) -> None:
    program = disturbed(random.Random(seed), program, swaps)
    assert accepted(program) == runs(program)


@unhurried
@given(programs(max_ranks=3, max_micro_batches=2), SEEDS)
def test_the_verdict_on_a_shuffled_order_is_that_of_ranks_stepped_one_by_one(program: Program, seed: int) -> None:
    rng = random.Random(seed)
    program = program.with_instructions([rng.sample(i, len(i)) for i in program.instructions])
    assert accepted(program) == runs(program)
