"""Thread of each process that notices failures, finds the rank at fault with the other ranks, and ends the process."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path

from parallel3d.activity import BATCH, PHASE, Activity, Phase, is_in_first_step
from parallel3d.comm.collectives import is_lost_peer
from parallel3d.comm.coordination import NORMAL_EXIT
from parallel3d.config import FailuresConfig
from parallel3d.errors import ExecutionError, PeerError, printable
from parallel3d.failures.board import REPORT, VERDICT, Board
from parallel3d.failures.neighbours import FindProgram, Neighbours, place_in
from parallel3d.failures.verdict import Kind, Limits, Raised, Report, State, Verdict, judge, situation
from parallel3d.schedule.draw import neighbourhood

_TERMINATED = 128 + signal.SIGTERM
_MOST_OF_TRACEBACK = 20_000  # characters
_REMEDY = (
    "If it needs that time: set failures.timeout_s, for the first step failures.first_step_timeout_s, or put what takes it "
    "inside `with engine.unwatched():` on the ranks that do it."
)


class _Failure:
    """Exception of the main thread, which waits until the watchdog has the verdict."""

    def __init__(self, error: BaseException):
        # The exception itself, not the ExecutionError that says in which instruction it was raised.
        cause = error.__cause__ if isinstance(error, ExecutionError) and error.__cause__ is not None else error
        text = "".join(traceback.format_exception(type(cause), cause, cause.__traceback__))
        text = printable(text, _MOST_OF_TRACEBACK)
        self.raised, self.time = Raised(type(cause).__name__, printable(str(cause)), text, follows(error)), time.time()
        self.verdict: Verdict | None = None
        self.done = threading.Event()


def end_process(code: int) -> None:
    """End this process, whatever its main thread is blocked in."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


