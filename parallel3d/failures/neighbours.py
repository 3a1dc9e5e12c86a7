"""Ranks of this host: their places, read from shared memory even if they are stopped or dead, and which are stopped."""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from parallel3d.activity import (
    BATCH,
    PHASE,
    POSITION,
    SLOT_BYTES,
    Activity,
    Phase,
    is_in_first_step,
    is_untimed,
    program_of,
)
from parallel3d.comm.collectives import Group, all_gather_object
from parallel3d.failures.verdict import Place
from parallel3d.schedule.instructions import Program

# (number of micro-batches, whether it trains) -> its program; None if it is gone.
FindProgram = Callable[[int, bool], Program | None]


class Neighbours:
    """Processes and activity slots of every rank on this host; the slots' files are removed once every rank has opened them.

    hosts: the host of every rank. The constructor is collective over `control`, the group of all ranks.
    """

    def __init__(self, control: Group, activity: Activity):
        host = socket.gethostname()
        with tempfile.NamedTemporaryFile(prefix="parallel3d_activity_") as file:
            file.truncate(SLOT_BYTES)
            activity.share(memoryview(mmap.mmap(file.fileno(), SLOT_BYTES)))
            pid = os.getpid()
            everyone = all_gather_object((host, file.name, pid, _state_and_start(pid)[1]), control)
            self.hosts = [other for other, *_ in everyone]
            mapped = {rank: _map(name) for rank, (other, name, *_) in enumerate(everyone) if other == host}
            self._slots = {rank: slots for rank, slots in mapped.items() if slots is not None}
            self._processes = {rank: everyone[rank][2:] for rank in self._slots}
            all_gather_object(None, control)  # every rank has opened the file: it may go

    def place(self, rank: int, stage: int, find_program: FindProgram) -> Place | None:
        """Return where a rank is; None for a rank of another host."""
        slots = self._slots.get(rank)
        return None if slots is None else place_in(slots, stage, find_program)

    def stopped(self) -> tuple[int, ...]:
        """Return the ranks of this host whose processes are stopped, by a signal or a debugger."""
        found = {rank: (start, _state_and_start(pid)) for rank, (pid, start) in self._processes.items()}
        # The start time distinguishes the process from another one with the same id, for example in another container.
        return tuple(rank for rank, (start, (state, now)) in found.items() if state in ("T", "t") and now == start)


def _state_and_start(pid: int) -> tuple[str, str]:
    """Return a process's state and start time as in Linux's /proc/PID/stat; empty ones if they can't be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def _map(name: str) -> memoryview | None:
    try:
        with open(name, "r+b") as file:
            return memoryview(mmap.mmap(file.fileno(), SLOT_BYTES)).cast("q")
    except OSError:  # containers may share a host's name, but not its files
        return None


def place_in(slots: memoryview, stage: int, find_program: FindProgram) -> Place:
    """Return where a rank of this stage with these activity slots is."""
    phase = Phase(slots[PHASE])
    place = Place(phase.description, slots[BATCH], is_untimed(slots), is_in_first_step(slots))
    if phase is not Phase.PROGRAM:
        return place
    key, position = program_of(slots), slots[POSITION]
    program = find_program(*key)
    if program is None or position >= len(program.instructions[stage]):
        return place
    i = program.instructions[stage][position]
    return replace(place, instruction=str(i), chunk=i.chunk, micro_batch=i.micro_batch, position=position, program=key)
