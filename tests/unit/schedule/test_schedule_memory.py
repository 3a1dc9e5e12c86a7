"""Bytes in flight of a program, by hand."""

from __future__ import annotations

import pytest
from schedule_emulator import in_flight

from parallel3d.schedule.builders import build
from parallel3d.schedule.lowering import lower
from parallel3d.schedule.memory import ChunkBytes, bytes_in_flight, learn_chunks


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("num_micro_batches", [1, 3, 8])
def test_saved_activations_are_those_between_forward_and_backward(schedule, num_stages, num_micro_batches):
    chunks = 2 if schedule == "interleaved" else 1
    program = build(schedule, num_stages, num_micro_batches, chunks, "loop", None)
    for rank, most in enumerate(in_flight(program)):
        held = bytes_in_flight(
            program.instructions[rank], dict.fromkeys(range(len(program.placement)), ChunkBytes(saved=10))
        )
        assert max(held) == 10 * most
        assert held[-1] == 0


def test_each_kind_of_bytes_on_a_split_schedule():
    """Stage 1 of 2, one micro-batch: 3 arrive, 1 is loaded, 10 are saved; all is freed for 2 of gradient and 5 deferred."""
    program = lower(build([["F0@0", "I0@0", "W0@0"], ["F0@1", "I0@1", "W0@1"]], 2, 1, 1, "loop", None))
    assert [str(i) for i in program.instructions[1]] == ["RA0@1", "L0@1", "F0@1", "I0@1", "SG0@1", "W0@1"]
    chunk = ChunkBytes(saved=10, received=3, loaded=1, input_gradient=2, deferred=5)
    assert bytes_in_flight(program.instructions[1], {1: chunk}) == [3, 4, 14, 7, 5, 0]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_chunks_are_learnt_from_changes(schedule):
    program = lower(build(schedule, 2, 4, 1, "loop", None))
    deferred = 5 if schedule == "zb-h1" else 0
    chunk = ChunkBytes(saved=10, received=3, loaded=1, input_gradient=2, deferred=deferred)
    held = bytes_in_flight(program.instructions[1], {1: chunk})
    changes = [after - before for before, after in zip([0, *held[:-1]], held, strict=True)]
    # What was sent leaves later than its instruction.
    late = [0 if i.op.name == "SEND_GRADIENT" else c for i, c in zip(program.instructions[1], changes, strict=True)]
    assert learn_chunks(list(zip(program.instructions[1], late, strict=True))) == {1: chunk}
