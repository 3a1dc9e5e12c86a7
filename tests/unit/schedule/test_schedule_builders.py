"""Schedules against the papers' figures, written out by hand, and over all sizes that the framework promises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_emulator import check, in_flight, programs, unhurried

from parallel3d.errors import ScheduleError
from parallel3d.schedule.builders import build, from_lists, gpipe, inference, interleaved, one_f_one_b, placement_of
from parallel3d.schedule.instructions import BUCKET_OPS, Instruction, Op, Program
from parallel3d.schedule.order import validate
from parallel3d.schedule.timing import simulate


def figure(program: Program, first: int) -> list[str]:
    """The rows as a figure prints them, counting from `first`: 1 forward, b1 backward, 1' on the second chunk."""
    marks = {Op.FORWARD: "", Op.BACKWARD: "b"}
    return [
        " ".join(f"{marks[i.op]}{i.micro_batch + first}{chr(39) * (i.chunk // program.num_ranks)}" for i in rank)
        for rank in program.instructions
    ]


def test_gpipe_is_figure_2c_of_its_paper() -> None:
    assert figure(gpipe(4, 4), first=0) == ["0 1 2 3 b3 b2 b1 b0"] * 4


def test_1f1b_is_the_default_schedule_of_figure_4_of_the_megatron_paper() -> None:
    assert figure(one_f_one_b(4, 8), first=1) == [
        "1 2 3 4 b1 5 b2 6 b3 7 b4 8 b5 b6 b7 b8",
        "1 2 3 b1 4 b2 5 b3 6 b4 7 b5 8 b6 b7 b8",
        "1 2 b1 3 b2 4 b3 5 b4 6 b5 7 b6 8 b7 b8",
        "1 b1 2 b2 3 b3 4 b4 5 b5 6 b6 7 b7 8 b8",
    ]


def test_interleaved_is_the_lower_half_of_figure_4_of_the_megatron_paper() -> None:
    program = interleaved(4, 8, 2)
    assert program.placement == (0, 1, 2, 3, 0, 1, 2, 3)
    assert figure(program, first=1) == [
        "1 2 3 4 1' 2' 3' 4' 5 6 7 b1' 8 b2' 5' b3' 6' b4' 7' b1 8' b2 b3 b4 b5' b6' b7' b8' b5 b6 b7 b8",
        "1 2 3 4 1' 2' 3' 4' 5 b1' 6 b2' 7 b3' 8 b4' 5' b1 6' b2 7' b3 8' b4 b5' b6' b7' b8' b5 b6 b7 b8",
        "1 2 3 4 1' 2' 3' b1' 4' b2' 5 b3' 6 b4' 7 b1 8 b2 5' b3 6' b4 7' b5' 8' b6' b7' b8' b5 b6 b7 b8",
        "1 2 3 4 1' b1' 2' b2' 3' b3' 4' b4' 5 b1 6 b2 7 b3 8 b4 5' b5' 6' b6' 7' b7' 8' b8' b5 b6 b7 b8",
    ]


def test_interleaved_drops_what_a_number_not_divisible_by_the_stages_lacks() -> None:
    """The paper's order of four micro-batches, of which the first is missing."""
    assert figure(interleaved(2, 3, 2), first=0) == [
        "0 0' 1 2 b0' 1' 2' b0 b1' b2' b1 b2",
        "0 0' b0' 1 2 b0 1' b1' 2' b2' b1 b2",
    ]


