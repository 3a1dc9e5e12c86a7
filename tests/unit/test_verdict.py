"""The verdict as a function of what ranks report."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.failures.verdict import Kind, Limits, Place, Raised, Report, State, judge, situation

LIMITS = Limits(first_step=600.0, later=60.0)
PLACE = Place("the schedule", 7, instruction="F2@1", chunk=1, micro_batch=2, position=5, program=(4, True))
LOST = Raised("RuntimeError", "Connection closed by peer", "", follows=True)
ODD = Raised("ValueError", "odd\nvery", "", follows=False)


def report(rank: int, **details: object) -> Report:
    return replace(Report(rank, rank // 2, "h", State.RUNNING, place=PLACE), **details)


def waits(rank: int, *others: int, what: str = "a message", seconds: float = 61.0) -> Report:
    return report(rank, waits=what, waits_for=others, seconds=seconds)


@st.composite
def stalls(draw: st.DrawFn) -> tuple[dict[int, Report], int]:
    """Reports in which all ranks but one wait: each for one that is nearer to it at least, and for any others."""
    size = draw(st.integers(2, 9))
    order = draw(st.permutations(range(size)))
    reports = {order[0]: report(order[0], seconds=draw(st.floats(60, 90)))}
    for k, rank in enumerate(order[1:], start=1):
        nearer = draw(st.sampled_from(order[:k]))
        others = draw(st.sets(st.sampled_from([r for r in order if r != rank])))
        what = draw(st.sampled_from([f"a message of rank {nearer}", "an all-reduce"]))
        # Of a collective in which both are, the nearer one has not come to this one: else it would be over.
        reports[rank] = waits(rank, *sorted({nearer, *others}), what=f"{what} {rank}", seconds=draw(st.floats(0, 90)))
    return reports, order[0]


@given(stalls())
def test_of_a_stall_the_one_rank_that_waits_for_nobody_is_late(case: tuple[dict[int, Report], int]):
    reports, culprit = case
    verdict = judge(reports, LIMITS)
    assert verdict is not None
    assert (verdict.kind, verdict.rank) == (Kind.LATE, culprit)
    assert verdict.waiting == tuple(sorted(set(reports) - {culprit}))


@given(stalls(), st.sampled_from([State.SILENT, State.EXITED]), st.data())
def test_a_rank_that_is_gone_is_to_blame_for_a_stall_and_lost_connections(
    case: tuple[dict[int, Report], int], state: State, data: st.DataObject
):
    reports, culprit = case
    reports[culprit] = report(culprit, state=state, ending="SIGKILL")
    for rank in data.draw(st.sets(st.sampled_from(sorted(set(reports) - {culprit})))):
        reports[rank] = replace(reports[rank], state=State.FAILED, error=LOST, time=data.draw(st.floats(0, 9)))
    verdict = judge(reports, LIMITS)
    assert verdict is not None
    assert verdict.rank == culprit
    assert verdict.kind in (Kind.SILENT, Kind.EXITED)


@given(stalls(), st.data())
def test_an_exception_of_its_own_is_the_cause_of_all_that_happens_elsewhere(
    case: tuple[dict[int, Report], int], data: st.DataObject
):
    reports, culprit = case
    others = sorted(set(reports) - {culprit})
    reports[culprit] = report(culprit, state=State.FAILED, error=ODD, time=5.0)
    for rank in data.draw(st.sets(st.sampled_from(others))):
        reports[rank] = replace(reports[rank], state=State.FAILED, error=LOST, time=data.draw(st.floats(0, 9)))
    for rank in data.draw(st.sets(st.sampled_from(others))):
        reports[rank] = replace(reports[rank], state=data.draw(st.sampled_from(list(State))))
    verdict = judge(reports, LIMITS)
    assert verdict is not None
    assert (verdict.kind, verdict.rank) == (Kind.FAILED, culprit)
    assert verdict.line == f"rank {culprit} (stage {culprit // 2}, host h) failed in F2@1: ValueError: odd"


def test_of_several_exceptions_the_first_is_the_cause():
    reports = {
        rank: report(rank, state=State.FAILED, error=ODD, time=time) for rank, time in enumerate([3.0, 2.0, 2.0])
    }
    verdict = judge(reports, LIMITS)
    assert verdict is not None
    assert verdict.rank == 1


UNTIMED = replace(PLACE, phase="a save", instruction=None, untimed=True)


@pytest.mark.parametrize(
    ("culprit", "line"),
    [
        (report(1, seconds=61.4), "rank 1 (stage 0, host h) is late: F2@1 for 61 s; ranks 0, 2 wait for it"),
        (
            report(1, state=State.EXITED, ending="SIGKILL"),
            "rank 1 (stage 0, host h) ended (SIGKILL), last in F2@1; ranks 0, 2 wait for it",
        ),
        (
            report(1, state=State.SILENT),
            "rank 1 (stage 0, host h) doesn't answer, last in F2@1: it is stopped, stuck or dead; ranks 0, 2 wait for it",
        ),
        (
            report(1, state=State.LEFT, place=None),
            "rank 1 (stage 0, host h) has reached the end of its script; ranks 0, 2 wait for it",
        ),
        (
            report(1, state=State.ASKED_TO_END, ending="SIGTERM"),
            "rank 1 (stage 0, host h) was ended by SIGTERM in F2@1; ranks 0, 2 wait for it",
        ),
        (report(1, seconds=40.0), None),  # it has been at it for less: its turn came late
        (report(1, seconds=500.0, place=UNTIMED), None),
        (report(1, state=State.SILENT, place=UNTIMED), None),
    ],
)
def test_lines(culprit: Report, line: str | None):
    verdict = judge({0: waits(0, 1), 1: culprit, 2: waits(2, 0)}, LIMITS)
    assert (None if verdict is None else verdict.line) == line


def test_a_job_that_is_asked_to_end_is_nobodys_fault():
    reports = {r: report(r, state=State.ASKED_TO_END, ending="SIGTERM") for r in range(3)}
    assert judge(reports, LIMITS) is None
    assert judge({**reports, 3: report(3, state=State.LEFT)}, LIMITS) is None


def test_a_silent_rank_is_to_blame_for_the_end_of_all_others_even_in_its_first_batch():
    reports = {r: report(r, state=State.ASKED_TO_END, ending="SIGTERM") for r in range(3)}
    verdict = judge({**reports, 3: report(3, state=State.SILENT, place=UNTIMED)}, LIMITS)
    assert verdict is not None
    assert (verdict.kind, verdict.rank) == (Kind.SILENT, 3)


def test_without_a_timeout_nobody_is_late():
    assert judge({0: waits(0, 1), 1: report(1, seconds=1e6)}, Limits(600.0, 0.0)) is None


FIRST_STEP = replace(PLACE, first_step=True)


@pytest.mark.parametrize(
    ("seconds", "limits", "is_late"),
    [
        (61.0, LIMITS, False),
        (600.0, LIMITS, True),
        (600.0, Limits(0.0, 60.0), False),
        (600.0, Limits(600.0, 0.0), False),
        (600.0, Limits(600.0, 900.0), False),
    ],
)
def test_the_first_step_has_a_limit_of_its_own(seconds: float, limits: Limits, is_late: bool):
    waiting = replace(waits(0, 1, seconds=seconds), place=FIRST_STEP)
    late = judge({0: waiting, 1: report(1, seconds=seconds, place=FIRST_STEP)}, limits)
    assert (late is not None) == is_late
    for place in (FIRST_STEP, None):  # on this host, or on another one
        silent = judge({0: waiting, 1: report(1, state=State.SILENT, place=place)}, limits)
        assert (silent is not None) == is_late


SAVING = replace(UNTIMED, phase="a save")


def test_a_slow_save_is_nobodys_fault():
    """Rank 1 writes for long, on this host or another, or has just come to where the others wait for it."""
    waiting = {
        k: replace(waits(k, *{0, 1, 2} - {k}, what="save_checkpoint", seconds=500.0), place=SAVING) for k in (0, 2)
    }
    assert judge({**waiting, 1: report(1, seconds=500.0, place=SAVING)}, LIMITS) is None
    assert judge({**waiting, 1: report(1, state=State.SILENT, place=SAVING)}, LIMITS) is None
    assert judge({**waiting, 1: report(1, state=State.SILENT, place=None)}, LIMITS) is None
    ahead = replace(waits(1, 0, 2, what="save_checkpoint, tag 'a'", seconds=0.1), place=SAVING)
    assert judge({**waiting, 1: ahead}, LIMITS) is None


@pytest.mark.parametrize("waiting_at", [SAVING, PLACE], ids=["in the same save", "after it"])
@pytest.mark.parametrize("place", [SAVING, None], ids=["on the host of the first", "on another host"])
def test_a_rank_that_is_stopped_in_a_save_is_named(waiting_at: Place, place: Place | None):
    """Rank 2 is on its host, and sees that it is stopped."""
    reports = {k: replace(waits(k, *{0, 1, 2} - {k}, what="save_checkpoint"), place=waiting_at) for k in (0, 2)}
    reports[1] = report(1, state=State.SILENT, place=place)
    reports[2] = replace(reports[2], sees_stopped=(1,))
    verdict = judge(reports, LIMITS)
    assert verdict is not None
    assert (verdict.kind, verdict.rank, verdict.waiting) == (Kind.SILENT, 1, (0, 2))


def test_a_stopped_rank_that_answers_after_all_is_not_named():
    reports = {0: replace(waits(0, 1), place=SAVING, sees_stopped=(1,)), 1: report(1, seconds=500.0, place=SAVING)}
    assert judge(reports, LIMITS) is None


@pytest.mark.parametrize(
    ("others", "line"),
    [
        (
            [waits(1, 0, 2, what="an agreement"), waits(2, 0, 1, what="an agreement")],
            "ranks 0, 1 wait for each other: rank 0 (stage 0, host h) at a save waits for save_checkpoint with ranks 1, 2; "
            "rank 1 (stage 0, host h) at F2@1 waits for an agreement with ranks 0, 2",
        ),
        (
            [report(1, state=State.LEFT), report(2, state=State.LEFT)],
            "rank 1 (stage 0, host h) has reached the end of its script; rank 0 waits for it",
        ),
        (
            [report(1, state=State.EXITED, ending="SIGKILL"), report(2)],
            "rank 1 (stage 0, host h) ended (SIGKILL), last in F2@1; rank 0 waits for it",
        ),
    ],
)
def test_a_save_on_one_rank_alone_is_explained(others: list[Report], line: str):
    alone = replace(waits(0, 1, 2, what="save_checkpoint"), place=SAVING)
    verdict = judge({0: alone, **{r.rank: r for r in others}}, LIMITS)
    assert verdict is not None
    assert verdict.line == line


def test_two_collectives_at_once_are_a_deadlock():
    reports = {
        0: waits(0, 1, 2, what="an exchange"),
        1: waits(1, 0, 2, what="an agreement"),
        2: waits(2, 0, 1, what="an agreement"),
    }
    verdict = judge(reports, LIMITS)
    assert verdict is not None
    assert verdict.kind is Kind.DEADLOCK
    assert verdict.waiting == (0, 1)
    assert verdict.line == (
        "ranks 0, 1 wait for each other: rank 0 (stage 0, host h) at F2@1 waits for an exchange with ranks 1, 2; "
        "rank 1 (stage 0, host h) at F2@1 waits for an agreement with ranks 0, 2"
    )
    early = {rank: replace(r, seconds=5.0) for rank, r in reports.items()}
    assert judge(early, LIMITS) is None


def test_ranks_of_one_situation_share_a_line():
    reports = {0: waits(0, 1, what="a message of rank 1"), 1: report(1, seconds=62.0)}
    reports |= {r: waits(r, 1, what="an all-reduce", seconds=50.0) for r in range(2, 9)}
    assert situation(reports).splitlines() == [
        "  rank 0: F2@1, waits for a message of rank 1 for 61 s",
        "  rank 1: F2@1, works for 62 s",
        "  ranks 2-8: F2@1, waits for an all-reduce with rank 1 for 50 s",
    ]
