"""Times of a chunk's gathers and reductions from recorded ones, computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from parallel3d.comm.clock import Clock
from parallel3d.comm.collectives import Awaited, Group
from parallel3d.comm.topology import ProcessTopology
from parallel3d.monitor.records import StepRecord, instruction_times, time_for_host, traffic_times
from parallel3d.monitor.steps import StepRecorder
from parallel3d.schedule.instructions import Instruction, Op
from parallel3d.schedule.timing import Span

Work = tuple[str, int, int, int, float, float]


def record(*works: Work) -> StepRecord:
    """(op, micro-batch, chunk, bucket, launched, done) of each."""
    spans = [Span(0, Instruction(Op(op), chunk, m, bucket), *times) for op, m, chunk, bucket, *times in works]
    of_op = [tuple(s for s in spans if s.instruction.op is op) for op in (Op.REDUCE_GRADS, Op.GATHER_PARAMS)]
    return StepRecord(0.0, 0.0, 0.0, (), (), *of_op)


def traffic(steps: Sequence[Sequence[StepRecord]], num_chunks: int) -> tuple[Any, Any]:
    """steps: of each, the records of all replicas."""
    topology = ProcessTopology(["data"], [len(steps[0]) if steps else 1])
    return traffic_times(instruction_times(steps, topology), num_chunks)


def test_the_last_replica_to_come_says_how_long_a_reduction_takes_and_the_median_step_counts():
    early = record(("RED", 3, 1, 0, 0, 10), ("RED", 3, 1, 1, 1, 12))
    late = record(("RED", 3, 1, 0, 8, 10), ("RED", 3, 1, 1, 9, 12))
    slow, fast = (
        record(("RED", 3, 1, 0, 0, first), ("RED", 3, 1, 1, 0, second)) for first, second in ((50, 99), (3, 4))
    )
    gather, reductions = traffic([[early, late], [slow, slow], [fast, fast]], 3)
    assert gather == (0, 0, 0)
    assert reductions == ((), (3, 2), ())


def test_a_chunks_gather_is_that_of_all_its_buckets_one_behind_the_other_and_every_micro_batch_has_a_say():
    step = record(
        *(("AG", 0, 0, 0, 20, 22), ("AG", 0, 2, 1, 20, 23), ("AG", 0, 0, 2, 20, 26)),
        *(("RED", 0, 1, 0, 0, 1), ("RED", 1, 1, 0, 2, 5), ("RED", 2, 1, 0, 9, 11)),
    )
    assert traffic([[step]], 3) == ((2 + 3, 0, 1), ((), (2,), ()))


def test_nothing_recorded_takes_no_time():
    assert traffic([[record()]], 2) == ((0, 0), ((), ()))
    assert traffic([], 1) == ((0,), ((),))


class Told:
    """A work whose end a test tells."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def get_future(self) -> Told:
        return self

    def add_done_callback(self, call: object) -> None:
        self.calls.append(call)

    def wait(self) -> None:
        raise AssertionError("recording waits for nothing")

    is_completed = wait


@pytest.mark.parametrize(("ended", "recorded"), [(2, ["AG0@0#0", "AG0@0#1"]), (1, [])])
def test_gathers_are_recorded_apart_and_all_or_none_of_them(ended: int, recorded: list[str]):
    recorder, works = StepRecorder(0, Clock()), [Told(), Told(), Told()]
    for text, work in zip(("RED0@0#0", "AG", "AG"), works, strict=True):
        bucket = works.index(work) - 1
        i = Instruction(Op.GATHER_PARAMS, 0, 0, bucket) if text == "AG" else Instruction.parse(text)
        recorder.launched(i, Awaited(work, Group((0,), None).waiting("")))
    for work in works[: 1 + ended]:
        for call in work.calls:
            call(None)
    recorder.finish()
    read = recorder.read()
    assert [str(s.instruction) for s in read.reductions] == ["RED0@0#0"]
    assert [str(s.instruction) for s in read.gathers] == recorded


def queued(launch: float, kernel: float, depth: int) -> StepRecord:
    """Forwards of 50 kernels each on a device that takes `kernel` for one, whose host takes `launch` and has `depth` queued."""
    host, ends, spans, launched = 0.0, [0.0], [], []
    for m in range(8):
        start = max(host, ends[-1])
        for _ in range(50):
            host = max(host, ends[-depth] if len(ends) > depth else 0.0) + launch
            ends.append(max(host, ends[-1]) + kernel)
        spans.append(Span(0, Instruction(Op.FORWARD, 0, m), start, ends[-1]))
        launched.append(host)
    return StepRecord(0.0, 0.0, 0.0, tuple(spans), launched=tuple(launched))


@pytest.mark.parametrize("depth", [20, 1000])
def test_a_device_waits_for_a_host_that_takes_longer_than_its_kernels(depth: int):
    slow, fast = (queued(launch, 1.0, depth) for launch in (1.2, 0.7))
    # Where the queue is full, a fast host takes as long as the device.
    assert (fast.launched[-1] > 0.9 * fast.spans[-1].end) == (depth == 20)
    assert time_for_host([slow, slow]) == 1.0
    assert time_for_host([fast]) == 0.0
    assert 0.5 < time_for_host([slow, fast]) < 0.6  # their times are 1.2 to 1
    assert time_for_host([]) == 0.0
