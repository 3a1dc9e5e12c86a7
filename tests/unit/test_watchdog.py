"""Watchdogs of several ranks, as threads of this process with short windows: what they find, and whom they end."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist

from parallel3d.activity import EVALUATES, POSITION, STEADY, Activity, Phase, Waiting
from parallel3d.config import FailuresConfig
from parallel3d.errors import PeerError
from parallel3d.failures.board import Board, Windows
from parallel3d.failures.neighbours import FindProgram, place_in
from parallel3d.failures.verdict import Kind, Place
from parallel3d.failures.watchdog import Watchdog
from parallel3d.schedule.builders import build
from parallel3d.schedule.instructions import Program

SIZE, TIMEOUT_S = 4, 0.2
# What ends before its window has passed may have a long one: a busy machine then changes nothing.
WINDOWS = Windows(poll=0.01, pause=0.005, answer=20.0, spread=20.0, grace=0.2, leave=5.0)
PROGRAM = build("1f1b", SIZE, 6, 1, "loop", None)


def find_program(num_micro_batches: int, training: bool) -> Program | None:
    return PROGRAM


class HostMemory:
    """Activities of all ranks, on one host."""

    def __init__(self, activities: list[Activity]):
        self.hosts = ["h"] * len(activities)
        self._activities = activities

    def place(self, rank: int, stage: int, find_program: FindProgram) -> Place:
        return place_in(self._activities[rank].slots, stage, find_program)

    def stopped(self) -> tuple[int, ...]:
        return ()


class Job:
    """SIZE stages in the middle of a step. codes: by rank, with which its process was ended."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.windows = WINDOWS
        self.settings: dict[str, Any] = {"timeout_s": TIMEOUT_S, "directory": str(folder)}
        self.codes: dict[int, int] = {}
        self.asked: set[int] = set()
        self.watchdogs: dict[int, Watchdog] = {}
        self.store = dist.HashStore()
        self.activities = [Activity() for _ in range(SIZE)]
        for activity in self.activities:
            activity.start_program(6, training=True)
            activity.slots[STEADY] = 1

    def watch(self, *ranks: int) -> None:
        for rank in ranks:
            self.watchdogs[rank] = Watchdog(
                Board(self.store, "run", rank, SIZE, self.windows),
                cast(Any, HostMemory(self.activities)),
                self.activities[rank],
                rank,
                list(range(SIZE)),
                find_program,
                FailuresConfig(**self.settings),
                lambda: False,
                lambda rank=rank: rank in self.asked,
                lambda code, rank=rank: self.codes.update({rank: code}),
            )

    def wait_for(self, rank: int, *others: int) -> None:
        for other in others:
            Waiting(self.activities[other], f"a message of rank {rank}", (rank,)).__enter__()

    def ended(self, number: int) -> dict[int, int]:
        deadline = time.monotonic() + 20
        while len(self.codes) < number and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.codes

    def verdicts(self) -> dict[int, dict[str, Any]]:
        return {
            rank: json.loads(file.read_text())["verdict"]
            for rank in range(SIZE)
            if (file := self.folder / f"failure-{rank}.json").exists()
        }


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    for watchdog in job.watchdogs.values():
        watchdog.close()


def only(job: Job) -> dict[str, Any]:
    """The verdict, the same on all ranks that have one."""
    [verdict] = {str(v): v for v in job.verdicts().values()}.values()
    return verdict


