"""Times of programs whose computes gather sharded weights inside: as of a simulation that goes from one tick to the next."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_schedule_lifetimes import cases, layers

from parallel3d.planner.report.timeline import columns
from parallel3d.schedule.builders import build
from parallel3d.schedule.draw import chrome_trace, svg, text_grid
from parallel3d.schedule.instructions import COMPUTE_OPS, Instruction, Op, Program, depends_on
from parallel3d.schedule.lifetimes import Boundaries, ChunkUses, Lifetimes, LiveLimits, lifetimes_before
from parallel3d.schedule.lowering import add_collectives, lower
from parallel3d.schedule.order import WaitGraph, validate
from parallel3d.schedule.timing import Cost, Simulation, simulate, unit_cost

Times = dict[Instruction, tuple[float, float]]


class Rank:
    """A rank that runs its list tick by tick; transfers take no time. overlap: ticks of a tick's work beside a gather."""

    def __init__(
        self, instructions: tuple[Instruction, ...], uses: list[ChunkUses], run: dict, gather: dict, overlap: int
    ):
        self.computes = deque(
            (i, lifetimes_before(instructions, k)) for k, i in enumerate(instructions) if i.op in COMPUTE_OPS
        )
        self.uses, self.run_ticks, self.gather_ticks = uses, run, gather
        self.overlap, self.shared_ticks = overlap, 0
        self.items: deque[Instruction] = deque()
        self.queue: deque[Instruction] = deque()
        self.gathering: tuple[Instruction, int] | None = None
        self.live: set[int] = set()
        self.compute: Instruction | None = None
        self.left: int | None = None  # ticks of the run that goes on
        self.boundary = self.first = 0
        self.times: Times = {}
        self.begun: dict[Instruction, int] = {}

    def happen(self, now: int, done: Times) -> bool:
        """Let what can happen without time happen; return whether something did."""
        return self._gather(now) or self._compute(now, done)

    def _gather(self, now: int) -> bool:
        if self.gathering is None and self.queue:
            i = self.queue.popleft()
            self.gathering, self.begun[i] = (i, self.gather_ticks[i.bucket]), now
            return True
        if self.gathering is not None and self.gathering[1] == 0:
            i, self.gathering = self.gathering[0], None
            self.live.add(i.bucket)
            self.times[i] = self.begun[i], now
            return True
        return False

    def _compute(self, now: int, done: Times) -> bool:
        if self.compute is None:
            if not self.computes or not all(d in done for d in self.needs(self.computes[0][0])):
                return False
            self.compute, items = self.computes.popleft()
            self.items.extend(items)
            self.begun[self.compute], self.boundary = now, 0
            return True
        runs = self.uses[self.compute.chunk].of(self.compute.op)
        while self.items and self.items[0].run <= self.first + self.boundary and self.left is None:
            i = self.items.popleft()
            if i.op is Op.GATHER_PARAMS:
                self.queue.append(i)
            else:
                self.live.remove(i.bucket)
                self.times[i] = now, now
            return True
        if self.left is None and self.boundary < max(1, len(runs)):
            if not self.live.issuperset(runs[self.boundary] if runs else ()):
                return False
            self.left = self.run_ticks[self.compute.op] * (1 if runs else 4)
            return True
        if self.left == 0:
            self.left, self.boundary = None, self.boundary + 1
            return True
        if self.left is None:
            self.times[self.compute] = done[self.compute] = self.begun[self.compute], now
            self.first += len(runs)
            self.compute = None
            return True
        return False

    def needs(self, i: Instruction) -> list[Instruction]:
        return [d for d in depends_on(i) if d in self.exist]

    def tick(self) -> None:
        if self.left is not None and self.gathering is not None:
            self.shared_ticks += 1
            if self.shared_ticks < self.overlap:
                return
        self.shared_ticks = 0
        if self.left is not None:
            self.left -= 1
        if self.gathering is not None:
            self.gathering = self.gathering[0], self.gathering[1] - 1


def step_by_step(
    program: Program, uses: list[ChunkUses], run: dict[Op, int], gather: dict[int, int], overlap: int
) -> list[Times]:
    ranks = [Rank(instructions, uses, run, gather, overlap) for instructions in program.instructions]
    every = {i for instructions in program.instructions for i in instructions if i.op in COMPUTE_OPS}
    done: Times = {}
    now = 0
    for rank in ranks:
        rank.exist = every
    while len(done) < len(every) or any(rank.queue or rank.gathering or rank.items for rank in ranks):
        while sum(rank.happen(now, done) for rank in ranks):
            pass
        for rank in ranks:
            rank.tick()
        now += 1
        assert now < 10_000
    return [rank.times for rank in ranks]


def cost_of(uses: list[ChunkUses], run: dict[Op, int], gather: dict[int, int]) -> Cost:
    def cost(i: Instruction) -> float:
        if i.op in COMPUTE_OPS:
            return run[i.op] * (len(uses[i.chunk].of(i.op)) or 4)
        return gather[i.bucket] if i.op is Op.GATHER_PARAMS else 1000.0 * (i.op is Op.RELEASE_PARAMS)

    return cost


