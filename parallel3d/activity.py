"""The current activity of a process: written by its main thread at almost no cost, read by watchdogs.

The process groups own one `Activity` and pass it on. Its slots can lie in memory that the processes of a host share, so that
they are readable even when this process is stopped, stuck or dead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from threading import get_ident, main_thread


class Phase(IntEnum):
    """Phase of a process, with its description for the verdict on a failure."""

    SETUP = 0, "set-up"
    USER = 1, "user code between steps"
    LOADING = 2, "loading data"
    PROGRAM = 3, "the schedule"
    REDUCING = 4, "the end of the gradients' reduction"
    STEP = 5, "the optimizer step"
    CALL = 6, "a forward or backward call"
    EVALUATING = 7, "evaluation"
    SAVING = 8, "a save"
    UNWATCHED = 9, "an unwatched region"
    GENERATING = 10, "generation"

    description: str

    def __new__(cls, number: int, description: str = "") -> Phase:
        """Make the phase of a number."""
        phase = int.__new__(cls, number)
        phase._value_, phase.description = number, description
        return phase


# Indices of the slots.
PHASE, PROGRAM, POSITION, BATCH, STEADY, EVALUATES, UNTIMED, COMPILED = range(8)
SLOT_BYTES = 8 * 8

_MAIN_THREAD = main_thread().ident
_RAISED_IN = "parallel3d_phase"  # attribute of an exception


class Waiting:
    """A wait of the host: `what` in words, and `ranks` that it depends on (all members, in a collective).

    As a context manager it notes the wait in the activity for the time of the block. After an exception the note stays: it
    says where the exception came from.
    """

    __slots__ = ("activity", "ranks", "what")

    def __init__(self, activity: Activity, what: str, ranks: tuple[int, ...]):
        self.activity, self.what, self.ranks = activity, what, ranks

    def __enter__(self) -> None:
        self.activity.note(self)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.activity.note(None)


class Activity:
    """Activity of one process. The main thread writes, with one store per instruction; watchdogs read.

    - slots: int64 each: the Phase, the program's code, the position in this stage's list, the number of batches begun,
      whether a batch has been trained, whether the model is being evaluated, the number of open untimed regions, and the
      number of compilations begun and ended.
    - wait: what the host is blocked in, or None while it works.
    """

    def __init__(self) -> None:
        self.slots = memoryview(bytearray(SLOT_BYTES)).cast("q")
        self._wait: list[Waiting | None] = [None]

    @property
    def wait(self) -> Waiting | None:
        """The wait that the host is blocked in."""
        return self._wait[0]

    def merge_into(self, other: Activity) -> None:
        """Record in `other` from now on: with several engines, a process still does one thing at a time."""
        self.slots, self._wait = other.slots, other._wait

    def share(self, memory: memoryview) -> None:
        """Move the slots, with their values, into `memory`, SLOT_BYTES long."""
        shared = memory.cast("q")
        shared[:] = self.slots
        self.slots = shared

    def note(self, wait: Waiting | None) -> None:
        """Record what the main thread waits for, or None. Calls from other threads, such as one that saves, do nothing."""
        if get_ident() == _MAIN_THREAD:
            self._wait[0] = wait

    def enter(self, phase: Phase) -> None:
        """Begin a phase."""
        self.slots[PHASE] = phase

    def reset(self) -> None:
        """Start over for a new engine, which has a first step again."""
        self._wait[0] = None
        self.slots[STEADY] = self.slots[EVALUATES] = self.slots[UNTIMED] = 0
        self.slots[PHASE] = Phase.SETUP

    def start_program(self, num_micro_batches: int, training: bool) -> memoryview:
        """Begin a batch; the caller writes the POSITION of each instruction into the returned slots."""
        slots = self.slots
        slots[POSITION], slots[PROGRAM] = 0, 2 * num_micro_batches + training
        slots[BATCH] += 1
        slots[PHASE] = Phase.PROGRAM
        return slots

    def compiled(self, *_: object) -> None:
        """Note that a compilation has begun or ended: the process has moved. Takes and ignores what torch passes."""
        self.slots[COMPILED] += 1

    @contextmanager
    def waiting(self, wait: Waiting) -> Iterator[None]:
        """Note a wait for the time of the block. An exception that the script may catch ends the note, too."""
        self.note(wait)
        try:
            yield
        finally:
            self.note(None)

    @contextmanager
    def untimed(self, phase: Phase) -> Iterator[None]:
        """Enter `phase` for the time of the block, which no timeout limits. An exception keeps it for `phase_of`."""
        before = self.slots[PHASE]
        self.slots[PHASE] = phase
        self.slots[UNTIMED] += 1
        try:
            yield
        except BaseException as error:
            error.__dict__.setdefault(_RAISED_IN, phase)
            raise
        finally:
            self.slots[UNTIMED] -= 1
            self.slots[PHASE] = before

    def phase_of(self, error: BaseException) -> Phase:
        """Return the phase that an exception was raised in: that of an untimed region, or else the current one."""
        return Phase(error.__dict__.get(_RAISED_IN, self.slots[PHASE]))


def program_of(slots: memoryview) -> tuple[int, bool]:
    """Return (number of micro-batches, whether it trains) of the program that the slots name."""
    num_micro_batches, training = divmod(slots[PROGRAM], 2)
    return num_micro_batches, bool(training)


def is_untimed(slots: memoryview) -> bool:
    """Return whether no timeout applies to a process with these slots."""
    return bool(slots[EVALUATES] or slots[UNTIMED])


def is_in_first_step(slots: memoryview) -> bool:
    """Return whether a process with these slots has not ended a step, of which the first has much to prepare."""
    return not slots[STEADY]
