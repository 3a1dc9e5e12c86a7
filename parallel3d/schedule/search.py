"""Search for the shortest order of split backwards, for any placement, any times and any memory limits.

This is list scheduling: a rank that is free starts the best instruction that is ready, as in the heuristic of
arXiv:2401.10241, section 3. Several rules for the best instruction are tried, and the shortest order is used.

Lists are timed by a ListClock, faster than `timing`, with one simplification: a transfer never waits for another one in its
channel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import product
from math import inf
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from parallel3d.errors import ScheduleError
from parallel3d.schedule.instructions import Instruction, Op, Program, chunks_by_rank, depends_on
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


_ROUNDING = 1e-9  # relative tolerance of rounding


class Memory(BaseModel):
    """Memory limits of the ranks, in any unit.

    held: memory of one micro-batch on each chunk, from its FORWARD to its BACKWARD_INPUT.
    deferred: memory of one micro-batch on each chunk, from there to its BACKWARD_WEIGHT.
    limit: memory of each rank.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    held: tuple[float, ...]
    deferred: tuple[float, ...]
    limit: tuple[float, ...]

    @staticmethod
    def of_activations(placement: Sequence[int], most: float) -> Memory:
        """Limit each rank to `most` activations, each held until its BACKWARD_WEIGHT."""
        ones = (1.0,) * len(placement)
        return Memory(held=ones, deferred=ones, limit=(most,) * (max(placement) + 1))

    @property
    def needed(self) -> list[float]:
        """The most that a micro-batch on each chunk ever holds. A rank that reserves it can run any of its backwards."""
        return list(map(max, self.held, self.deferred))

    def least(self, placement: Sequence[int]) -> list[float]:
        """Return the memory that a single micro-batch needs on each rank."""
        needed = self.needed
        return [sum(needed[c] for c in chunks) for chunks in chunks_by_rank(placement)]


class Rule(NamedTuple):
    """Rule by which a rank chooses among the instructions that are ready.

    - choice: between a forward and an input gradient: "alternate", "gradient" or "forward".
    - slack: transfers are assumed longer by the time of this number of forwards, for an order that tolerates delays.
    - patience: a weight gradient waits for what will be ready before this share of it would be done.
    """

    choice: str
    slack: float
    patience: float


ALL_RULES = [Rule(*r) for r in product(("alternate", "gradient", "forward"), (0.5, 0.1, 0.0), (0.0, 0.5))]
# Four rules whose best order is seldom longer than the best of all rules by more than 4% where memory is short.
TIGHT_RULES = [
    Rule(*r) for r in (("alternate", 0, 0), ("forward", 0.1, 0.5), ("gradient", 0, 0.5), ("alternate", 0.1, 0))
]
# Three rules that are seldom all bad: their best order is usually within 2% of the best of all rules.
LIKELY_RULES = [Rule("alternate", 0.1, 0.5), Rule("alternate", 0.1, 0.0), Rule("gradient", 0.0, 0.0)]
_SLACKS = (0.0, 0.1, 0.5)  # delays of transfers, in forwards, by which equally short orders are compared


def search(
    name: str,
    placement: tuple[int, ...],
    num_micro_batches: int,
    memory: Memory,
    cost: Cost,
    rules: Sequence[Rule] = ALL_RULES,
) -> Program:
    """Find a short order of forwards, input and weight gradients; return it as a program of that name.

    cost: time of an instruction; a transfer's is that of its SEND. Of equally short orders, it returns the one that slow
    transfers lengthen least. Equal arguments give equal programs. rules: to try; the time grows with their number.

    Raises ScheduleError if a rank's limit doesn't suffice for one micro-batch.
    """
    for rank, (least, limit) in enumerate(zip(memory.least(placement), memory.limit, strict=True)):
        if not limit * (1 + _ROUNDING) >= least:
            raise ScheduleError(
                f"stage {rank} may hold {limit:.4g}, but one micro-batch on its chunks needs {least:.4g}; allow it more"
            )
    empty = Program(name, placement, num_micro_batches, ((),) * (max(placement) + 1))
    plain = ListClock(empty, cost, SPLIT_OPS)
    per_op = len(plain.rows) // len(SPLIT_OPS)
    forward_time = sum(row.time for row in plain.rows[:per_op]) / per_op
    clocks = {s: plain.slowed(s * forward_time) if s else plain for s in _SLACKS}
    work = sum(row.time for row in plain.rows) or 1.0
    bounds = [round(_bound(clock, empty) / work, 9) for clock in clocks.values()]
    best: list[list[int]] = []
    shortest = [inf]
    for rule in rules:
        order = _ListSchedule(clocks[rule.slack], placement, rule, memory).run()
        makespans: list[float] = []  # relative to all work, so that equal times tie; then with slow transfers
        for clock in clocks.values():
            makespan = clock.makespan([[clock.rows[n] for n in numbers] for numbers in order])
            makespans.append(round(makespan / work, 9))
            if makespans > shortest[: len(makespans)]:
                break
        if makespans < shortest:
            best, shortest = order, makespans
        if shortest <= bounds:
            break
    return empty.with_instructions([[plain.rows[n].instruction for n in numbers] for numbers in best])


