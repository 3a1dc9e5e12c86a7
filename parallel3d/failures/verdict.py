"""Verdict on a failure: which rank is at fault, as a pure function of what each rank reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter
from itertools import groupby
from math import inf


class State(StrEnum):
    """State of a rank, as far as the others know."""

    RUNNING = "running"
    FAILED = "failed"
    ASKED_TO_END = "asked to end"
    SILENT = "silent"  # no answer: stopped, stuck or dead
    EXITED = "exited"  # the launcher saw it end
    LEFT = "left"  # its script came to its end


@dataclass(frozen=True)
class Place:
    """Place that a rank is at.

    - phase: in words; batch: number of batches begun; untimed: whether no timeout applies; first_step: whether that of the
      first step does.
    - instruction, chunk, micro_batch, position (in the stage's list), program (number of micro-batches, whether it trains):
      set while it runs a schedule.
    """

    phase: str
    batch: int
    untimed: bool = False
    first_step: bool = False
    instruction: str | None = None
    chunk: int | None = None
    micro_batch: int | None = None
    position: int | None = None
    program: tuple[int, bool] | None = None

    def __str__(self) -> str:
        return self.instruction or self.phase


@dataclass(frozen=True)
class Raised:
    """An exception. follows: whether it is only the consequence of another rank's end."""

    type: str
    message: str
    traceback: str
    follows: bool

    def __str__(self) -> str:
        first_line = next(iter(self.message.splitlines()), "")
        return f"{self.type}: {first_line}" if first_line else self.type


@dataclass(frozen=True)
class Report:
    """Report of one rank; for a rank that posts none, another one reports what is known of it.

    - time: when it failed or answered, in seconds since the epoch.
    - seconds: how long it has been at this place.
    - waits: what it is blocked in; waits_for: the other ranks that this depends on.
    - ending: how it ended, if it did, as "SIGKILL" or "exit code 3".
    - sees_stopped: the ranks of its host whose processes are stopped, as by SIGSTOP.
    """

    rank: int
    stage: int
    host: str
    state: State
    time: float = 0.0
    place: Place | None = None
    seconds: float = 0.0
    waits: str | None = None
    waits_for: tuple[int, ...] = ()
    error: Raised | None = None
    ending: str | None = None
    sees_stopped: tuple[int, ...] = ()

    @property
    def where(self) -> str:
        """'rank 2 (stage 1, host h)'."""
        return f"rank {self.rank} (stage {self.stage}, host {self.host})"


class Kind(StrEnum):
    """Kind of failure."""

    FAILED = "failed"
    LATE = "late"
    SILENT = "silent"
    EXITED = "exited"
    LEFT = "left"
    ENDED = "ended"  # a signal that only some ranks got has ended it
    DEADLOCK = "deadlock"


@dataclass(frozen=True)
class Verdict:
    """A rank at fault and what it did.

    - rank: the one at fault; in a deadlock the lowest of its ranks.
    - line: what it did, in one line.
    - waiting: the ranks that wait for it.
    """

    kind: Kind
    rank: int
    stage: int
    host: str
    line: str
    place: Place | None
    error: Raised | None
    seconds: float
    waiting: tuple[int, ...]


@dataclass(frozen=True)
class Limits:
    """Seconds that ranks may wait for one that does not move, in the first step and in those after it; 0: forever."""

    first_step: float
    later: float

    def of(self, in_first_step: bool) -> float:
        """Return the limit of a rank, inf if there is none. The first step has never less time than others."""
        if not self.later or (in_first_step and not self.first_step):
            return inf
        return max(self.first_step, self.later) if in_first_step else self.later

    def exceeded(self, r: Report) -> bool:
        """Return whether a rank has not moved for nearly its limit; nearly, as ranks report at slightly different times."""
        return r.seconds >= 0.9 * self.of(r.place is not None and r.place.first_step)


def judge(reports: Mapping[int, Report], limits: Limits) -> Verdict | None:
    """Return the root cause, or None if no rank is at fault. reports: of every rank, by rank.

    The first of these that applies:

    1. an exception that is no consequence of another rank's end;
    2. a rank that ended, or doesn't answer, or whose script is over while others wait for it;
    3. a rank that was asked to end when others were not;
    4. an exception that follows from another rank's end;
    5. of the ranks that others wait for and that wait for nobody, the one that has not moved for longest, if that is its
       limit and it is not untimed;
    6. ranks that wait for each other, each for its limit.
    """
    raised = [r for r in reports.values() if r.error is not None]
    originals = [r for r in raised if r.error is not None and not r.error.follows]
    asked = [r for r in reports.values() if r.state is State.ASKED_TO_END]
    if originals:
        return _verdict(Kind.FAILED, _earliest(originals), reports)
    # Unless something else has happened, an untimed rank that is not stopped may be too busy to answer.
    gone = _gone(reports, limits, alarm=bool(raised or asked))
    if gone is not None:
        return _verdict(*gone, reports)
    # If all ranks are asked to end, so is the job.
    if asked and any(r.state not in (State.ASKED_TO_END, State.LEFT) for r in reports.values()):
        return _verdict(Kind.ENDED, _earliest(asked), reports)
    if raised:
        return _verdict(Kind.FAILED, _earliest(raised), reports)
    return _stall(reports, limits)


def _earliest(reports: Iterable[Report]) -> Report:
    return min(reports, key=lambda r: (r.time, r.rank))


def _gone(reports: Mapping[int, Report], limits: Limits, alarm: bool) -> tuple[Kind, Report] | None:
    waited_for = {rank for r in reports.values() for rank in r.waits_for}
    for state, kind in ((State.EXITED, Kind.EXITED), (State.SILENT, Kind.SILENT), (State.LEFT, Kind.LEFT)):
        found = [r for r in reports.values() if r.state is state]
        if state is State.SILENT:
            found = [r for r in found if alarm or not _may_be_busy(r, reports, limits)]
        elif state is State.LEFT:
            found = [r for r in found if r.rank in waited_for]
        if found:
            # Prefer the one that others wait for: the rest may be on a host that failed with it.
            return kind, min(found, key=lambda r: (r.rank not in waited_for, r.time, r.rank))
    return None


def _may_be_busy(silent: Report, reports: Mapping[int, Report], limits: Limits) -> bool:
    """Return whether a rank may be too busy to answer: it is untimed, or in the first step and not waited for too long.

    A rank whose place is not known may be where those that wait for it are, such as in a save. A stopped process is not busy.
    """
    if any(silent.rank in r.sees_stopped for r in reports.values()):
        return False
    waiting = [r for r in reports.values() if silent.rank in r.waits_for]
    places = [silent.place] if silent.place is not None else [r.place for r in waiting if r.place is not None]
    if not places or not all(place.untimed or place.first_step for place in places):
        return False
    return any(place.untimed for place in places) or not any(map(limits.exceeded, waiting))


def _stall(reports: Mapping[int, Report], limits: Limits) -> Verdict | None:
    waiting = {rank for rank, r in reports.items() if r.waits_for}
    reached = {other for rank in waiting for other in _reach(rank, reports)}
    working = [reports[rank] for rank in sorted(reached - waiting)]
    if not working:
        cycle = _cycle(reports)
        # Every rank of the cycle must be late: one for which another has waited long may have come just now.
        slow = bool(cycle) and all(limits.exceeded(reports[rank]) for rank in cycle)
        return _deadlock(cycle, reports) if slow else None
    late = max(working, key=lambda r: r.seconds)  # the first to stop: what it holds up stops later
    if not limits.exceeded(late) or (late.place is not None and late.place.untimed):
        return None
    return _verdict(Kind.LATE, late, reports)


def _reach(start: int, reports: Mapping[int, Report]) -> set[int]:
    """Return the ranks that `start` waits for, directly or through others."""
    seen: set[int] = set()
    front = [start]
    while front:
        for other in _holds_up(reports[front.pop()], reports):
            if other not in seen and other in reports:
                seen.add(other)
                front.append(other)
    return seen


def _holds_up(report: Report, reports: Mapping[int, Report]) -> list[int]:
    """Return the ranks that a rank waits for, without those that have reached the same collective."""
    members = {report.rank, *report.waits_for}
    return [
        rank
        for rank in report.waits_for
        if rank in reports and not (reports[rank].waits == report.waits and {rank, *reports[rank].waits_for} == members)
    ]


def _cycle(reports: Mapping[int, Report]) -> list[int]:
    """Return a cycle of ranks: each waits for the next, and the last for the first; [] if there is none."""
    try:
        TopologicalSorter({rank: _holds_up(reports[rank], reports) for rank in sorted(reports)}).prepare()
    except CycleError as error:
        _, *cycle = error.args[1]  # the first is the last one, too, and each is waited for by the next
        return cycle[::-1]
    return []


def _deadlock(cycle: list[int], reports: Mapping[int, Report]) -> Verdict:
    links = "; ".join(f"{reports[rank].where} at {reports[rank].place} {waiting_of(reports[rank])}" for rank in cycle)
    line = f"ranks {_listed(sorted(cycle))} wait for each other: {links}"
    first = reports[min(cycle)]
    return _conclude(Kind.DEADLOCK, first, line, tuple(sorted(cycle)))


def _conclude(kind: Kind, r: Report, line: str, waiting: tuple[int, ...]) -> Verdict:
    return Verdict(kind, r.rank, r.stage, r.host, line, r.place, r.error, r.seconds, waiting)


def waiting_of(report: Report) -> str:
    """Describe what a rank does: 'waits for an all-reduce with ranks 0, 2', or 'works'."""
    if report.waits is None:
        return "works"
    # A message names its other end.
    others = "" if "rank " in report.waits else f" with {_ranks(report.waits_for)}"
    return f"waits for {report.waits}{others}"


def _verdict(kind: Kind, report: Report, reports: Mapping[int, Report]) -> Verdict:
    waiting = tuple(rank for rank in sorted(reports) if rank != report.rank and report.rank in _reach(rank, reports))
    line = f"{report.where} {_describe(kind, report)}"
    if waiting and kind is not Kind.FAILED:
        line += f"; {_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for it"
    return _conclude(kind, report, line, waiting)


def _describe(kind: Kind, report: Report) -> str:
    place = "an unknown place" if report.place is None else str(report.place)
    match kind:
        case Kind.FAILED:
            return f"failed in {place}: {report.error}"
        case Kind.LATE:
            return f"is late: {place} for {report.seconds:.0f} s"
        case Kind.EXITED:
            return f"ended ({report.ending}), last in {place}"
        case Kind.SILENT:
            return f"doesn't answer, last in {place}: it is stopped, stuck or dead"
        case Kind.LEFT:
            return "has reached the end of its script"
        case _:
            return f"was ended by {report.ending} in {place}"


def _ranks(ranks: Iterable[int]) -> str:
    several = sorted(ranks)
    return ("rank " if len(several) == 1 else "ranks ") + _listed(several)


def _listed(ranks: list[int]) -> str:
    """Format ranks: '0, 1, 2', or '0-63' for more than four in a row."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 4 else ", ".join(map(str, run)) for run in runs)


def situation(reports: Mapping[int, Report]) -> str:
    """Format a line for all ranks in the same situation: where they are, and what they wait for."""
    groups: dict[str, list[int]] = {}
    for rank, r in sorted(reports.items()):
        place = "an unknown place" if r.place is None else str(r.place)
        does = f"{waiting_of(r)} for {r.seconds:.0f} s"
        if r.state is not State.RUNNING:
            does = r.state.value + (f", {waiting_of(r)}" if r.waits else "")
        groups.setdefault(f"{place}, {does}", []).append(rank)
    return "\n".join(f"  {_ranks(ranks)}: {text}" for text, ranks in groups.items())