def test_interleaved_drops_the_first_since_the_last_would_cost_more() -> None:
    """At p = 4, m = 9, v = 2 dropping the last three of twelve leaves a bubble of .217."""
    assert simulate(interleaved(4, 9, 2)).bubble < 0.21
    for p, m, v in [(4, 5, 4), (4, 10, 2), (8, 9, 2), (8, 19, 2)]:
        whole = interleaved(p, -(-m // p) * p, v)
        assert simulate(interleaved(p, m, v)).makespan <= simulate(whole.first(m)).makespan


def test_interleaved_with_fewer_micro_batches_than_stages() -> None:
    assert figure(interleaved(3, 1, 2), first=0) == ["0 0' b0' b0"] * 3


def test_one_stage_alternates_forward_and_backward() -> None:
    assert figure(one_f_one_b(1, 3), first=0) == ["0 b0 1 b1 2 b2"]


def test_inference_goes_through_the_chunks_group_by_group() -> None:
    assert figure(inference(4, 4), first=0) == ["0 1 2 3"] * 4
    assert figure(inference(2, 3, 2), first=0) == ["0 1 0' 1' 2 2'"] * 2


def test_gpipe_on_a_v_puts_first_and_last_chunk_on_stage_0() -> None:
    program = gpipe(2, 2, 2, placement="v")
    assert program.placement == (0, 1, 1, 0)
    assert [" ".join(map(str, i)) for i in program.instructions] == [
        "F0@0 F1@0 F0@3 F1@3 B1@3 B0@3 B1@0 B0@0",
        "F0@1 F1@1 F0@2 F1@2 B1@2 B0@2 B1@1 B0@1",
    ]


Case = tuple[int, int, int]
WHOLE = [(p, m, v) for p in range(1, 9) for m in range(1, 17) for v in range(1, 5)]
# Every pair (m, v) once, every pair (p, v) twice, and half of the pairs (p, m); (8, 16, 4) is among them.
COVER = [(p, m, v) for p, m, v in WHOLE if (m - p - 2 * v) % 8 == 0]
# schedule -> (how it is built, the bound on the activations of rank r that its docstring states)
PROMISES: dict[str, tuple[Callable[[int, int, int], Program], Callable[[int, int, int, int], int]]] = {
    "gpipe": (gpipe, lambda p, m, v, r: v * m),
    "gpipe on a v": (lambda p, m, v: gpipe(p, m, 2, "v"), lambda p, m, v, r: 2 * m),
    "1f1b": (lambda p, m, v: one_f_one_b(p, m), lambda p, m, v, r: min(m, p - r)),
    "interleaved": (interleaved, lambda p, m, v, r: min(m * v, (v - 1) * p + 2 * (p - r - 1) + 1)),
}


def sizes(schedule: str, cases: list[Case]) -> Iterator[Case]:
    """Return the sizes for which the schedule differs; with one chunk, `interleaved` is 1f1b."""
    seen = set()
    for p, m, v in cases:
        key = (p, m) if schedule in ("gpipe on a v", "1f1b") else (p, m, v)
        if key not in seen and not (schedule == "interleaved" and v == 1):
            seen.add(key)
            yield p, m, v


@pytest.fixture
def cases(pytestconfig: pytest.Config) -> list[Case]:
    return WHOLE if pytestconfig.getoption("--full", default=False) else COVER


def expected(num_chunks: int, m: int, ops: str) -> Counter[str]:
    return Counter(f"{op}{k}@{c}" for op in ops for c in range(num_chunks) for k in range(m))


@pytest.mark.parametrize("schedule", PROMISES)
def test_every_size_is_complete_free_of_deadlock_and_within_its_bound(schedule: str, cases: list[Case]) -> None:
    make, bound = PROMISES[schedule]
    for p, m, v in sizes(schedule, cases):
        program = make(p, m, v)
        assert program.num_ranks == p
        assert Counter(str(i) for rank in program.instructions for i in rank) == expected(program.num_chunks, m, "FB")
        check(program, [bound(p, m, v, r) for r in range(p)])


def test_inference_of_every_size_is_complete_and_free_of_deadlock(cases: list[Case]) -> None:
    for p, m, v in cases:
        program = inference(p, m, v)
        assert Counter(str(i) for rank in program.instructions for i in rank) == expected(p * v, m, "F")
        validate(program, training=False)


@pytest.mark.parametrize(("p", "m", "v"), [(4, 8, 1), (4, 8, 2), (4, 16, 4), (8, 16, 3)])
def test_bounds_are_reached_once_the_pipeline_is_full(p: int, m: int, v: int) -> None:
    bound = PROMISES["interleaved" if v > 1 else "1f1b"][1]
    assert in_flight(interleaved(p, m, v)) == tuple(bound(p, m, v, r) for r in range(p))


def test_interleaved_with_one_chunk_is_1f1b() -> None:
    assert interleaved(3, 5, 1) == one_f_one_b(3, 5)


@unhurried
@given(programs(), st.integers(1, 4))
def test_the_first_micro_batches_of_a_valid_program_are_a_valid_program(program: Program, first: int) -> None:
    first = min(first, program.num_micro_batches)
    part = program.first(first)
    assert part.num_micro_batches == first
    for whole, kept in zip(program.instructions, part.instructions, strict=True):
        assert list(kept) == [i for i in whole if i.micro_batch < first]
    validate(part)


def test_more_micro_batches_than_a_program_has_are_refused_with_both_numbers() -> None:
    with pytest.raises(ScheduleError, match=r"'1f1b' is written for 4 micro-batches and can't run 5"):
        one_f_one_b(2, 4).first(5)


@unhurried
@given(
    st.sampled_from(Op),
    st.integers(0, 999),
    st.integers(0, 99),
    st.integers(0, 99),
    st.integers(0, 999),
)
def test_what_an_instruction_prints_parses_to_itself(
    op: Op, micro_batch: int, chunk: int, bucket: int, run: int
) -> None:
    run_of = run if op is Op.RELEASE_PARAMS or (op is Op.GATHER_PARAMS and run % 2) else None
    i = Instruction(op, chunk, micro_batch, bucket if op in BUCKET_OPS or run_of is not None else None, run_of)
    assert Instruction.parse(str(i)) == i
    assert Instruction.parse(f"  {i}\n") == i


def test_short_form_of_an_instruction() -> None:
    assert Instruction.parse("F3@2") == Instruction(Op.FORWARD, chunk=2, micro_batch=3)
    assert Instruction.parse("RED7@1#4") == Instruction(Op.REDUCE_GRADS, chunk=1, micro_batch=7, bucket=4)


@pytest.mark.parametrize("text", ["", "F3", "F@2", "f3@2", "X3@2", "F-1@0", "F3@2@1", "F3 @2", "FF3@2"])
def test_other_forms_are_refused_and_the_right_one_is_shown(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an instruction; write OP MICRO_BATCH @ CHUNK as in 'F3@2'"):
        Instruction.parse(text)


def test_a_users_lists_make_a_program() -> None:
    lists = [["F0@0", "F1@0", "B0@0", "B1@0"], ["F0@1", "B0@1", "F1@1", "I1@1", "W1@1"]]
    program = build(lists, num_stages=2, num_micro_batches=2, num_chunks=1, placement="loop")
    assert program.num_micro_batches == 2
    assert [[str(i) for i in rank] for rank in program.instructions] == lists
    validate(program)
    shorter = build(lists, num_stages=2, num_micro_batches=1, num_chunks=1, placement="loop")
    assert [" ".join(map(str, i)) for i in shorter.instructions] == ["F0@0 B0@0", "F0@1 B0@1"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: one_f_one_b(0, 4), "num_stages is 0; a schedule needs at least 1"),
        (lambda: gpipe(2, 0), "num_micro_batches is 0"),
        (lambda: interleaved(2, 4, 0), "num_chunks is 0"),
        (lambda: build("1f2b", 2, 2, 1, "loop"), r"unknown schedule '1f2b'.*Did you mean '1f1b'\?"),
        (
            lambda: build("1f1b", 2, 2, 2, "loop"),
            'schedule "1f1b" needs num_chunks 1, but num_chunks is 2 .* or schedule to "interleaved"',
        ),
        (
            lambda: build("interleaved", 2, 2, 2, "v"),
            '"interleaved" needs placement "loop", but num_chunks is 2 and placement is .v.',
        ),
        (lambda: build("gpipe", 2, 2, 3, "v"), 'placement "v" puts 2 chunks on each stage, but num_chunks is 3'),
        (lambda: placement_of("lop", 2, 1), r"unknown placement 'lop'.*Did you mean 'loop'\?"),
        (lambda: from_lists([["F0@0", "SA0@0"]], (0,)), "SA0@0 in a user's schedule: list compute instructions alone"),
        (lambda: from_lists([["F0@0", "B0@0"]], (0, 1)), "1 lists for 2 stages"),
        (lambda: from_lists([["F0@0", "B0"]], (0,)), "'B0' is not an instruction"),
        (lambda: build([["F0@0", "B0@0"]], 1, 2, 1, "loop"), "written for 1 micro-batches and can't run 2"),
    ],
)
def test_errors_say_the_value_and_the_remedy(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        call()


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_build_finds_each_schedule_by_its_name(schedule: str) -> None:
    assert build(schedule, 2, 4, 1, "loop").name in (schedule, "1f1b")
