"""What this process is doing, noted at next to no cost, so that a watchdog, its own or a neighbour's, can read it.

A process does one thing at a time, so there is one `ACTIVITY` for it, as there is one set of signal handlers. What lies in
its slots is shared with the other processes of the host: it can be read even of one that is stopped, stuck or dead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from threading import get_ident, main_thread

from parallel3d.schedule.instructions import Program


class Phase(IntEnum):
    """What a process is busy with."""

    SETUP = 0
    USER = 1
    LOADING = 2
    PROGRAM = 3
    REDUCING = 4
    STEP = 5
    CALL = 6
    EVALUATING = 7
    SAVING = 8
    UNWATCHED = 9


NAMES = {
    Phase.SETUP: "set-up",
    Phase.USER: "user code between steps",
    Phase.LOADING: "loading data",
    Phase.PROGRAM: "the schedule",
    Phase.REDUCING: "the end of the gradients' reduction",
    Phase.STEP: "the optimizer step",
    Phase.CALL: "a forward or backward call",
    Phase.EVALUATING: "evaluation",
    Phase.SAVING: "a save",
    Phase.UNWATCHED: "an unwatched region",
}
"""As a verdict prints them."""

# Places of the slots.
PHASE, PROGRAM, POSITION, BATCH, STEADY, EVALUATES, UNTIMED = range(7)
SLOT_BYTES = 8 * 7

_MAIN_THREAD = main_thread().ident


class Waiting:
    """What a process waits for: `what`, in words, of the ranks `ranks`, itself among them in a collective.

    Noted for the time of a `with` block; after an exception inside it stays noted, for it says where that came from.
    """

    __slots__ = ("ranks", "what")

    def __init__(self, what: str, ranks: tuple[int, ...]):
        self.what, self.ranks = what, ranks

    def __enter__(self) -> None:
        ACTIVITY.note(self)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            ACTIVITY.note(None)


def program_code(num_micro_batches: int, training: bool) -> int:
    """What names a program of an engine in a slot; 0 is none."""
    return 2 * num_micro_batches + training


class Activity:
    """The main thread writes, one store for each instruction; watchdogs read.

    slots: int64 each: the Phase, the program's code, the place in this stage's list, batches begun so far, whether one has
    been trained, whether the model is evaluated, and how many regions that may take their time are open. wait: what the
    host is blocked in, None when it works.
    """

    def __init__(self) -> None:
        self.slots = memoryview(bytearray(SLOT_BYTES)).cast("q")
        self.wait: Waiting | None = None

    def share(self, memory: memoryview) -> None:
        """Write into `memory`, SLOT_BYTES long, from now on; what is noted goes along."""
        shared = memory.cast("q")
        shared[:] = self.slots
        self.slots = shared

    def note(self, wait: Waiting | None) -> None:
        """What the main thread waits for, or that it no longer does. Of others, such as one that saves, nothing is noted."""
        if get_ident() == _MAIN_THREAD:
            self.wait = wait

    def enter(self, phase: Phase) -> None:
        """Begin something else."""
        self.slots[PHASE] = phase

    def reset(self) -> None:
        """A new engine: its first batch may take its time."""
        self.wait = None
        self.slots[STEADY] = self.slots[EVALUATES] = self.slots[UNTIMED] = 0
        self.slots[PHASE] = Phase.SETUP

    def start_program(self, program: Program, training: bool) -> memoryview:
        """A batch's list begins: note its POSITION in the slots returned."""
        slots = self.slots
        slots[POSITION], slots[PROGRAM] = 0, program_code(program.num_micro_batches, training)
        slots[BATCH] += 1
        slots[PHASE] = Phase.PROGRAM
        return slots

    @contextmanager
    def untimed(self, phase: Phase) -> Iterator[None]:
        """`phase` for the time of a `with` block, which may take as long as it likes; an exception leaves it noted."""
        before = self.slots[PHASE]
        self.slots[PHASE] = phase
        self.slots[UNTIMED] += 1
        try:
            yield
        finally:
            self.slots[UNTIMED] -= 1
        self.slots[PHASE] = before


def is_untimed(slots: memoryview) -> bool:
    """Whether a process with these slots may take as long as it likes: in a first batch, too, it has much to prepare."""
    return bool(not slots[STEADY] or slots[EVALUATES] or slots[UNTIMED])


ACTIVITY = Activity()
"""This process's."""
