"""Fuse the two halves of a split backward where they are adjacent.

A whole backward overlaps a layer's communication with its weight gradients and frees its tensors at once. But the stage that
waits for its input gradient then waits for the weight gradients too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

from parallel3d.schedule.instructions import Instruction, Op, Program
from parallel3d.schedule.list_clock import ListClock
from parallel3d.schedule.timing import Cost, simulate

_MOST_TRIALS = 40
_Pair = tuple[int, int]  # (rank, position of the input gradient in the rank's list)


def fuse_backwards(program: Program, cost: Cost) -> Program:
    """Fuse an input gradient and a weight gradient of its chunk that follows it into one backward, if the step gets no longer.

    program: compute instructions alone. Weight gradients of one chunk are exchanged among micro-batches for this, which
    changes neither times nor memory if micro-batches are equal. cost: as simulate()'s, also for whole backwards. All pairs
    are tried together; a set that makes the step longer is tried again in two halves.
    """
    clock = ListClock(program, cost)

    def length(fused: Program) -> float:
        return max(clock.ends(clock.lists(fused))[0])

    shortest = length(program)
    accepted: list[_Pair] = []
    waiting = deque([_pairs(program)])
    trials = 0
    while waiting and trials < _MOST_TRIALS:
        trials += 1
        tried = waiting.popleft()
        seconds = length(_fused(program, [*accepted, *tried]))
        if seconds <= shortest * (1 + 1e-9):
            shortest, accepted = seconds, [*accepted, *tried]
        elif len(tried) > 1:
            waiting += [tried[: len(tried) // 2], tried[len(tried) // 2 :]]
    fused = _fused(program, accepted)
    # The exact times, with transfers that wait for one another.
    later = simulate(fused, cost).makespan > simulate(program, cost).makespan * (1 + 1e-9)
    return program if later else fused


def _pairs(program: Program) -> list[_Pair]:
    """Return the adjacent halves, ordered by their positions in the lists."""
    halves = (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
    found = [
        (rank, position)
        for rank, instructions in enumerate(program.instructions)
        for position, (first, second) in enumerate(pairwise(instructions))
        if (first.op, second.op) == halves and first.chunk == second.chunk
    ]
    return sorted(found, key=lambda pair: pair[1])


def _fused(program: Program, pairs: Sequence[_Pair]) -> Program:
    """Return the program with these pairs fused."""
    chosen = set(pairs)
    lists = [
        [
            Instruction(Op.BACKWARD, i.chunk, i.micro_batch) if (rank, position) in chosen else i
            for position, i in enumerate(instructions)
            if (rank, position - 1) not in chosen
        ]
        for rank, instructions in enumerate(program.instructions)
    ]
    return program.with_instructions(list(map(renamed, lists)))


def renamed(instructions: Iterable[Instruction]) -> list[Instruction]:
    """Give a chunk's weight gradients its micro-batches in the order of their input gradients."""
    left: dict[int, deque[int]] = {}
    out = []
    for i in instructions:
        if i.op is Op.BACKWARD_INPUT:
            left.setdefault(i.chunk, deque()).append(i.micro_batch)
        elif i.op is Op.BACKWARD_WEIGHT:
            i = Instruction(i.op, i.chunk, left[i.chunk].popleft())
        out.append(i)
    return out


def whole_backwards(program: Program, micro_batches: Collection[int]) -> Program:
    """Make the backwards of these micro-batches whole, at the positions of their input gradients."""
    lists = [
        [
            Instruction(Op.BACKWARD, i.chunk, i.micro_batch)
            if i.op is Op.BACKWARD_INPUT and i.micro_batch in micro_batches
            else i
            for i in instructions
            if i.op is not Op.BACKWARD_WEIGHT or i.micro_batch not in micro_batches
        ]
        for instructions in program.instructions
    ]
    return program.with_instructions(lists)
