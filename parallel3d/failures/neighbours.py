"""What the ranks of this host are doing, read from memory they share: it tells even of one that is stopped or dead."""

from __future__ import annotations

import mmap
import socket
import tempfile
from collections.abc import Callable

from parallel3d.activity import BATCH, PHASE, POSITION, SLOT_BYTES, Activity, Phase, is_untimed, program_of
from parallel3d.comm.collectives import Group, all_gather_object
from parallel3d.failures.verdict import Place
from parallel3d.schedule.instructions import Program

# The program of a batch of so many micro-batches, which trains or not; None where there is none any more.
ProgramOf = Callable[[int, bool], Program | None]


class Neighbours:
    """The activity slots of every rank on this host, mapped from a file that nobody can see any more.

    hosts: every rank's. Collective over `control`, all ranks.
    """

    def __init__(self, control: Group, activity: Activity):
        host = socket.gethostname()
        with tempfile.NamedTemporaryFile(prefix="parallel3d_activity_") as file:
            file.truncate(SLOT_BYTES)
            activity.share(memoryview(mmap.mmap(file.fileno(), SLOT_BYTES)))
            everyone = all_gather_object((host, file.name), control)
            self.hosts = [other for other, _ in everyone]
            self._slots: dict[int, memoryview] = {}
            for rank, (other, name) in enumerate(everyone):
                slots = _mapped(name) if other == host else None
                if slots is not None:
                    self._slots[rank] = slots
            all_gather_object(None, control)  # they all have it open: the file may go

    def place(self, rank: int, stage: int, find_program: ProgramOf) -> Place | None:
        """Where that rank is; None for one of another host."""
        slots = self._slots.get(rank)
        return None if slots is None else place_in(slots, stage, find_program)

    @property
    def ranks(self) -> list[int]:
        """The ranks of this host."""
        return list(self._slots)


def _mapped(name: str) -> memoryview | None:
    try:
        with open(name, "r+b") as file:
            return memoryview(mmap.mmap(file.fileno(), SLOT_BYTES)).cast("q")
    except OSError:  # containers may share a host's name, but not its files
        return None


def place_in(slots: memoryview, stage: int, find_program: ProgramOf) -> Place:
    """Where a rank of that stage with these slots is."""
    phase = Phase(slots[PHASE])
    place = Place(phase.description, slots[BATCH], is_untimed(slots))
    if phase is not Phase.PROGRAM:
        return place
    key = program_of(slots)
    program, position = find_program(*key), slots[POSITION]
    if program is None or position >= len(program.instructions[stage]):
        return place
    i = program.instructions[stage][position]
    return Place(
        place.phase,
        place.batch,
        place.untimed,
        str(i),
        i.chunk,
        i.micro_batch,
        position,
        key,
    )
