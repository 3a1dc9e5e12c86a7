"""For how many messages of its channel a rank needs what it receives."""

from __future__ import annotations

import pytest

from parallel3d.schedule.builders import build, inference
from parallel3d.schedule.instructions import Instruction, Op, Program
from parallel3d.schedule.keeping import messages_behind
from parallel3d.schedule.lowering import lower, lower_training

SCHEDULES = [("1f1b", 1), ("gpipe", 1), ("gpipe", 2), ("interleaved", 2), ("zb-h1", 1), ("zbv", 2), ("zb-looped", 2)]


def lowered(schedule: str, stages: int, chunks: int, micro_batches: int) -> Program:
    placement = "v" if schedule == "zbv" else "loop"
    program = build(schedule, stages, micro_batches, chunks, placement)
    return lower_training(program, [1] * stages * chunks, [], False, False)


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("micro_batches", [4, 12])
def test_a_message_is_gone_when_the_backward_that_needs_it_last_is_through(
    schedule: str, chunks: int, stages: int, micro_batches: int
) -> None:
    """Played slot by slot, with a slot for each message that may be there: nothing is written over that is still needed."""
    program = lowered(schedule, stages, chunks, micro_batches)
    for rank, instructions in enumerate(program.instructions):
        behind = messages_behind(program, rank)
        receipts = [i for i in instructions if i.op in (Op.RECV_ACTIVATION, Op.RECV_GRADIENT)]
        assert set(behind) == set(receipts)
        order = {r: [s for s in receipts if program.channel(s) == program.channel(r)] for r in receipts}
        for r, count in behind.items():
            needs = [
                k
                for k, i in enumerate(instructions)
                if (i.chunk, i.micro_batch) == (r.chunk, r.micro_batch)
                and i.op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
            ]
            later = order[r][order[r].index(r) + 1 :]
            meanwhile = [s for s in later if instructions.index(s) < max(needs)]
            assert meanwhile == later[:count]


def test_1f1b_keeps_what_is_in_flight() -> None:
    """Of 4 stages the second has 3 micro-batches in flight, and posts the next one before the backward that frees the first."""
    program = lowered("1f1b", 4, 1, 12)
    most = [max(messages_behind(program, rank).values()) for rank in range(4)]
    assert most == [1, 3, 2, 1]
    activation = Instruction(Op.RECV_ACTIVATION, 3, 5)
    assert messages_behind(program, 3)[activation] == 1


def test_nothing_of_a_forward_alone_may_stay() -> None:
    program = lower(inference(3, 4))
    assert all(messages_behind(program, rank) == {} for rank in range(3))
