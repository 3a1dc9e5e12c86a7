"""What recorded gathers and reductions say of a chunk's: by hand."""

from __future__ import annotations

from parallel3d.monitor.measured import traffic_times
from parallel3d.monitor.timers import StepRecord, one_after_another
from parallel3d.schedule.instructions import Instruction
from parallel3d.schedule.simulate import Span


def record(*spans: tuple[str, float, float]) -> StepRecord:
    """(instruction, start, end) of each."""
    traffic = tuple(Span(0, Instruction.parse(text), start, end) for text, start, end in spans)
    return StepRecord(0.0, 0.0, 0.0, (), (), traffic)


def test_a_work_begins_when_the_one_before_it_is_through():
    spans = record(("RED0@1#0", 1, 4), ("RED0@1#1", 2, 5), ("AG0@0", 8, 9), ("AG0@0", 8.5, 8.75)).traffic
    assert [(s.start, s.end) for s in one_after_another(spans)] == [(1, 4), (4, 5), (8, 9), (9, 9)]


def test_the_last_replica_to_come_says_how_long_a_reduction_takes_and_the_median_step_counts():
    early, late = record(("RED3@1#0", 0, 10), ("RED3@1#1", 10, 12)), record(("RED3@1#0", 8, 10), ("RED3@1#1", 10, 12.5))
    slow = [record(("RED3@1#0", 0, 50), ("RED3@1#1", 50, 99))]
    fast = [record(("RED3@1#0", 0, 3), ("RED3@1#1", 3, 4))]
    gather, reductions = traffic_times([[early, late], slow, fast], 3)
    assert gather == (0, 0, 0)
    assert reductions == ((), (3, 2), ())


def test_a_chunks_gather_is_that_of_all_its_buckets_and_every_micro_batch_has_a_say():
    step = [
        record(("AG0@0", 0, 2), ("AG0@2", 2, 3), ("AG0@0", 3, 6)),
        record(("RED0@1#0", 0, 1), ("RED1@1#0", 2, 5), ("RED2@1#0", 9, 11)),
    ]
    assert traffic_times([step], 3) == ((5, 0, 1), ((), (2,), ()))


def test_nothing_recorded_takes_no_time():
    assert traffic_times([[record()]], 2) == ((0, 0), ((), ()))
