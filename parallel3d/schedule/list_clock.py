"""Timer of lists of compute instructions.

Faster than `timing`, with one simplification: a transfer never waits for another one in its channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from itertools import product
from math import inf
from typing import NamedTuple

from parallel3d.schedule.instructions import Instruction, Op, Program, depends_on
from parallel3d.schedule.lowering import send_after
from parallel3d.schedule.timing import Cost

SPLIT_OPS = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


class Row(NamedTuple):
    """Compute instruction with the numbers by which it is timed.

    needs: slot of the result that it waits for, -1 for none. Its other dependences precede it in its rank's list.
    gives: slot of its result. A BACKWARD and a BACKWARD_INPUT of one micro-batch are alternatives and share a slot.
    travel: time in which the result reaches another rank, 0 if it stays.
    """

    instruction: Instruction
    needs: int
    gives: int
    time: float
    travel: float


class ListClock:
    """Times lists of the compute instructions of a program's chunks and micro-batches.

    rows: one for each instruction of the kinds `ops`, ordered by kind, then by chunk, then by micro-batch.
    cost: of an instruction, whatever its micro-batch.
    """

    def __init__(self, program: Program, cost: Cost, ops: Sequence[Op] = (*SPLIT_OPS, Op.BACKWARD)):
        places = list(product(ops, range(program.num_chunks)))
        instructions = [Instruction(*place, m) for place in places for m in range(program.num_micro_batches)]
        self._numbers = {i: number for number, i in enumerate(instructions)}
        self.rows: list[Row] = []
        self._sent: list[bool] = []  # whether the result of each row's kind and chunk goes to another rank
        for op, chunk in places:
            first = Instruction(op, chunk, 0)
            needs, gives, send = self._needs(first), self._slot(first), send_after(program, first)
            time, travel = cost(first), 0.0 if send is None else cost(send)
            self._sent.append(send is not None)
            number = len(self.rows)
            self.rows += [
                Row(i, -1 if needs is None else needs + m, gives + m, time, travel)
                for m, i in enumerate(instructions[number : number + program.num_micro_batches])
            ]

    def slowed(self, slack: float) -> ListClock:
        """Return a clock with a time added to that of each transfer."""
        other, number = copy(self), len(self.rows) // len(self._sent)
        other.rows = [
            Row(*row[:4], row.travel + slack) if self._sent[k // number] else row for k, row in enumerate(self.rows)
        ]
        return other

    def _slot(self, i: Instruction) -> int:
        return self._numbers[i._replace(op=Op.BACKWARD_INPUT) if i.op is Op.BACKWARD else i]

    def _needs(self, i: Instruction) -> int | None:
        """Return the slot of the last of its dependences, which is the neighbouring chunk's if there is one."""
        own_list = i.op is Op.BACKWARD_WEIGHT
        known = [d for d in depends_on(i) if d in self._numbers and not own_list]
        return self._slot(known[-1]) if known else None

    def empty_slots(self) -> list[float]:
        """Return the arrival time of each result, infinite so far; the last is 0, for rows that wait for no result."""
        return [inf] * len(self.rows) + [0.0]

    def lists(self, program: Program) -> list[list[Row]]:
        """Return the rows of a program of compute instructions."""
        return [[self.rows[self._numbers[i]] for i in rank] for rank in program.instructions]

    def makespan(self, lists: Sequence[Sequence[Row]]) -> float:
        """Return when the last rank ends its compute."""
        at, free, left = self.empty_slots(), [0.0] * len(lists), sum(map(len, lists))
        position = [0] * len(lists)
        while left:
            before = left
            for rank, rows in enumerate(lists):
                now, first = free[rank], position[rank]
                for _, needs, gives, time, travel in rows[first:]:
                    ready = at[needs]
                    if ready == inf:
                        break
                    now = (ready if ready > now else now) + time
                    at[gives] = now + travel
                    left -= 1
                    position[rank] += 1
                free[rank] = now
            assert left < before, "the program deadlocks"
        return max(free)