def test_the_rank_that_the_others_wait_for_is_late(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    position = [str(i) for i in PROGRAM.instructions[1]].index("F2@1")
    job.activities[1].slots[POSITION] = position
    job.wait_for(1, 0, 2, 3)
    job.watch(*range(SIZE))
    assert job.ended(SIZE) == dict.fromkeys(range(SIZE), 1)
    verdict = only(job)
    assert (verdict["rank"], verdict["kind"], verdict["place"]["instruction"]) == (1, Kind.LATE, "F2@1")
    assert verdict["waiting"] == [0, 2, 3]
    error = capfd.readouterr().err
    assert error.count(verdict["line"]) == 1, "said once"
    assert ">F2@1<" in error


def test_a_rank_that_does_not_answer_is_silent(job: Job) -> None:
    job.windows = replace(WINDOWS, answer=0.5)
    job.wait_for(2, 0, 1, 3)
    job.watch(0, 1, 3)
    assert job.ended(3) == {0: 1, 1: 1, 3: 1}
    verdict = only(job)
    assert (verdict["rank"], verdict["kind"], verdict["place"]["instruction"]) == (2, Kind.SILENT, "F0@2")


def test_a_process_that_the_launcher_saw_end_is_named_at_once(job: Job) -> None:
    job.wait_for(3, 0, 1, 2)
    job.store.set("exit/3", "SIGKILL")
    job.watch(0, 1, 2)
    assert job.ended(3) == {0: 1, 1: 1, 2: 1}
    assert (only(job)["rank"], only(job)["kind"]) == (3, Kind.EXITED)


def test_an_exception_is_the_verdict_of_all_ranks(job: Job) -> None:
    job.wait_for(2, 0, 1, 3)
    job.watch(*range(SIZE))
    verdict = job.watchdogs[2].failed(KeyError("tired"))
    assert verdict is not None
    assert (verdict.rank, verdict.kind, str(verdict.error)) == (2, Kind.FAILED, "KeyError: 'tired'")
    assert job.ended(3) == {0: 1, 1: 1, 3: 1}
    assert only(job)["line"] == verdict.line


def test_an_exception_during_an_incident_that_blames_nobody_gets_a_verdict(job: Job) -> None:
    board = Board(job.store, "run", 3, SIZE, WINDOWS)
    job.watch(0, 1, 2)
    board.open(0)
    deadline = time.monotonic() + 20
    while len(board.reports(0)) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    threading.Timer(0.2, board.settle, (0, None)).start()
    verdict = job.watchdogs[2].failed(KeyError("tired"))
    assert verdict is not None
    assert (verdict.rank, verdict.kind) == (2, Kind.FAILED)


def test_no_text_of_an_exception_stops_the_verdict_or_floods_the_terminal(
    job: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    job.settings["timeout_s"] = 60.0  # the text takes a busy machine longer than the others' patience
    job.wait_for(2, 0, 1, 3)
    job.watch(*range(SIZE))
    verdict = job.watchdogs[2].failed(ValueError("\x1b[2J odd \udc80" + "x" * 20_000_000))
    assert verdict is not None
    assert job.ended(3) == {0: 1, 1: 1, 3: 1}
    assert str(verdict.error).startswith("ValueError: \\x1b[2J odd \\udc80xxx")
    said = capfd.readouterr().err
    assert verdict.line in said
    assert len(said) < 10_000
    assert "\x1b" not in said
    assert sum(file.stat().st_size for file in job.folder.glob("failure-*.json")) < 1_000_000


@pytest.mark.parametrize("apart_s", [0.0, 0.05])
def test_a_job_that_is_asked_to_end_blames_no_rank(job: Job, apart_s: float) -> None:
    job.watch(*range(SIZE))
    for rank in range(SIZE):
        job.asked.add(rank)
        time.sleep(apart_s)
    assert job.ended(SIZE) == dict.fromkeys(range(SIZE), 128 + signal.SIGTERM)
    assert job.verdicts() == {}


def test_a_rank_that_alone_is_asked_to_end_is_named(job: Job) -> None:
    job.windows = replace(WINDOWS, spread=0.2)
    job.watch(*range(SIZE))
    job.asked.add(1)
    assert job.ended(SIZE) == {0: 1, 1: 128 + signal.SIGTERM, 2: 1, 3: 1}
    assert (only(job)["rank"], only(job)["kind"]) == (1, Kind.ENDED)


def test_a_rank_that_raises_for_a_verdict_may_take_long_to_end(job: Job) -> None:
    """What it waited for when it raised is still noted. It is late again when it waits anew, as where the script goes on."""
    job.windows = replace(WINDOWS, spread=0.2)
    job.wait_for(1, 0, 2, 3)
    job.asked.add(1)
    job.watch(*range(SIZE))
    verdict = job.watchdogs[0].failed(PeerError("the connection is closed", 1))
    assert job.ended(3) == {1: 128 + signal.SIGTERM, 2: 1, 3: 1}
    board = Board(job.store, "run", 0, SIZE, WINDOWS)
    time.sleep(5 * TIMEOUT_S)
    assert not board.is_open(1)
    assert verdict is not None
    assert (only(job)["line"], verdict.kind) == (verdict.line, Kind.ENDED)
    job.wait_for(2, 0)
    deadline = time.monotonic() + 20
    while not board.is_open(1) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert board.is_open(1)


@contextmanager
def evaluating(activity: Activity) -> Iterator[None]:
    activity.slots[EVALUATES] = 1
    yield


@pytest.mark.parametrize("busy", [evaluating, lambda activity: activity.untimed(Phase.SAVING)])
def test_a_rank_that_may_take_its_time_is_not_late(
    job: Job, busy: Callable[[Activity], AbstractContextManager[None]]
) -> None:
    job.wait_for(1, 0, 2, 3)
    with busy(job.activities[1]):
        job.watch(*range(SIZE))
        time.sleep(5 * TIMEOUT_S)
        assert (job.codes, job.verdicts()) == ({}, {})


def test_a_rank_that_ends_after_the_wait_for_it_is_not_named(job: Job) -> None:
    """It took its time, but then all ranks have gone on, and it is through before it could report."""
    board = Board(job.store, "run", 2, SIZE, WINDOWS)
    with ExitStack() as waits:
        for rank in (0, 1, 3):
            waits.enter_context(Waiting(job.activities[rank], "a message of rank 2", (2,)))
        job.watch(0, 1, 3)
        deadline = time.monotonic() + 20
        while board.reports(0).keys() != {0, 1, 3} and time.monotonic() < deadline:
            time.sleep(0.01)
    board.leave(None)
    assert board.settled(0, 20) == (None,)
    assert (job.codes, job.verdicts()) == ({}, {})


def test_a_save_on_one_rank_alone_is_explained_by_that_rank(job: Job) -> None:
    """The others are in user code and wait for nobody."""
    Waiting(job.activities[0], "save_checkpoint", (0, 1, 2, 3)).__enter__()
    for activity in job.activities[1:]:
        activity.enter(Phase.USER)
    with job.activities[0].untimed(Phase.SAVING):
        job.watch(*range(SIZE))
        assert job.ended(SIZE) == dict.fromkeys(range(SIZE), 1)
    verdict = only(job)
    assert (verdict["rank"] in (1, 2, 3), verdict["kind"], verdict["waiting"]) == (True, Kind.LATE, [0])
    assert "is late: user code between steps" in verdict["line"]


def test_a_save_that_is_slow_on_one_rank_goes_on(job: Job) -> None:
    with ExitStack() as saves:
        for activity in job.activities:
            saves.enter_context(activity.untimed(Phase.SAVING))
        for activity in job.activities[1:]:
            Waiting(activity, "save_checkpoint", (0, 1, 2, 3)).__enter__()
        job.watch(*range(SIZE))
        time.sleep(5 * TIMEOUT_S)
        assert (job.codes, job.verdicts()) == ({}, {})


def test_a_hang_in_the_first_step_has_a_limit(job: Job) -> None:
    for activity in job.activities:
        activity.slots[STEADY] = 0
    job.wait_for(1, 0, 2, 3)
    job.settings["first_step_timeout_s"] = 5 * TIMEOUT_S
    job.watch(*range(SIZE))
    assert job.ended(SIZE) == dict.fromkeys(range(SIZE), 1)
    verdict = only(job)
    assert (verdict["rank"], verdict["kind"]) == (1, Kind.LATE)
    assert verdict["seconds"] >= 0.9 * 5 * TIMEOUT_S


class SlowBoard:
    """A store on a loaded machine: what is asked takes its time."""

    lost = False
    windows = Windows()

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.left = False

    def is_open(self, incident: int) -> bool:
        self.asked.set()
        time.sleep(0.5)
        return False

    def leave(self, ending: str | None) -> None:
        self.left = True


@pytest.mark.parametrize("closed_before", [False, True], ids=["at work", "its engine is gone"])
def test_a_script_that_ends_waits_for_the_thread_that_asks_the_store(closed_before: bool) -> None:
    """The thread would return into a Python that has ended, which aborts the process."""
    board: Any = SlowBoard()
    nobody: Any = cast(Any, None)
    watchdog = Watchdog(
        board, nobody, Activity(), 0, [0], nobody, FailuresConfig(timeout_s=0), lambda: False, lambda: False
    )
    assert board.asked.wait(10)
    if closed_before:
        watchdog.close()
    watchdog.leave(None)
    assert not watchdog._thread.is_alive()
    assert board.left is not closed_before
