"""DeepSpeed's schedules: two small ones literally, and for any size that both ends of a transfer share a step."""

from __future__ import annotations

from itertools import pairwise

import pytest

from parallel3d.deepspeed.schedules import (
    BackwardPass,
    BufferOpInstruction,
    DataParallelSchedule,
    ForwardPass,
    InferenceSchedule,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    SendActivation,
    SendGrad,
    TrainSchedule,
)

SHORT = {"LoadMicroBatch": "L", "ForwardPass": "F", "BackwardPass": "B", "OptimizerStep": "step"}
SHORT |= {"SendActivation": "SA", "RecvActivation": "RA", "SendGrad": "SG", "RecvGrad": "RG"}
SHORT |= {"ReduceTiedGrads": "ties", "ReduceGrads": "reduce"}


def shown(schedule: PipeSchedule) -> list[str]:
    return [" ".join(f"{SHORT[c.name]}{getattr(c, 'buffer_id', '')}" for c in commands) for commands in schedule]


def test_small_schedules():
    assert shown(TrainSchedule(3, 2, 0)) == [
        "L0 F0",
        "SA0",
        "L1 F1",
        "RG0 SA1 B0",
        "L0 F0",
        "RG1 SA0 B1",
        "",
        "RG0 B0 ties reduce step",
    ]
    assert shown(TrainSchedule(3, 2, 1)) == [
        "",
        "RA0 L0 F0",
        "B0",
        "SG0 RA1 L1 F1",
        "B1",
        "SG1 RA0 L0 F0",
        "B0",
        "SG0 ties reduce step",
    ]
    assert shown(InferenceSchedule(2, 3, 0)) == ["L0 F0", "L1 SA0 F1", "SA1", ""]
    assert shown(InferenceSchedule(2, 3, 1)) == ["", "RA0 F0", "RA1 SA0 F1", "SA1"]
    assert shown(InferenceSchedule(2, 3, 2)) == ["", "", "L0 RA0 F0", "L1 RA1 F1"]
    assert shown(DataParallelSchedule(2, 1, 0)) == ["L0 F0 B0", "L0 F0 B0 reduce step"]


@pytest.mark.parametrize("schedule", [TrainSchedule, InferenceSchedule])
@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("micro_batches", [1, 4, 7])
def test_both_ends_of_a_transfer_are_in_one_step(schedule: type[PipeSchedule], stages: int, micro_batches: int):
    ranks = [schedule(micro_batches, stages, stage) for stage in range(stages)]
    for step in zip(*ranks, strict=True):
        for here, following in pairwise(step):
            for sent, received, source, target in (
                (SendActivation, RecvActivation, here, following),
                (SendGrad, RecvGrad, following, here),
            ):
                assert sum(type(c) is sent for c in source) == sum(type(c) is received for c in target)
    for rank in ranks:
        commands = [c for step in rank for c in step]
        buffers = [c.buffer_id for c in commands if isinstance(c, BufferOpInstruction)]
        assert max(buffers) < rank.num_pipe_buffers()
        assert sum(type(c) is ForwardPass for c in commands) == micro_batches
        backwards = sum(type(c) is BackwardPass for c in commands)
        assert backwards == (micro_batches if schedule is TrainSchedule else 0)
