"""The shortest order of split backwards that a search finds: for any placement, any times, within any memory.

A list schedule: whenever a rank is free it starts the best of what is ready, in the manner of the heuristic of
arXiv:2401.10241, section 3. Several rules for what is best are tried, and the shortest order is taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import product
from math import inf
from typing import Literal

from parallel3d.errors import ScheduleError
from parallel3d.schedule.instructions import Program
from parallel3d.schedule.list_clock import SPLIT_OPS, ComputeTable, ListClock
from parallel3d.schedule.timing import Cost

_ROUNDING = 1e-9  # relative: a third of 3 is 1


@dataclass(frozen=True)
class Memory:
    """Memory limits of the ranks, in any unit.

    held: of a micro-batch on each chunk, from its FORWARD to its BACKWARD_INPUT.
    deferred: from there to its BACKWARD_WEIGHT.
    limit: of each rank.
    """

    held: tuple[float, ...]
    deferred: tuple[float, ...]
    limit: tuple[float, ...]

    @staticmethod
    def of_activations(placement: Sequence[int], most: float) -> Memory:
        """Limit each rank to `most` activations, each held until its BACKWARD_WEIGHT."""
        ones = (1.0,) * len(placement)
        return Memory(ones, ones, (most,) * (max(placement) + 1))

    def needed(self, chunk: int) -> float:
        """The most that a micro-batch on this chunk ever holds: a rank that sets it aside may run any backward."""
        return max(self.held[chunk], self.deferred[chunk])

    def least(self, placement: Sequence[int]) -> tuple[float, ...]:
        """Return what one micro-batch alone needs on each rank."""
        ranks = range(max(placement) + 1)
        return tuple(sum(self.needed(c) for c, r in enumerate(placement) if r == rank) for rank in ranks)


def search(
    name: str,
    placement: tuple[int, ...],
    num_micro_batches: int,
    memory: Memory,
    cost: Cost,
    roughly: bool = False,
) -> Program:
    """The shortest order of forwards, input and weight gradients that was found, as a program of that name.

    cost: of each instruction, of a transfer by its SEND. Of equally short orders it takes the one that bears slow transfers
    best; equal arguments give equal programs. roughly: try fewer rules, in a sixth of the time. No order is shorter than
    `least_makespan`. Raises ScheduleError where a rank's limit doesn't suffice for one micro-batch.
    """
    for rank, (least, limit) in enumerate(zip(memory.least(placement), memory.limit, strict=True)):
        if not limit * (1 + _ROUNDING) >= least:
            raise ScheduleError(
                f"stage {rank} may hold {limit:.4g}, but one micro-batch on its chunks needs {least:.4g}; allow it more"
            )
    empty = Program(name, placement, num_micro_batches, ((),) * (max(placement) + 1))
    work = _Work(empty, cost)
    bounds = [work.rounded(work.bound(slack)) for slack in _SLACKS]
    best: list[list[int]] = []
    quality = [inf]
    for rule in _LIKELY if roughly else _RULES:
        order = _ListSchedule(work, rule, memory).run()
        found = work.quality(order, quality)
        if found < quality:
            best, quality = order, found
        if quality <= bounds:
            break
    return empty.with_instructions([[work.table.instructions[n] for n in order] for order in best])


def least_makespan(program: Program, cost: Cost) -> float:
    """A bound: each rank's own work, from when the first micro-batch can reach it at the earliest."""
    empty = program.with_instructions([()] * program.num_ranks)
    return _Work(empty, cost).bound(0.0)


_Choice = Literal["alternate", "gradient", "forward"]


@dataclass(frozen=True)
class _Rule:
    """How a rank chooses among what is ready.

    choice: between a forward and an input gradient; slack: transfers are taken to be longer by so many forwards, for an
    order that bears delays; patience: a weight gradient waits for what will be ready before this share of it would be
    through.
    """

    choice: _Choice
    slack: float
    patience: float


_CHOICES: tuple[_Choice, ...] = ("alternate", "gradient", "forward")
_RULES = [_Rule(*r) for r in product(_CHOICES, (0.5, 0.1, 0.0), (0.0, 0.5))]
# Three that are seldom all bad: their best order is within 2% of the best of all.
_LIKELY = [_Rule("alternate", 0.1, 0.5), _Rule("alternate", 0.1, 0.0), _Rule("gradient", 0.0, 0.0)]
_SLACKS = (0.0, 0.1, 0.5)  # forwards by which transfers may be longer: of equals the order that bears more is better


