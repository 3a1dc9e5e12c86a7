"""Times of compute instructions that are started one by one, or in given lists.

As `timing` has them, but for transfers: each takes its time and never waits for another one in its channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import inf

from parallel3d.schedule.instructions import Instruction, Op, Program, depends_on
from parallel3d.schedule.lowering import transfers_after
from parallel3d.schedule.timing import Cost

SPLIT_OPS = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
ALL_OPS = (*SPLIT_OPS, Op.BACKWARD)


class ComputeTable:
    """The compute instructions of a program's chunks and micro-batches by number, kind by kind, and chunk by chunk in each.

    ops: the kinds that it holds.
    times: number -> how long it takes.
    travels: number -> how long its result travels to another rank; is_sent: whether it does.
    slots: number -> slot of its result. A BACKWARD and a BACKWARD_INPUT of one micro-batch are alternatives and share one.
    needs: number -> (slot that it waits for, whether that comes from another chunk).
    """

    def __init__(self, program: Program, cost: Cost, ops: Sequence[Op]):
        self.num_micro_batches = program.num_micro_batches
        self.per_op = program.num_chunks * program.num_micro_batches
        keys = product(ops, range(program.num_chunks), range(program.num_micro_batches))
        self.instructions = [Instruction(*key) for key in keys]
        self.numbers = {i: number for number, i in enumerate(self.instructions)}
        self.times = [cost(i) for i in self.instructions]
        transfers = [transfers_after(program, i) for i in self.instructions]
        self.travels = [sum(map(cost, sends)) for sends in transfers]
        self.is_sent = [bool(sends) for sends in transfers]
        self.slots = [self._slot(i) for i in self.instructions]
        self.needs = [self._needs(i) for i in self.instructions]

    def _slot(self, i: Instruction) -> int:
        op = Op.BACKWARD_INPUT if i.op is Op.BACKWARD else i.op
        return self.numbers[Instruction(op, i.chunk, i.micro_batch)]

    def _needs(self, i: Instruction) -> list[tuple[int, bool]]:
        known = [d for d in depends_on(i) if d in self.numbers]
        return list(dict.fromkeys((self._slot(d), d.chunk != i.chunk) for d in known))

    def chunk_of(self, number: int) -> int:
        """Return the chunk of an instruction."""
        return number % self.per_op // self.num_micro_batches


class ListClock:
    """The ends of the instructions of a table and the arrivals of their results, both infinite until they are started.

    slack: added to the time of each transfer.
    """

    def __init__(self, table: ComputeTable, slack: float = 0.0):
        self._table, self._slots, self._needs = table, table.slots, table.needs
        self.travels = [t + sent * slack for t, sent in zip(table.travels, table.is_sent, strict=True)]
        self._ends = [inf] * len(table.times)
        self.arrivals = [inf] * len(table.times)

    def ready(self, number: int) -> float:
        """Return when an instruction can start."""
        latest = 0.0
        for slot, elsewhere in self._needs[number]:
            time = self.arrivals[slot] if elsewhere else self._ends[slot]
            if time > latest:
                latest = time
        return latest

    def start(self, number: int, now: float) -> float:
        """Start an instruction. Returns its end."""
        slot = self._slots[number]
        end = self._ends[slot] = now + self._table.times[number]
        self.arrivals[slot] = end + self.travels[number]
        return end

    def run(self, lists: Sequence[Sequence[int]]) -> float:
        """Run each rank's list of numbers. Returns when the last one ends."""
        free, position, left = [0.0] * len(lists), [0] * len(lists), sum(map(len, lists))
        while left:
            before = left
            for rank, numbers in enumerate(lists):
                while position[rank] < len(numbers):
                    number = numbers[position[rank]]
                    ready = self.ready(number)
                    if ready == inf:
                        break
                    free[rank] = self.start(number, max(ready, free[rank]))
                    position[rank] += 1
                    left -= 1
            assert left < before, "the program deadlocks"
        return max(free)