@given(
    cases(),
    st.lists(st.integers(1, 4), min_size=4, max_size=4),
    st.lists(st.integers(0, 9), min_size=6, max_size=6),
    st.integers(1, 3),
)
def test_times_equal_a_simulation_step_by_step(case, run_ticks: list[int], gather_ticks: list[int], overlap: int):
    program, uses, sizes, limits, freed = case
    with_lifetimes = Lifetimes(uses, sizes, limits).add_to(program, freed)
    run, gather = dict(zip(COMPUTE_OPS, run_ticks, strict=True)), dict(enumerate(gather_ticks))
    expected = step_by_step(with_lifetimes, uses, run, gather, overlap)
    timeline = Simulation(with_lifetimes, uses, overlap).run(cost_of(uses, run, gather))
    found: list[Times] = [{} for _ in expected]
    for span in timeline.spans:
        if span.instruction in expected[span.rank]:
            found[span.rank][span.instruction] = (span.start, span.end)
    for times, wanted in zip(found, expected, strict=True):
        assert times.keys() == wanted.keys()
        for i, ends in wanted.items():
            assert times[i] == pytest.approx(ends, abs=1e-9), str(i)


@given(cases())
def test_free_gathers_change_no_time_and_programs_with_lifetimes_are_valid(case):
    program, uses, sizes, limits, freed = case
    lowered = add_collectives(lower(program), [2] * program.num_chunks)
    with_lifetimes = Lifetimes(uses, sizes, limits).add_to(lowered, freed)
    validate(with_lifetimes)
    before = {(s.rank, s.instruction): (s.start, s.end) for s in simulate(lowered).spans}
    for given_uses in (uses, ()):
        for s in simulate(with_lifetimes, unit_cost, given_uses).spans:
            if s.instruction.run is None:
                assert (s.start, s.end) == pytest.approx(before[s.rank, s.instruction])


@given(cases())
def test_a_program_without_lifetimes_keeps_its_graph(case):
    program, uses, *_ = case
    lowered = add_collectives(lower(program), [2] * program.num_chunks)
    graph, before = WaitGraph(lowered), WaitGraph(lowered)
    boundaries = Boundaries(graph, lowered, uses)
    assert (graph.nodes, graph.waits, graph.order()) == (before.nodes, before.waits, before.order())
    assert (boundaries.shares, boundaries.first) == ({}, {})
    assert boundaries.within(3, 0.5) == (3, 0.5)


def example(live: int, ahead: int) -> tuple[Program, list[ChunkUses]]:
    uses = [layers(0, 2)]
    program = add_collectives(build("1f1b", 1, 1, 1, "loop", None), [2])
    return Lifetimes(uses, {0: 1, 1: 1}, LiveLimits(live, ahead)).add_to(program), uses


def spans(program: Program, uses: list[ChunkUses], gather: float) -> dict[str, tuple[float, float]]:
    costs = {Op.FORWARD: 4.0, Op.BACKWARD: 8.0, Op.GATHER_PARAMS: gather, Op.REDUCE_GRADS: 10.0}
    timeline = simulate(program, lambda i: costs.get(i.op, 0.0), uses)
    return {str(s.instruction): (s.start, s.end) for s in timeline.spans}


def test_a_gather_hides_behind_the_layer_before_and_reductions_do_not_delay_it():
    found = spans(*example(3, 1), gather=3.0)
    assert found == {
        "AG0@0#0.0": (0, 3),  # nothing hides it
        "AG0@0#1.0": (3, 6),  # 2 of its 3 hide behind the first layer
        "F0@0": (0, 8),
        "B0@0": (8, 16),
        "RL0@0#1.3": (12, 12),
        "RL0@0#0.4": (16, 16),
        "RED0@0#0": (12, 22),
        "RED0@0#1": (22, 32),
    }


def test_without_room_a_layer_waits_for_its_gather():
    program, uses = example(2, 0)
    found = spans(program, uses, gather=3.0)
    assert found["F0@0"] == (0, 3 + 2 + 3 + 2)
    critical = Simulation(program, uses).critical_path(lambda i: 3.0 if i.op is Op.GATHER_PARAMS else unit_cost(i))
    assert sum(seconds for _, seconds in critical.instructions) == pytest.approx(3 + 3 + 1 + 2)


def test_a_reduction_starts_when_its_share_of_a_stalled_backward_is_done():
    uses = [ChunkUses((), ((0,), (1,)))]
    program = add_collectives(build("1f1b", 1, 1, 1, "loop", None), [4])
    found = spans(Lifetimes(uses, {0: 1, 1: 1}, LiveLimits(2, 0)).add_to(program), uses, gather=100.0)
    assert found["B0@0"] == (4, 4 + 100 + 4 + 100 + 4)
    starts = [found[f"RED0@0#{bucket}"][0] for bucket in range(4)]
    assert starts == [106, 116, 210, 220]


def test_drawings_show_gathers_and_skip_releases():
    program, uses = example(3, 1)
    timeline = simulate(program, lambda i: 1.0 if i.op is Op.GATHER_PARAMS else unit_cost(i), uses)
    drawn = svg({"predicted": timeline})
    assert ">gather<" in drawn
    assert "release" not in drawn
    assert columns(timeline)["ops"]
    assert text_grid(program).splitlines()[1:] == ["stage 0 | 0 [0]"]
    events = chrome_trace({"predicted": timeline})["traceEvents"]
    assert {event["name"] for event in events} >= {"AG0@0#0.0", "RL0@0#0.4", "F0@0"}