def _bound(clock: ListClock, program: Program) -> float:
    """Return a lower bound of the makespan: each rank's own work, begun when the first micro-batch can reach the rank."""
    work = [0.0] * program.num_ranks
    for row in clock.rows:
        work[program.placement[row.instruction.chunk]] += row.time
    reached, latest, m = 0.0, 0.0, program.num_micro_batches
    for chunk, rank in enumerate(program.placement):
        if rank not in program.placement[:chunk]:
            latest = max(latest, reached + work[rank])
        reached += clock.rows[chunk * m].time + clock.rows[chunk * m].travel
    return latest


@dataclass
class _Rank:
    """Instructions that a rank has left, for each chunk in the order of the micro-batches, and the memory that it holds.

    forwards: from the last chunk to the first; gradients: from the first to the last.
    """

    limit: float
    forwards: list[deque[int]]
    gradients: list[deque[int]]
    weights: deque[int] = field(default_factory=deque)
    free: float = 0.0
    held: float = 0.0
    after_forward: bool = False
    order: list[int] = field(default_factory=list)


class _ListSchedule:
    """List scheduler: a free rank starts the best ready instruction, a forward only within its memory limit.

    The best forward is the one closest to the loss, the best input gradient the one farthest from it. A forward starts only if
    memory remains for the rank's later chunks. So the oldest micro-batch that still runs forward waits only for memory of older
    ones, whose backwards need none: no rank waits forever. Instructions are indices of the clock's rows.
    """

    def __init__(self, clock: ListClock, placement: Sequence[int], rule: Rule, memory: Memory) -> None:
        self._rows, self._arrivals, self._rule = clock.rows, clock.empty_slots(), rule
        self._per_op = len(clock.rows) // len(SPLIT_OPS)
        self._chunks = [row.instruction.chunk for row in clock.rows]
        self._needs = [row.needs for row in clock.rows]
        self._receivers = [placement[chunk] for chunk in self._chunks]  # of the result in each slot
        for row in clock.rows:
            if row.needs >= 0:
                self._receivers[row.needs] = placement[row.instruction.chunk]
        self._needed, self._deferred = memory.needed, memory.deferred
        own = chunks_by_rank(placement)
        self._room = [sum(self._needed[d] for d in own[rank] if d >= c) for c, rank in enumerate(placement)]
        m = self._per_op // len(placement)
        self._ranks = []
        for chunks, limit in zip(own, memory.limit, strict=True):
            forwards = [range(c * m, (c + 1) * m) for c in chunks]
            gradients = [deque(range(f.start + self._per_op, f.stop + self._per_op)) for f in forwards]
            self._ranks.append(_Rank(limit * (1 + _ROUNDING), [deque(f) for f in forwards[::-1]], gradients))

    def run(self) -> list[list[int]]:
        """Return the order of each rank."""
        # When a rank gets free, or a result reaches it: at other moments no rank has anything new to choose from.
        events = [(0.0, k) for k in range(len(self._ranks))]
        while events:
            now, k = heappop(events)
            rank = self._ranks[k]
            number = self._choose(rank, now) if rank.free <= now else None
            if number is not None:
                row = self._rows[number]
                rank.free = now + row.time
                self._arrivals[row.gives] = rank.free + row.travel
                rank.order.append(number)
                heappush(events, (rank.free, k))
                if self._receivers[row.gives] != k:
                    heappush(events, (rank.free + row.travel, self._receivers[row.gives]))
        assert not any(any(rank.forwards) or any(rank.gradients) or rank.weights for rank in self._ranks)
        return [rank.order for rank in self._ranks]

    def _choose(self, rank: _Rank, now: float) -> int | None:
        """Return the instruction that a free rank starts now, or None if it waits."""
        gradient_first = {"alternate": rank.after_forward, "gradient": True, "forward": False}[self._rule.choice]
        soonest = inf
        for is_gradient in (gradient_first, not gradient_first):
            room = inf if is_gradient else rank.limit - rank.held
            queue, ready = self._first(rank.gradients if is_gradient else rank.forwards, now, room)
            if queue is not None and ready <= now:
                number = queue.popleft()
                chunk = self._chunks[number]
                if is_gradient:
                    rank.held -= self._needed[chunk] - self._deferred[chunk]
                    rank.weights.append(number + self._per_op)
                else:
                    rank.held += self._needed[chunk]
                rank.after_forward = not is_gradient
                return number
            soonest = min(soonest, ready)
        if rank.weights and soonest >= now + self._rule.patience * self._rows[rank.weights[0]].time:
            rank.held -= self._deferred[self._chunks[rank.weights[0]]]
            return rank.weights.popleft()
        return None

    def _first(self, queues: Sequence[deque[int]], now: float, room: float) -> tuple[deque[int] | None, float]:
        """Return (queue, time): the first queue whose head is ready and fits, or else the one whose head is ready first."""
        best, soonest = None, inf
        for queue in queues:
            if queue and (room == inf or self._room[self._chunks[queue[0]]] <= room):
                ready = self._arrivals[self._needs[queue[0]]]
                if ready <= now:
                    return queue, ready
                if ready < soonest:
                    best, soonest = queue, ready
        return best, soonest
