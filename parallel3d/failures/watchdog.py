"""A thread in each process that notices failures, finds the one at fault with all others, says so, and ends the process."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from parallel3d.activity import BATCH, PHASE, Activity, Phase, is_untimed
from parallel3d.comm.store import follows_from_peer
from parallel3d.config import FailuresConfig
from parallel3d.errors import ExecutionError, PeerError
from parallel3d.failures.board import Board
from parallel3d.failures.neighbours import Neighbours, ProgramOf, place_in
from parallel3d.failures.telling import account, grid, say, write_account
from parallel3d.failures.verdict import Kind, Raised, Report, State, Verdict, judge

POLL_S = 0.25
WINDOW_S = 3.0
"""For how long a rank may not answer before it counts as silent: less than launchers leave between SIGTERM and SIGKILL."""
SPREAD_S = 2.0
"""Within which all ranks are told to end where the whole job is: one is signalled after the other."""
GRACE_S = 5.0
"""Between the verdict and the end of a process whose main thread has not heard of it."""

_LEAVE_S = 6.0  # longer than the store may take to answer


class _Failure:
    """An exception of the main thread, which waits until the watchdog has the verdict."""

    def __init__(self, error: BaseException):
        self.raised, self.time = _raised(error), time.time()
        self.verdict: Verdict | None = None
        self.done = threading.Event()


@dataclass
class _Incident:
    """One of those on the board. own: what this rank reports of it."""

    number: int
    own: Report


class Watchdog:
    """Watches the activity of this process for `failures.timeout_s`, and the board for incidents that others open.

    stages: of every rank; program_of: see Neighbours; device_is_busy: with batches that the host has done; signals: the
    numbers of those that came since it was last called. `close` ends it.
    """

    def __init__(
        self,
        board: Board,
        neighbours: Neighbours,
        activity: Activity,
        rank: int,
        stages: list[int],
        program_of: ProgramOf,
        settings: FailuresConfig,
        device_is_busy: Callable[[], bool],
        signals: Callable[[], bytes],
    ):
        self._board, self._neighbours, self._activity = board, neighbours, activity
        self._rank, self._stages, self._program_of = rank, stages, program_of
        self._settings = settings
        self._device_is_busy, self._signals = device_is_busy, signals
        self._failure: _Failure | None = None
        self._signal: signal.Signals | None = None
        self._wake = threading.Event()
        self._closed = False
        self._incident = 0
        self._stamp: tuple[bytes, object] = (b"", None)
        self._since = self._not_before = time.monotonic()
        self._judged_at = -1  # the number of batches begun at the last verdict
        self._thread = threading.Thread(target=self._watch, name="parallel3d watchdog", daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether it watches."""
        return not self._closed and self._thread.is_alive()

    def close(self) -> None:
        """End the thread. Whatever happens from here on is not attributed."""
        self._closed = True
        self._wake.set()

    def leave(self) -> None:
        """This rank's script is over, and so is the thread, unless it takes very long.

        One that comes back from the store's C++ after Python has ended aborts the process ("terminate called without an
        active exception").
        """
        if not self._closed:
            self.close()
            self._board.leave()
        self._thread.join(_LEAVE_S)

    # The main thread's side

    def failed(self, error: BaseException) -> Verdict | None:
        """The verdict on an exception of this rank, once all ranks have answered; None when there is none in time."""
        if not self.is_alive():
            return None
        failure = self._failure = _Failure(error)
        self._wake.set()
        failure.done.wait(2 * WINDOW_S + GRACE_S)
        return failure.verdict

    # The thread

    def _watch(self) -> None:
        while True:
            self._wake.wait(POLL_S)
            self._wake.clear()
            self._read_signals()
            if self._closed:
                return
            if self._signal is not None and self._judged_at == self._activity.slots[BATCH]:
                self._end_as_asked()
            due = self._failure is not None or self._signal is not None or self._is_late()
            if due or self._board.is_open(self._incident):
                self._settle(due and self._board.open(self._incident))

    def _read_signals(self) -> None:
        """A signal reaches this thread even while the main one is blocked in C code and can't handle it."""
        if self._signal is None and signal.SIGTERM in self._signals():
            self._signal = signal.SIGTERM

    def _is_late(self) -> bool:
        """Whether this rank has been waiting for so long that somebody must be late."""
        now, timeout = time.monotonic(), self._settings.timeout_s
        stamp = (bytes(self._activity.slots), self._activity.wait)
        if stamp != self._stamp:
            self._stamp, self._since = stamp, now
        if not timeout or now < max(self._since + timeout, self._not_before) or is_untimed(self._activity.slots):
            return False
        return self._activity.wait is not None or self._device_is_busy()

    def _settle(self, opened: bool) -> None:
        incident = _Incident(self._incident, self._report())
        self._incident += 1
        self._board.post(incident.number, incident.own)
        settled = None if opened else self._board.settled(incident.number, WINDOW_S + 1, lambda: self._amend(incident))
        verdict = settled[0] if settled is not None else self._find(incident)
        own = incident.own
        reports = self._board.reports(incident.number) or {own.rank: own}
        if verdict is None:
            self._dismissed(own)
            return
        around = grid(verdict, self._program_of)
        write_account(Path(self._settings.directory), own, verdict, reports, around)
        if opened or self._board.lost:
            say(account(verdict, reports, around))
        self._end(verdict)

    def _amend(self, incident: _Incident) -> None:
        """Report anew where this rank has been told to end since."""
        self._read_signals()
        if incident.own.state is State.RUNNING and self._signal is not None:
            before, incident.own = incident.own, self._report()
            self._board.amend(incident.number, before, incident.own)

    def _find(self, incident: _Incident) -> Verdict | None:
        def has_cause(reports: Mapping[int, Report]) -> bool:
            return any(r.error is not None and not r.error.follows for r in reports.values())

        reports = self._board.collect(incident.number, WINDOW_S, has_cause)
        if has_cause(reports):  # the others may have half a second to say what they wait for
            reports = self._board.collect(incident.number, 2 * POLL_S, lambda _: False)
        reports[self._rank] = incident.own
        for rank in set(range(len(self._stages))) - set(reports):
            reports[rank] = self._report_on(rank)
            self._board.post(incident.number, reports[rank])
        verdict, deadline = judge(reports, self._settings.timeout_s), time.monotonic() + SPREAD_S
        while verdict is not None and verdict.kind is Kind.ENDED and time.monotonic() < deadline:
            time.sleep(POLL_S)  # the others may be about to be told the same
            self._amend(incident)
            reports |= self._board.reports(incident.number) | {self._rank: incident.own}
            verdict = judge(reports, self._settings.timeout_s)
        return self._board.settle(incident.number, verdict)

    def _report(self) -> Report:
        failure, now = self._failure, time.monotonic()
        wait = self._activity.wait
        place = place_in(self._activity.slots, self._stages[self._rank], self._program_of)
        report = Report(
            self._rank,
            self._stages[self._rank],
            self._neighbours.hosts[self._rank],
            State.RUNNING,
            time.time(),
            place,
            now - self._since,
        )
        if wait is not None:
            report = replace(report, waits=wait.what, waits_for=tuple(r for r in wait.ranks if r != self._rank))
        elif self._device_is_busy() and self._activity.slots[PHASE] != Phase.PROGRAM:
            others = tuple(r for r in range(len(self._stages)) if r != self._rank)
            report = replace(report, waits="its device, busy with the last batch", waits_for=others)
        if failure is not None:
            return replace(report, state=State.FAILED, time=failure.time, error=failure.raised)
        if self._signal is not None:
            return replace(report, state=State.ASKED_TO_END, ending=self._signal.name)
        return report

    def _report_on(self, rank: int) -> Report:
        """What is known of a rank that doesn't report."""
        stage = self._stages[rank]
        ending = self._board.ending(rank)
        state = State.EXITED if ending is not None else State.LEFT if self._board.has_left(rank) else State.SILENT
        if self._board.lost and rank != 0:
            state = State.RUNNING  # nobody knows; but rank 0, whose store it was, is gone
        place = self._neighbours.place(rank, stage, self._program_of)
        return Report(rank, stage, self._neighbours.hosts[rank], state, place=place, ending=ending)

    def _dismissed(self, own: Report) -> None:
        """Nobody is to blame: go on, or end where that was asked."""
        if own.state is State.ASKED_TO_END:
            _exit(128 + (self._signal or 0))
        if self._failure is not None:
            self._release(None)
        # Soon enough to find one late that has just begun to be.
        self._not_before = time.monotonic() + max(1.0, self._settings.timeout_s / 4)

    def _release(self, verdict: Verdict | None) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            failure.verdict = verdict
            failure.done.set()

    def _end(self, verdict: Verdict) -> None:
        """Let the main thread raise, if it does so within the grace; else end the process from here."""
        deadline = time.monotonic() + self._grace_s(verdict)
        while self._failure is None and self._signal is None and time.monotonic() < deadline and not self._closed:
            self._wake.wait(POLL_S)
            self._wake.clear()
            self._read_signals()
        self._judged_at = self._activity.slots[BATCH]
        if self._failure is not None:
            self._release(verdict)
        elif not self._closed:
            _exit(1 if self._signal is None else 128 + self._signal)

    def _grace_s(self, verdict: Verdict) -> float:
        if verdict.kind is Kind.LATE and verdict.rank == self._rank:
            return 0.0  # its end frees those that wait for it
        return 1.0 if verdict.kind in (Kind.SILENT, Kind.DEADLOCK) else GRACE_S

    def _end_as_asked(self) -> None:
        """Told to end behind a verdict: no other one is needed. What the main thread still does may take a moment."""
        self._wake.wait(GRACE_S / 2)
        _exit(128 + (self._signal or 0))


def follows(error: BaseException) -> bool:
    """Whether an exception is but the consequence of what another rank did."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, PeerError) or follows_from_peer(cause):
            return True
        cause = cause.__cause__
    return False


def _raised(error: BaseException) -> Raised:
    """The exception itself, not the one that says in which instruction it was."""
    cause = error.__cause__ if isinstance(error, ExecutionError) and error.__cause__ is not None else error
    text = "".join(traceback.format_exception(type(cause), cause, cause.__traceback__))
    return Raised(type(cause).__name__, str(cause), text, follows(error))


def _exit(code: int) -> NoReturn:
    """End this process, whatever its main thread is blocked in."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
