"""ZeRO's gathers and reductions beside a program, and the orders of its weight gradients that hide them best.

A reduction starts when its chunk's gradients are complete. Where the last weight gradients of all chunks of a rank stand
side by side at the end, little is left for them to hide behind; one chunk after the other, all but the last one's are hidden.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from math import inf
from typing import NamedTuple

from parallel3d.schedule.instructions import Instruction, Op, Program
from parallel3d.schedule.list_clock import ALL_OPS, ComputeTable
from parallel3d.schedule.lowering import (
    add_gradient_reduction,
    add_parameter_gather,
    with_communication,
)
from parallel3d.schedule.timing import Cost

_ROUNDING = 1e-9  # relative
# What orders are tried for: so many instructions are timed in all, in about a tenth of a second.
_MOST_TIMED = 200_000

Fits = Callable[[int, Sequence[Instruction]], bool]


@dataclass(frozen=True)
class Traffic:
    """Communication of the ranks of a chunk with their replicas, in any unit of time.

    gather: the all-gather of each chunk's weights, before its first forward.
    reductions: of each of its buckets of gradients, in the order in which a backward fills them, after the last backward
        or, with every_micro_batch, after each.
    """

    gather: tuple[float, ...]
    reductions: tuple[tuple[float, ...], ...]
    every_micro_batch: bool

    def __bool__(self) -> bool:
        """Whether there is any."""
        return any(self.gather) or any(map(any, self.reductions))

    def cost(self, i: Instruction) -> float:
        """Return the time of a GATHER_PARAMS or REDUCE_GRADS."""
        return self.gather[i.chunk] if i.bucket is None else self.reductions[i.chunk][i.bucket]

    def added(self, program: Program) -> Program:
        """The program with communication, and the gathers and reductions that take time.

        In the order in which an engine lowers it: a receive in between would part a backward from its reductions.
        """
        program = with_communication(program)
        if any(map(any, self.reductions)):
            program = add_gradient_reduction(program, [len(b) for b in self.reductions], self.every_micro_batch)
        return add_parameter_gather(program) if any(self.gather) else program

    def busy(self, program: Program) -> float:
        """The longest time for which a rank communicates in a step."""
        times = program.num_micro_batches if self.every_micro_batch else 1
        total = [0.0] * program.num_ranks
        for chunk, rank in enumerate(program.placement):
            total[rank] += self.gather[chunk] + times * sum(self.reductions[chunk])
        return max(total)


def hide_reductions(program: Program, cost: Cost, traffic: Traffic, fits: Fits) -> tuple[Program, float]:
    """The program with the weight gradients of each rank in the order that ends the step and its reductions the soonest.

    And how long the given one takes, if no transfer waits for another: at least.

    program: compute instructions alone; fits: whether a rank has the memory for such a list. Orders in which a rank completes
    one chunk after the other come first, then single weight gradients change their places, into whole backwards and out of them
    too, as long as that makes the step shorter, or ranks' parts of an equally long one, and for a bounded number of trials.
    Weight gradients of a chunk are alike. Equal arguments give equal programs.
    """
    step = _Step(program, cost, traffic)
    search = _Search(step, [[step.rows[i] for i in rank] for rank in program.instructions], fits)
    least = search.makespan
    search.run()
    return program.with_instructions([_named(rank) for rank in search.lists]), least


class _Row(NamedTuple):
    """A compute instruction as the timing of reductions sees it.

    needs: slot of what it waits for from another chunk.
    gives: slot of its result.
    travel: how long the result travels.
    earliest: when its chunk's weights are gathered.
    chunk: the chunk to whose gradients it adds, or -1.
    released: from its start to the end of the last reduction that it launches, if no other one is under way.
    """

    instruction: Instruction
    needs: int
    gives: int
    time: float
    travel: float
    earliest: float
    chunk: int
    released: float


class _Step:
    """Times the compute and the reductions of lists of the same chunks and micro-batches, see ListClock."""

    def __init__(self, program: Program, cost: Cost, traffic: Traffic):
        self.program, self._traffic = program, traffic
        self._sums = [sum(buckets) for buckets in traffic.reductions]
        gathered, self._gathers = _gathered(program, traffic)
        table = ComputeTable(program, cost, ALL_OPS)
        always = len(table.instructions)  # a slot that is filled from the beginning
        self._at = [inf] * always + [0.0]
        self.rows: dict[Instruction, _Row] = {}
        for i, number in table.numbers.items():
            # What it needs of its own chunk stands before it in its rank's list.
            needs = next((slot for slot, elsewhere in table.needs[number] if elsewhere), always)
            earliest = gathered[i.chunk] if i.op is Op.FORWARD else 0.0
            adds = i.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT)
            released = _released(table.times[number], traffic.reductions[i.chunk]) if adds else 0.0
            times = table.times[number], table.travels[number], earliest
            self.rows[i] = _Row(i, needs, table.slots[number], *times, i.chunk if adds else -1, released)

    def ends(self, lists: Sequence[Sequence[_Row]]) -> tuple[list[float], list[float]]:
        """(end of each rank's compute, end of its compute and its traffic)."""
        at, free, left = self._at.copy(), [0.0] * len(lists), sum(map(len, lists))
        position, line = [0] * len(lists), self._gathers.copy()
        # chunk -> when its reductions end if none was under way, in the order in which chunks were completed.
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
                        if self._traffic.every_micro_batch:
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

    def unavoidable(self) -> float:
        """Return the least time that any rank still reduces after its last backward."""
        return min(buckets[-1] if buckets else 0.0 for buckets in self._traffic.reductions)


def _gathered(program: Program, traffic: Traffic) -> tuple[list[float], list[float]]:
    """(when each chunk's weights are gathered, when all of a rank are); they are gathered in the order of first use."""
    ends, whole = [0.0] * program.num_chunks, [0.0] * program.num_ranks
    for rank, instructions in enumerate(program.instructions):
        for chunk in dict.fromkeys(i.chunk for i in instructions if i.op is Op.FORWARD):
            whole[rank] = ends[chunk] = whole[rank] + traffic.gather[chunk]
    return ends, whole


def _released(time: float, buckets: Sequence[float]) -> float:
    """The k-th of n buckets is full when k/n of the backward is through; then they travel one after the other."""
    end = 0.0
    for k, seconds in enumerate(buckets, start=1):
        end = max(end, time * k / len(buckets)) + seconds
    return end


class _Search:
    """Changes the order of weight gradients, rank by rank, as long as that helps. lists: the best so far."""

    def __init__(self, step: _Step, lists: list[list[_Row]], fits: Fits):
        self._step, self.lists, self._fits = step, lists, fits
        self._left = max(1, _MOST_TIMED // max(1, sum(map(len, lists))))
        compute, self._ends = step.ends(lists)
        # No order avoids that the rank whose compute ends last has something left to reduce then.
        self._least = max(compute) + step.unavoidable()

    @property
    def makespan(self) -> float:
        """The makespan of the best lists so far."""
        return max(self._ends)

    def run(self) -> None:
        """Until nothing helps, nothing more can, or the trials are used up."""
        for share, turn in product(_SHARES, (1, -1)):
            self._try([next(iter(_completing(rank, [_chunks(rank)[::turn]], share)), rank) for rank in self.lists])
        while self.makespan > self._least * (1 + _ROUNDING) and self._improve():
            pass

    def _improve(self) -> bool:
        """Whether one change helps, or two together; the first that does is made."""
        for depth in (1, 2):
            for lists in self._changed(self.lists, depth):
                if self._left <= 0:
                    return False
                if self._try(lists):
                    return True
        return False

    def _changed(self, lists: list[list[_Row]], depth: int) -> Iterator[list[list[_Row]]]:
        """With so many changes, beginning with the ranks that end last."""
        if depth == 0:
            yield lists
            return
        for rank in sorted(range(len(lists)), key=lambda rank: -self._ends[rank]):
            for rows in _neighbours(lists[rank], self._step.rows):
                yield from self._changed([*lists[:rank], rows, *lists[rank + 1 :]], depth - 1)

    def _try(self, lists: list[list[_Row]]) -> bool:
        self._left -= 1
        _, ends = self._step.ends(lists)
        now, before = max(ends), max(self._ends)
        shorter = now < before * (1 - _ROUNDING)
        if not shorter and (now > before * (1 + _ROUNDING) or sum(ends) >= sum(self._ends) * (1 - _ROUNDING)):
            return False
        changed = [r for r, (new, old) in enumerate(zip(lists, self.lists, strict=True)) if new is not old]
        if not all(self._fits(r, _named(lists[r])) for r in changed):
            return False
        self.lists, self._ends = lists, ends
        return True


_SHARES = (1.0, 0.5, 0.25)  # of a rank's weight gradients that change places: the last ones
_MOST_PERMUTED = 3  # chunks; of more the rotations


def _chunks(rows: Iterable[_Row]) -> list[int]:
    """Those with weight gradients of their own, in the order in which their last input gradients stand."""
    deferred = {row.chunk for row in rows if row.instruction.op is Op.BACKWARD_WEIGHT}
    last = {row.instruction.chunk: k for k, row in enumerate(rows) if row.instruction.op is Op.BACKWARD_INPUT}
    return sorted(deferred, key=last.__getitem__)


def _neighbours(rows: list[_Row], every: Mapping[Instruction, _Row]) -> Iterator[list[_Row]]:
    """Other orders of a rank's weight gradients: one chunk after the other; then one of them elsewhere, the last ones first,
    whether it stands by itself, is taken out of a whole backward, or into one. every: row of an instruction.
    """
    chunks = _chunks(rows)
    turned = [chunks[k:] + chunks[:k] for k in range(len(chunks))]
    orders = list(permutations(chunks)) if len(chunks) <= _MOST_PERMUTED else turned + [t[::-1] for t in turned]
    for share in _SHARES:
        yield from _completing(rows, orders, share)
    for place in reversed(range(len(rows))):
        i = rows[place].instruction
        if i.op is Op.BACKWARD_INPUT:
            taken = next(k for k in range(place, len(rows)) if _is_half(rows[k], Op.BACKWARD_WEIGHT, i.chunk))
            whole = every[Instruction(Op.BACKWARD, i.chunk, i.micro_batch)]
            yield [*rows[:place], whole, *rows[place + 1 : taken], *rows[taken + 1 :]]
        elif i.op is Op.BACKWARD:
            halves = [every[Instruction(op, i.chunk, i.micro_batch)] for op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)]
            cut = [*rows[:place], *halves, *rows[place + 1 :]]
            yield cut
            yield from _with_later(cut, place + 1)
        elif i.op is Op.BACKWARD_WEIGHT:
            yield from _with_earlier(rows, place)
            yield from _with_later(rows, place)


def _is_half(row: _Row, op: Op, chunk: int) -> bool:
    return row.instruction.op is op and row.instruction.chunk == chunk


def _with_earlier(rows: list[_Row], place: int) -> Iterator[list[_Row]]:
    """The weight gradient at `place` at each place before that leaves it behind an input gradient of its own."""
    row, chunk = rows[place], rows[place].chunk
    ready = sum(_is_half(r, Op.BACKWARD_INPUT, chunk) - _is_half(r, Op.BACKWARD_WEIGHT, chunk) for r in rows[:place])
    for k in range(place - 1, -1, -1):
        ready -= _is_half(rows[k], Op.BACKWARD_INPUT, chunk) - _is_half(rows[k], Op.BACKWARD_WEIGHT, chunk)
        if ready < 1:
            return
        if not _is_half(rows[k], Op.BACKWARD_WEIGHT, chunk):
            yield [*rows[:k], row, *rows[k:place], *rows[place + 1 :]]


def _with_later(rows: list[_Row], place: int) -> Iterator[list[_Row]]:
    """The weight gradient at `place` at each place behind."""
    row = rows[place]
    for k in range(place + 1, len(rows)):
        if not _is_half(rows[k], Op.BACKWARD_WEIGHT, row.chunk):
            yield [*rows[:place], *rows[place + 1 : k + 1], row, *rows[k + 1 :]]


def _completing(rows: list[_Row], orders: Iterable[Sequence[int]], share: float) -> Iterator[list[_Row]]:
    """The last `share` of the weight gradients in their places, but of the first chunk of each order that has one ready."""
    places = [k for k, row in enumerate(rows) if row.instruction.op is Op.BACKWARD_WEIGHT]
    since = places[int(len(places) * (1 - share))] if places else 0
    of_chunk = {rows[k].chunk: rows[k] for k in places}
    for order in orders:
        ready: Counter[int] = Counter()
        out = []
        for k, row in enumerate(rows):
            if row.instruction.op is Op.BACKWARD_INPUT:
                ready[row.instruction.chunk] += 1
            elif row.instruction.op is Op.BACKWARD_WEIGHT:
                chunk = next(c for c in order if ready[c]) if k >= since else row.chunk
                ready[chunk] -= 1
                row = of_chunk[chunk]
            out.append(row)
        if any(new.chunk != old.chunk for new, old in zip(out, rows, strict=True)):
            yield out


def _named(rows: Iterable[_Row]) -> list[Instruction]:
    """The weight gradients of a chunk are of its micro-batches in the order of their input gradients."""
    left: dict[int, deque[int]] = {}
    out = []
    for row in rows:
        i = row.instruction
        if i.op is Op.BACKWARD_INPUT:
            left.setdefault(i.chunk, deque()).append(i.micro_batch)
        elif i.op is Op.BACKWARD_WEIGHT:
            i = Instruction(i.op, i.chunk, left[i.chunk].popleft())
        out.append(i)
    return out