class Watchdog:
    """Watches the activity of this process for `failures.timeout_s`, and the board for incidents that other ranks open.

    - stages: the stage of every rank.
    - device_is_busy: returns whether the device has not finished the last batch that the host has finished.
    - asked_to_end: returns whether a SIGTERM has come.
    - end: ends the process with an exit code.
    """

    def __init__(
        self,
        board: Board,
        neighbours: Neighbours,
        activity: Activity,
        rank: int,
        stages: list[int],
        find_program: FindProgram,
        settings: FailuresConfig,
        device_is_busy: Callable[[], bool],
        asked_to_end: Callable[[], bool],
        end: Callable[[int], None] = end_process,
    ):
        self._board, self._neighbours, self._activity = board, neighbours, activity
        self._rank, self._stages, self._find_program = rank, stages, find_program
        self._settings, self._windows = settings, board.windows
        self._limits = Limits(settings.first_step_timeout_s, settings.timeout_s)
        self._device_is_busy, self._read_signal, self._exit = device_is_busy, asked_to_end, end
        self._failure: _Failure | None = None
        self._asked_to_end = False
        self._wake = threading.Event()
        self._closed = False
        self._incident = 0  # index of the next incident; `_own` is this rank's report on the last one
        self._seen: tuple[bytes, object] = (b"", None)
        self._since = self._not_before = time.monotonic()
        self._judged_at = -1  # the number of batches begun at the last verdict
        self._thread = threading.Thread(target=self._watch, name="parallel3d watchdog", daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        """Return whether it watches."""
        return not self._closed and self._thread.is_alive()

    def close(self) -> None:
        """End the thread. Later failures are not attributed."""
        self._closed = True
        self._wake.set()

    def leave(self, ending: str | None) -> None:
        """Note that this rank's script is over, and wait for the thread's end, unless that takes very long.

        ending: how it is over, if not at its end.
        A thread that returns from the store's C++ after Python has ended aborts the process ("terminate called without an
        active exception").
        """
        if not self._closed:
            self.close()
            self._board.leave(ending)
        self._thread.join(self._windows.leave)

    def failed(self, error: BaseException) -> Verdict | None:
        """Return the verdict on an exception of the main thread, once all ranks have answered; None without one in time."""
        if not self.is_alive():
            return None
        failure = self._failure = _Failure(error)
        self._wake.set()
        failure.done.wait(2 * self._windows.answer + self._windows.grace)
        return failure.verdict

    # The rest runs in the thread.

    def _watch(self) -> None:
        while True:
            self._pause()
            if self._closed:
                return
            if self._asked_to_end and self._judged_at == self._activity.slots[BATCH]:
                # Asked to end after a verdict: no other one is needed. The main thread may need a moment for what it does.
                self._wake.wait(self._windows.grace / 2)
                return self._exit(_TERMINATED)
            due = self._failure is not None or self._asked_to_end or self._is_late()
            if (due or self._board.is_open(self._incident)) and self._settle(due and self._board.open(self._incident)):
                return

    def _pause(self) -> None:
        self._wake.wait(self._windows.poll)
        self._wake.clear()
        self._look_for_signal()

    def _look_for_signal(self) -> None:
        """Read signals here: this thread runs even while the main one is blocked in C code and can't handle them."""
        self._asked_to_end = self._asked_to_end or self._read_signal()

    def _is_late(self) -> bool:
        """Return whether this rank has waited for so long that some rank must be late, unless that one is untimed."""
        now, limit = time.monotonic(), self._limits.of(is_in_first_step(self._activity.slots))
        if self._has_moved():
            self._seen, self._since, self._not_before = self._now(), now, now
        if now < max(self._since + limit, self._not_before):
            return False
        return self._activity.wait is not None or self._device_is_busy()

    def _now(self) -> tuple[bytes, object]:
        return bytes(self._activity.slots), self._activity.wait

    def _has_moved(self) -> bool:
        """Return whether the main thread has gone on since it was last asked whether it is late."""
        return self._now() != self._seen

    def _settle(self, opened: bool) -> bool:
        """Report on the next incident, and act on its verdict. Returns whether the process is to end.

        opened: this rank has opened the incident, and so finds the verdict.
        """
        incident, self._own = self._incident, self._report()
        self._incident += 1
        self._board.post(incident, self._own)
        settled = None
        if not opened:
            settled = self._board.settled(incident, self._windows.answer + 1, lambda: self._amend(incident))
        verdict = settled[0] if settled is not None else self._find(incident)
        own = self._own
        if verdict is None:
            return self._go_on(own)
        reports = self._board.reports(incident) or {own.rank: own}
        around = grid(verdict, self._find_program)
        write_report(Path(self._settings.directory), own, verdict, reports, around)
        if (opened or self._board.lost) and say(render(verdict, reports, around)):
            self._board.note_said()
        return self._act_on(verdict)

    def _amend(self, incident: int) -> None:
        """Report again if this rank has been asked to end in the meantime."""
        self._look_for_signal()
        if self._own.state is State.RUNNING and self._asked_to_end:
            before, self._own = self._own, self._report()
            self._board.amend(incident, before, self._own)

    def _find(self, incident: int) -> Verdict | None:
        """Judge what all ranks report, and settle on the verdict."""

        def has_cause(reports: Mapping[int, Report]) -> bool:
            return any(r.error is not None and not r.error.follows for r in reports.values())

        board, windows, limits = self._board, self._windows, self._limits
        reports = board.collect(incident, windows.answer, has_cause)
        if has_cause(reports):  # the others may have a moment to say what they wait for
            reports = board.collect(incident, 2 * windows.poll, lambda _: False)
        reports[self._rank] = self._own
        for rank in set(range(len(self._stages))) - set(reports):
            reports[rank] = self._report_on(rank)
            board.post(incident, reports[rank])
        verdict, deadline = judge(reports, limits), time.monotonic() + windows.spread
        if verdict is not None and verdict.kind is Kind.LEFT and self._failure is None and self._has_moved():
            verdict = None  # the rank's script is over, but so is the wait for it
        while verdict is not None and verdict.kind is Kind.ENDED and time.monotonic() < deadline:
            time.sleep(windows.poll)  # the others may be about to be asked to end too
            self._amend(incident)
            reports |= board.reports(incident) | {self._rank: self._own}
            verdict = judge(reports, limits)
        return board.settle(incident, verdict)

    def _report(self) -> Report:
        """Return this rank's own report."""
        wait, slots, stage = self._activity.wait, self._activity.slots, self._stages[self._rank]
        report = Report(
            self._rank,
            stage,
            self._neighbours.hosts[self._rank],
            State.RUNNING,
            time.time(),
            place_in(slots, stage, self._find_program),
            time.monotonic() - self._since,
            sees_stopped=self._neighbours.stopped(),
        )
        if wait is not None:
            report = replace(report, waits=wait.what, waits_for=tuple(r for r in wait.ranks if r != self._rank))
        elif self._device_is_busy() and slots[PHASE] != Phase.PROGRAM:
            others = tuple(r for r in range(len(self._stages)) if r != self._rank)
            report = replace(report, waits="its device, busy with the last batch", waits_for=others)
        if (failure := self._failure) is not None:
            return replace(report, state=State.FAILED, time=failure.time, error=failure.raised)
        if self._asked_to_end:
            return replace(report, state=State.ASKED_TO_END, ending=signal.SIGTERM.name)
        return report

    def _report_on(self, rank: int) -> Report:
        """Return what is known of a rank that doesn't report."""
        stage, ending, has_left = self._stages[rank], self._board.ending(rank), self._board.has_left(rank)
        if has_left and ending == NORMAL_EXIT:
            ending = None
        state = State.EXITED if ending is not None else State.LEFT if has_left else State.SILENT
        if self._board.lost and rank != 0:
            state = State.RUNNING  # not known; but rank 0, which owned the store, is gone
        place = self._neighbours.place(rank, stage, self._find_program)
        return Report(rank, stage, self._neighbours.hosts[rank], state, place=place, ending=ending)

    def _go_on(self, own: Report) -> bool:
        """Go on after an incident for which no rank is to blame, or end if that was asked for."""
        if own.state is State.ASKED_TO_END:
            self._exit(_TERMINATED)
            return True
        # A quarter of the timeout is soon enough to find a rank that has just begun to be late.
        self._not_before = time.monotonic() + max(1.0, self._settings.timeout_s / 4)
        if own.state is State.FAILED:  # else an exception has come since, for the next incident
            self._release(None)
        return False

    def _release(self, verdict: Verdict | None) -> None:
        """Let the main thread raise its exception, if it has one. The wait still in its activity is over and can't be late."""
        failure, self._failure = self._failure, None
        if failure is not None:
            self._seen, self._not_before = self._now(), inf  # until the script does something else
            failure.verdict = verdict
            failure.done.set()

    def _act_on(self, verdict: Verdict) -> bool:
        """Let the main thread raise, if it does so within the grace; else end the process and return True."""
        deadline = time.monotonic() + self._grace(verdict)
        while self._failure is None and not self._asked_to_end and time.monotonic() < deadline and not self._closed:
            self._pause()
        self._judged_at = self._activity.slots[BATCH]
        if self._failure is not None:
            self._release(verdict)
        elif not self._closed:
            self._exit(_TERMINATED if self._asked_to_end else 1)
            return True
        return False

    def _grace(self, verdict: Verdict) -> float:
        if verdict.kind is Kind.LATE and verdict.rank == self._rank:
            return 0.0  # this process is at fault: its end frees the ranks that wait for it
        return self._windows.grace / 5 if verdict.kind in (Kind.SILENT, Kind.DEADLOCK) else self._windows.grace


def follows(error: BaseException) -> bool:
    """Return whether an exception is only the consequence of another rank's end."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, PeerError) or is_lost_peer(cause):
            return True
        cause = cause.__cause__
    return False


def render(verdict: Verdict, reports: Mapping[int, Report], around: str) -> str:
    """Return the verdict's line, the schedule around its place (see `grid`), and for a stall what each rank waits for."""
    parts = [verdict.line, around]
    if verdict.kind is not Kind.FAILED:
        parts.append(situation(reports))
    if verdict.kind is Kind.LATE:
        parts.append(_REMEDY)
    return "\n".join(part for part in parts if part)


def grid(verdict: Verdict, find_program: FindProgram) -> str:
    """Return the schedule around the verdict's place; empty if the place is not in a schedule."""
    place = verdict.place
    if place is None or place.program is None or place.position is None:
        return ""
    program = find_program(*place.program)
    return "" if program is None else neighbourhood(program, verdict.stage, place.position)


def write_report(folder: Path, own: Report, verdict: Verdict, reports: Mapping[int, Report], around: str) -> None:
    """Write failure-<rank>.json: the verdict, the same on all ranks, this rank's report, and all reports that it knows."""
    content = {
        "verdict": VERDICT.dump_python(verdict, mode="json"),
        "grid": around.splitlines(),
        "own": REPORT.dump_python(own, mode="json"),
        "reports": [REPORT.dump_python(report, mode="json") for _, report in sorted(reports.items())],
    }
    path = folder / f"failure-{own.rank}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        say(f"{path} can't be written: {error.strerror}")


def say(text: str) -> bool:
    """Print to stderr in one write, since other ranks may be printing too; return whether stderr takes it.

    It is the process's own stderr: another thread may have replaced sys.stderr, as to collect a traceback.
    """
    stream = sys.__stderr__
    if stream is None:
        return False
    try:
        stream.write(text + "\n")
        stream.flush()
    except (OSError, ValueError):
        return False
    return True