class _Work:
    """The split backwards of a program's shape, and how good orders of them are.

    forward_time: the mean time of a forward.
    """

    def __init__(self, program: Program, cost: Cost) -> None:
        self.placement, self.num_ranks = program.placement, program.num_ranks
        self.table = table = ComputeTable(program, cost, SPLIT_OPS)
        self.num_micro_batches, self.per_op = table.num_micro_batches, table.per_op
        self.times, self.chunk_of = table.times, table.chunk_of
        self.forward_time = sum(self.times[: self.per_op]) / self.per_op

    def clock(self, slack: float) -> ListClock:
        """Return a new clock, with transfers longer by `slack` forwards."""
        return ListClock(self.table, slack * self.forward_time)

    def forward(self, chunk: int) -> range:
        """Return the numbers of a chunk's forwards; those of its input gradients are larger by `per_op`."""
        return range(chunk * self.num_micro_batches, (chunk + 1) * self.num_micro_batches)

    def rounded(self, time: float) -> float:
        """Return a time as a share of all work, so that equal times tie."""
        return round(time / (sum(self.times) or 1.0), 9)

    def quality(self, order: Sequence[Sequence[int]], best: Sequence[float]) -> list[float]:
        """Return the makespans of an order, also with slow transfers; smaller is better. Ends once it is worse than `best`."""
        found: list[float] = []
        for slack in _SLACKS:
            found.append(self.rounded(self.clock(slack).run(order)))
            if found > list(best[: len(found)]):
                break
        return found

    def bound(self, slack: float) -> float:
        """Return a lower bound of the makespan, see least_makespan, with transfers longer by `slack` forwards."""
        clock, reached, latest = self.clock(slack), 0.0, 0.0
        work = [0.0] * self.num_ranks
        for n, time in enumerate(self.times):
            work[self.placement[self.chunk_of(n)]] += time
        met: set[int] = set()
        for chunk, rank in enumerate(self.placement):
            if rank not in met:
                met.add(rank)
                latest = max(latest, reached + work[rank])
            ways = (self.times[n] + clock.travels[n] for n in self.forward(chunk))
            reached += min(ways)
        return latest


class _Rank:
    """The instructions that a rank has left, of each chunk in the order of the micro-batches, and what it holds.

    forwards: from the last chunk to the first; gradients: from the first to the last.
    """

    def __init__(self, forwards: Sequence[range], gradients: Sequence[range]) -> None:
        self.forwards, self.gradients = [deque(r) for r in forwards], [deque(r) for r in gradients]
        self.weights = deque[int]()
        self.free = 0.0
        self.held = 0.0
        self.after_forward = False
        self.order: list[int] = []


class _ListSchedule:
    """Whenever a rank is free it starts the best that is ready: a forward within its limit, an input or a weight gradient.

    Of forwards the one closest to the loss, of input gradients the one farthest from it. A forward leaves room for the later
    chunks of the rank, so the oldest micro-batch on its way forward never waits for memory but that of older ones, which
    are on their way back; these need none, and so all get on.
    """

    def __init__(self, work: _Work, rule: _Rule, memory: Memory) -> None:
        self._work, self._rule = work, rule
        self._clock = work.clock(rule.slack)
        self._limit = [limit * (1 + _ROUNDING) for limit in memory.limit]
        num_chunks = len(work.placement)
        self._needed = [memory.needed(c) for c in range(num_chunks)]
        self._deferred = memory.deferred
        self._room = [
            sum(self._needed[d] for d in range(c, num_chunks) if work.placement[d] == work.placement[c])
            for c in range(num_chunks)
        ]
        self._ranks = []
        for rank in range(work.num_ranks):
            forwards = [work.forward(c) for c, r in enumerate(work.placement) if r == rank]
            gradients = [range(f.start + work.per_op, f.stop + work.per_op) for f in forwards]
            self._ranks.append(_Rank(forwards[::-1], gradients))

    def run(self) -> list[list[int]]:
        """The order of each rank."""
        moments = [0.0]
        while moments:
            now = heappop(moments)
            while moments and moments[0] <= now:
                heappop(moments)
            for index, rank in enumerate(self._ranks):
                number = self._choose(rank, self._limit[index], now) if rank.free <= now else None
                if number is not None:
                    rank.free = self._clock.start(number, now)
                    rank.order.append(number)
                    heappush(moments, rank.free)
                    heappush(moments, self._clock.arrivals[number])
        assert not any(any(rank.forwards) or any(rank.gradients) or rank.weights for rank in self._ranks)
        return [rank.order for rank in self._ranks]

    def _choose(self, rank: _Rank, limit: float, now: float) -> int | None:
        """Return the instruction that a free rank starts now, or None if it waits."""
        forward, forward_at = self._first(rank.forwards, now, limit - rank.held)
        gradient, gradient_at = self._first(rank.gradients, now, inf)
        turn = {"alternate": rank.after_forward, "gradient": True, "forward": False}[self._rule.choice]
        if gradient_at <= now and (turn or forward_at > now):
            return self._start_gradient(rank, gradient)
        if forward_at <= now:
            number = rank.forwards[forward].popleft()
            rank.held += self._needed[self._work.chunk_of(number)]
            rank.after_forward = True
            return number
        if rank.weights:
            through = now + self._rule.patience * self._work.times[rank.weights[0]]
            if min(forward_at, gradient_at) >= through:
                rank.held -= self._deferred[self._work.chunk_of(rank.weights[0])]
                return rank.weights.popleft()
        return None

    def _first(self, queues: Sequence[deque[int]], now: float, room: float) -> tuple[int, float]:
        """The queue whose first is ready and fits, or will be the soonest; and when."""
        best, soonest = 0, inf
        for k, queue in enumerate(queues):
            if queue and (room == inf or self._room[self._work.chunk_of(queue[0])] <= room):
                ready = self._clock.ready(queue[0])
                if ready <= now:
                    return k, ready
                if ready < soonest:
                    best, soonest = k, ready
        return best, soonest

    def _start_gradient(self, rank: _Rank, queue: int) -> int:
        number = rank.gradients[queue].popleft()
        chunk = self._work.chunk_of(number)
        rank.held -= self._needed[chunk] - self._deferred[chunk]
        rank.after_forward = False
        rank.weights.append(number + self._work.per_op)  # numbers count op by op
        return number
