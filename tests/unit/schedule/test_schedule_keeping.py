"""For how many messages of its channel a rank needs what it receives."""

from __future__ import annotations

import pytest

from parallel3d.schedule.builders import build, inference
from parallel3d.schedule.instructions import Instruction, Op, Program
from parallel3d.schedule.keeping import messages_behind
from parallel3d.schedule.lowering import lower, lower_training

SCHEDULES = [
    ("1f1b", 1, "loop"),
    ("gpipe", 1, "loop"),
    ("gpipe", 2, "loop"),
    ("gpipe", 2, "v"),
    ("interleaved", 2, "loop"),
    ("zb-h1", 1, "loop"),
    ("zbv", 2, "v"),
    ("zb-looped", 2, "loop"),
]
RECEIPTS = (Op.RECV_ACTIVATION, Op.RECV_GRADIENT)


def lowered(schedule: str, stages: int, chunks: int, micro_batches: int, placement: str = "loop") -> Program:
    program = build(schedule, stages, micro_batches, chunks, placement)
    return lower_training(program, [1] * stages * chunks, [], False, False)


def last_uses(program: Program, rank: int) -> dict[Instruction, int]:
    """RECV -> the last place in the rank's list where its memory is used, if every chunk hands on, and saves, the very tensors
    that it is given: played, instruction by instruction.
    """
    given: dict[
        tuple[str, int, int], set[Instruction]
    ] = {}  # activation or gradient, chunk, micro-batch -> by which it came
    saved: dict[tuple[int, int], set[Instruction]] = {}
    uses: dict[Instruction, int] = {}
    for position, i in enumerate(program.instructions[rank]):
        c, m = i.chunk, i.micro_batch
        match i.op:
            case Op.RECV_ACTIVATION:
                given["activation", c, m] = {i}
            case Op.RECV_GRADIENT:
                given["gradient", c, m] = {i}
            case Op.FORWARD:
                saved[c, m] = given["activation", c + 1, m] = given.pop(("activation", c, m), set())
            case Op.BACKWARD | Op.BACKWARD_INPUT:
                gradients = given["gradient", c - 1, m] = given.pop(("gradient", c, m), set())
                saved[c, m] = saved[c, m] | gradients
        if i.op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT):
            uses |= dict.fromkeys(saved[c, m], position)
    return uses


@pytest.mark.parametrize(("schedule", "chunks", "placement"), SCHEDULES)
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("micro_batches", [4, 12])
def test_what_comes_before_the_last_use_of_a_message_is_counted(
    schedule: str, chunks: int, placement: str, stages: int, micro_batches: int
) -> None:
    program = lowered(schedule, stages, chunks, micro_batches, placement)
    for rank, instructions in enumerate(program.instructions):
        behind, uses = messages_behind(program, rank), last_uses(program, rank)
        receipts = [i for i in instructions if i.op in RECEIPTS]
        assert set(behind) == set(uses) == set(receipts)
        for r, count in behind.items():
            channel = [s for s in receipts if program.channel(s) == program.channel(r)]
            later = channel[channel.index(r) + 1 :]
            assert [s for s in later if instructions.index(s) < uses[r]] == later[:count]


def test_1f1b_keeps_what_is_in_flight() -> None:
    """Of 4 stages the second has 3 micro-batches in flight, and posts the next one before the backward that frees the first."""
    program = lowered("1f1b", 4, 1, 12)
    most = [max(messages_behind(program, rank).values()) for rank in range(4)]
    assert most == [1, 3, 2, 1]
    activation = Instruction(Op.RECV_ACTIVATION, 3, 5)
    assert messages_behind(program, 3)[activation] == 1


def test_a_gradient_that_a_chunk_hands_on_is_kept_for_the_rank_s_next_chunk() -> None:
    """Of a V: the last rank's two chunks are neighbours, and all backwards of the second come before those of the first."""
    program = lowered("gpipe", 2, 2, 16, "v")
    behind = messages_behind(program, 1)
    assert [behind[Instruction(Op.RECV_GRADIENT, 2, m)] for m in (15, 14, 0)] == [15, 14, 0]


def test_nothing_of_a_forward_alone_may_stay() -> None:
    program = lower(inference(3, 4))
    assert all(messages_behind(program, rank) == {} for rank in range(3))
