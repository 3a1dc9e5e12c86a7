"""The parts of a step add up, and say what the simulator knows."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.monitor.memory import phase_table
from parallel3d.monitor.records import Breakdown, StepRecord, break_down, breakdown_table, mean_of
from parallel3d.monitor.steps import offset_between
from parallel3d.schedule.builders import build
from parallel3d.schedule.instructions import COMPUTE_OPS, SEND_OPS, Instruction
from parallel3d.schedule.timing import Span, Timeline, simulate

SCHEDULES = [
    ("gpipe", 1, "loop"),
    ("1f1b", 1, "loop"),
    ("interleaved", 2, "loop"),
    ("zb-h1", 1, "loop"),
    ("zbv", 2, "v"),
]


def recorded(timeline: Timeline, begin: float, end: float) -> list[StepRecord]:
    """Return the records of ranks that run as simulated: computing, and waiting for the next instruction's input."""
    records = []
    for rank in range(timeline.num_ranks):
        spans = [s for s in timeline.spans if s.rank == rank and s.instruction.op in COMPUTE_OPS]
        starts = [0.0, *(s.end for s in spans)]
        waits = [Span(rank, s.instruction, start, s.start) for s, start in zip(spans, starts, strict=False)]
        records.append(StepRecord(-begin, spans[-1].end, timeline.makespan + end, tuple(spans), tuple(waits)))
    return records


@pytest.mark.parametrize(("schedule", "num_chunks", "placement"), SCHEDULES, ids=lambda value: str(value))
@pytest.mark.parametrize("latency", [0.0, 0.3])
def test_bubble_and_communication_are_the_simulated_idle_time(schedule, num_chunks, placement, latency):
    program = build(schedule, 4, 6, num_chunks, placement)
    rng = random.Random(3)
    costs = {(op, c): rng.uniform(0.5, 2.0) for op in COMPUTE_OPS for c in range(program.num_chunks)}
    timeline = simulate(program, lambda i: latency if i.op in SEND_OPS else costs.get((i.op, i.chunk), 0.0))
    records = recorded(timeline, begin=0.5, end=2.0)
    records[2] = replace(records[2], reduced=timeline.makespan + 0.75)
    ranks = break_down(records, [range(4)])
    makespan = timeline.makespan
    for rank, parts in enumerate(ranks):
        busy = [s for s in timeline.spans if s.rank == rank and s.instruction.op in COMPUTE_OPS]
        assert parts.forward + parts.backward == pytest.approx(sum(s.end - s.start for s in busy))
        assert (parts.other, parts.reduce, parts.step) == pytest.approx((0.5, 0.75, 1.25))
        assert parts.total == pytest.approx(0.5 + makespan + 2.0)
        assert min(parts.bubble, parts.communication) >= 0
    idle = sum(parts.bubble + parts.communication for parts in ranks)
    assert idle == pytest.approx(timeline.bubble * makespan * 4)
    assert any(parts.communication > 0 for parts in ranks) == (latency > 0)


times = st.floats(0, 10, allow_nan=False)


@given(st.lists(st.tuples(times, times), min_size=1, max_size=8), times, times)
def test_the_parts_add_up_whatever_was_recorded(pairs, reduced, tail):
    """Even when spans overlap, as events of two streams may."""
    spans = [Span(0, Instruction.parse(f"F{k}@0"), a, a + b) for k, (a, b) in enumerate(pairs)]
    waits = tuple(Span(0, s.instruction, s.start - 0.5, s.start + 0.25) for s in spans)
    end = max(s.end for s in spans) + tail
    record = StepRecord(-1.0, reduced, end, tuple(spans), waits)
    (parts,) = break_down([record], [[0]])
    assert parts.total == pytest.approx(end + 1.0)


def test_a_rank_that_is_done_waits_for_the_others_backwards_then_for_their_reductions():
    first = StepRecord(
        0.0,
        14.0,
        16.0,
        (Span(0, Instruction.parse("F0@0"), 1.0, 3.0), Span(0, Instruction.parse("B0@0"), 9.0, 12.0)),
        (Span(0, Instruction.parse("B0@0"), 3.0, 9.0),),
    )
    last = StepRecord(
        0.0,
        9.0,
        16.0,
        (Span(1, Instruction.parse("F0@1"), 4.0, 5.0), Span(1, Instruction.parse("B0@1"), 5.0, 8.0)),
        (Span(1, Instruction.parse("F0@1"), 0.5, 4.0),),
    )
    assert break_down([first, last], [[0, 1]]) == [
        Breakdown(forward=2.0, backward=3.0, reduce=2.0, step=2.0, communication=1.0, bubble=5.0, other=1.0),
        Breakdown(forward=1.0, backward=3.0, reduce=2.0, step=2.0, communication=1.0, bubble=2.5 + 4.0, other=0.5),
    ]


@given(st.floats(-1e3, 1e3), st.integers(0, 2**32))
def test_the_offset_of_two_hosts_clocks_is_found_within_an_exchange(offset, seed):
    """Two ranks enter an exchange at random times and leave it, each a little later than the last one entered."""
    rng = random.Random(seed)
    mine, theirs, fastest = [], [], float("inf")
    for k in range(10):
        entered = [k + rng.random() * 0.5 for _ in range(2)]
        left = [max(entered) + rng.random() * 0.1 for _ in range(2)]
        mine.append((entered[0], left[0]))
        theirs.append((entered[1] + offset, left[1] + offset))
        fastest = min(fastest, (sum(left) - sum(entered)) / 2)
    assert abs(offset_between(mine, theirs) - offset) <= fastest + 1e-9 * (1 + abs(offset))


def test_the_mean_goes_part_by_part():
    ranks = [Breakdown(forward=1.0, bubble=3.0), Breakdown(forward=3.0, bubble=1.0)]
    assert mean_of(ranks) == Breakdown(forward=2.0, bubble=2.0)


def test_tables_literally():
    ranks = [Breakdown(forward=1.0, bubble=3.0), Breakdown(forward=3.0, bubble=1.0, step=1.0)]
    rows = [line.split() for line in breakdown_table(7, ranks).splitlines()]
    assert rows[0] == "step 7, s forward backward reduce step communication bubble other total".split()
    assert rows[1] == "mean 2 0 0 0.5 0 2 0 4.5".split()
    assert rows[2] == "share 44.4% 0.0% 0.0% 11.1% 0.0% 44.4% 0.0% 100.0%".split()
    assert rows[3] == "max 3 0 0 1 0 3 0 5".split()
    assert rows[5] == "rank 1 3 0 0 1 0 1 0 5".split()
    memory = [
        {"start": {"allocated": 2**20, "peak": 3 * 2**20}},
        {"start": {"allocated": 3 * 2**20, "peak": 3 * 2**20}},
    ]
    rows = [line.split() for line in phase_table(7, memory).splitlines()]
    assert rows == ["step 7, MiB allocated peak (mean / max over ranks)".split(), "start 2.0 / 3.0 3.0 / 3.0".split()]
