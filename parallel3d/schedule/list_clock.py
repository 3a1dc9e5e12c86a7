"""Timer of lists of compute instructions: when ranks end their compute, and the reductions that run meanwhile.

Faster than `timing`, with one simplification: a transfer never waits for another one in its channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from itertools import product
from math import inf
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from parallel3d.schedule.instructions import Instruction, Op, Program, chunks_by_rank, depends_on
from parallel3d.schedule.lowering import add_gradient_reduction, add_parameter_gather, send_after, with_communication
from parallel3d.schedule.timing import Cost

SPLIT_OPS = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


class Traffic(BaseModel):
    """ZeRO's communication of each chunk, in any unit of time.

    gather: time to all-gather each chunk's weights, before its first forward; empty for none.
    reductions: for each chunk the times to reduce its gradient buckets, in the order in which a backward fills them, after
        the last backward or, with reduces_every_micro_batch, after each one; empty for none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    gather: tuple[float, ...] = ()
    reductions: tuple[tuple[float, ...], ...] = ()
    reduces_every_micro_batch: bool = False

    @property
    def has_reductions(self) -> bool:
        """Whether any reduction takes time."""
        return any(map(any, self.reductions))

    def with_traffic(self, program: Program) -> Program:
        """Return the program with communication, and with the gathers and reductions that take time.

        The passes run in the engine's order, so that no receive comes between a backward and its reductions.
        """
        program = with_communication(program)
        if self.has_reductions:
            program = add_gradient_reduction(program, list(map(len, self.reductions)), self.reduces_every_micro_batch)
        return add_parameter_gather(program) if any(self.gather) else program

    def busy(self, placement: Sequence[int], num_micro_batches: int) -> float:
        """Return the longest time for which a rank gathers and reduces in a step."""
        count = num_micro_batches if self.reduces_every_micro_batch else 1
        gathers = self.gather or (0.0,) * len(placement)
        reductions = self.reductions or ((),) * len(placement)
        seconds = [gather + count * sum(buckets) for gather, buckets in zip(gathers, reductions, strict=True)]
        return max(sum(seconds[c] for c in chunks) for chunks in chunks_by_rank(placement))


class Row(NamedTuple):
    """Compute instruction with the numbers by which it is timed.

    needs: slot of the result that it waits for, -1 for none. Its other dependences precede it in its rank's list.
    gives: slot of its result. A BACKWARD and a BACKWARD_INPUT of one micro-batch are alternatives and share a slot.
    travel: time in which the result reaches another rank, 0 if it stays.
    earliest: when its chunk's weights are gathered; 0 except for a forward.
    completes: the chunk to whose weight gradients it adds, or -1.
    released: time from its start to the end of the last reduction that it launches, if no other one is under way.
    """

    instruction: Instruction
    needs: int
    gives: int
    time: float
    travel: float
    earliest: float
    completes: int
    released: float


class ListClock:
    """Times lists of the compute instructions of a program's chunks and micro-batches.

    rows: one for each instruction of the kinds `ops`, ordered by kind, then by chunk, then by micro-batch.
    cost: of an instruction, whatever its micro-batch.
    """

    def __init__(
        self,
        program: Program,
        cost: Cost,
        ops: Sequence[Op] = (*SPLIT_OPS, Op.BACKWARD),
        traffic: Traffic | None = None,
    ):
        self._traffic = traffic or Traffic()
        buckets = self._traffic.reductions or ((),) * program.num_chunks
        self._sums = list(map(sum, buckets))
        gathered, self._gathers = _gathered(program, self._traffic)
        places = list(product(ops, range(program.num_chunks)))
        instructions = [Instruction(*place, m) for place in places for m in range(program.num_micro_batches)]
        self._numbers = {i: number for number, i in enumerate(instructions)}
        self.rows: list[Row] = []
        self._sent: list[bool] = []  # whether the result of each row's kind and chunk goes to another rank
        for op, chunk in places:
            first = Instruction(op, chunk, 0)
            needs, gives, send = self._needs(first), self._slot(first), send_after(program, first)
            earliest = gathered[chunk] if op is Op.FORWARD else 0.0
            completes = chunk if op in (Op.BACKWARD, Op.BACKWARD_WEIGHT) else -1
            time, travel = cost(first), 0.0 if send is None else cost(send)
            self._sent.append(send is not None)
            released = _released(time, buckets[chunk]) if completes >= 0 else 0.0
            number = len(self.rows)
            self.rows += [
                Row(i, -1 if needs is None else needs + m, gives + m, time, travel, earliest, completes, released)
                for m, i in enumerate(instructions[number : number + program.num_micro_batches])
            ]

    def slowed(self, slack: float) -> ListClock:
        """Return a clock with a time added to that of each transfer."""
        other, number = copy(self), len(self.rows) // len(self._sent)
        other.rows = [
            Row(*row[:4], row.travel + slack, *row[5:]) if self._sent[k // number] else row
            for k, row in enumerate(self.rows)
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

    def row(self, i: Instruction) -> Row:
        """Return the row of an instruction."""
        return self.rows[self._numbers[i]]

    def lists(self, program: Program) -> list[list[Row]]:
        """Return the rows of a program of compute instructions."""
        return [[self.rows[self._numbers[i]] for i in rank] for rank in program.instructions]

    def ends(self, lists: Sequence[Sequence[Row]]) -> tuple[list[float], list[float]]:
        """Return (end of each rank's compute, end of its compute and its traffic)."""
        at, free, left = self.empty_slots(), [0.0] * len(lists), sum(map(len, lists))
        position, line = [0] * len(lists), self._gathers.copy()
        every = self._traffic.reduces_every_micro_batch
        # chunk -> when its reductions end if no other is under way, in the order in which chunks are completed.
        completed: list[dict[int, float]] = [{} for _ in lists]
        while left:
            before = left
            for rank, rows in enumerate(lists):
                now, first, done = free[rank], position[rank], completed[rank]
                for _, needs, gives, time, travel, earliest, chunk, released in rows[first:]:
                    ready = at[needs]
                    if ready == inf:
                        break
                    start = ready if ready > now else now
                    if start < earliest:
                        start = earliest
                    now = start + time
                    at[gives] = now + travel
                    left -= 1
                    position[rank] += 1
                    if chunk >= 0:
                        if every:
                            line[rank] = max(line[rank] + self._sums[chunk], start + released)
                        else:
                            done.pop(chunk, None)
                            done[chunk] = start + released
                free[rank] = now
            assert left < before, "the program deadlocks"
        for rank, done in enumerate(completed):
            for chunk, end in done.items():
                line[rank] = max(line[rank] + self._sums[chunk], end)
        return free, [max(pair) for pair in zip(free, line, strict=True)]


def _gathered(program: Program, traffic: Traffic) -> tuple[list[float], list[float]]:
    """Return when the weights of each chunk and all weights of each rank are gathered, in the order of first use."""
    ends, whole = [0.0] * program.num_chunks, [0.0] * program.num_ranks
    for rank, instructions in enumerate(program.instructions if traffic.gather else ()):
        for chunk in dict.fromkeys(i.chunk for i in instructions if i.op is Op.FORWARD):
            whole[rank] = ends[chunk] = whole[rank] + traffic.gather[chunk]
    return ends, whole


def _released(time: float, buckets: Sequence[float]) -> float:
    """Return when a backward's last reduction ends: the k-th of n buckets fills after k/n of it; one travels at a time."""
    end = 0.0
    for k, seconds in enumerate(buckets, start=1):
        end = max(end, time * k / len(buckets)) + seconds
    return end
