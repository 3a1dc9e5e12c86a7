"""Weight gradients where they help: fused with the input gradient before them, or ordered so that compute hides reductions.

A whole backward overlaps a layer's communication with its weight gradients and frees its tensors at once. But the stage that
waits for its input gradient then waits for the weight gradients too.

A reduction starts when its chunk's gradients are complete. If the chunks of a rank all complete at the end of its list, little
compute is left to overlap with; if they complete one after the other, all reductions but the last one's are hidden.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise, permutations, product, takewhile

from parallel3d.schedule.instructions import Instruction, Op, Program
from parallel3d.schedule.list_clock import ListClock, Row, Traffic
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


_ROUNDING = 1e-9  # relative
# Number of instructions that a whole search times, in about a tenth of a second.
_MOST_TIMED = 200_000
_SHARES = (1.0, 0.5, 0.25)  # shares of a rank's weight gradients that are reordered: the last ones
_MOST_PERMUTED = 3  # chunks whose permutations are tried; of more chunks only the rotations

Fits = Callable[[int, Sequence[Instruction]], bool]


def hide_reductions(program: Program, cost: Cost, traffic: Traffic, fits: Fits) -> Program:
    """Order the weight gradients of each rank so that the step and its reductions end the soonest.

    program: compute instructions alone; fits: whether a rank has the memory for a list. The search first tries orders in which
    a rank completes one chunk after the other. Then it moves single weight gradients, also into and out of whole backwards, as
    long as the step gets shorter, or ranks end earlier in an equally long one. The number of trials is bounded. Weight
    gradients of a chunk are interchangeable. Equal arguments give equal programs.
    """
    search = _Search(program, ListClock(program, cost, traffic=traffic), fits)
    # In every order, the rank whose compute ends last still has a bucket to reduce then.
    least = search.least + min(buckets[-1] if buckets else 0.0 for buckets in traffic.reductions)
    for share, turn in product(_SHARES, (1, -1)):
        search.accepts([next(_completing(rows, [_chunks(rows)[::turn]], share), rows) for rows in search.lists])
    while max(search.ends) > least * (1 + _ROUNDING) and search.improve():
        pass
    return program.with_instructions([renamed(row.instruction for row in rows) for rows in search.lists])


class _Search:
    """Changes the order of weight gradients, rank by rank, as long as that helps.

    lists: the best so far; ends: when each rank's compute and traffic end in them; least: the latest end of compute at first.
    """

    def __init__(self, program: Program, clock: ListClock, fits: Fits):
        self._clock, self.lists, self._fits = clock, clock.lists(program), fits
        self._left = max(1, _MOST_TIMED // max(1, sum(map(len, self.lists))))
        compute, self.ends = clock.ends(self.lists)
        self.least = max(compute)

    def improve(self) -> bool:
        """Make the first change that helps, or the first two that do together. Returns whether there are any."""
        for depth in (1, 2):
            for lists in self._changed(self.lists, depth):
                if self._left <= 0:
                    return False
                if self.accepts(lists):
                    return True
        return False

    def _changed(self, lists: list[list[Row]], depth: int) -> Iterator[list[list[Row]]]:
        """Yield the lists with `depth` changes, beginning with the ranks that end last."""
        if depth == 0:
            yield lists
            return
        for rank in sorted(range(len(lists)), key=lambda rank: -self.ends[rank]):
            for rows in _neighbours(lists[rank], self._clock):
                yield from self._changed([*lists[:rank], rows, *lists[rank + 1 :]], depth - 1)

    def accepts(self, lists: list[list[Row]]) -> bool:
        """Keep these lists if they are better and fit. Returns whether they are kept."""
        self._left -= 1
        _, ends = self._clock.ends(lists)
        now, before = max(ends), max(self.ends)
        shorter = now < before * (1 - _ROUNDING)
        if not shorter and (now > before * (1 + _ROUNDING) or sum(ends) >= sum(self.ends) * (1 - _ROUNDING)):
            return False
        for rank, (new, old) in enumerate(zip(lists, self.lists, strict=True)):
            if new is not old and not self._fits(rank, [row.instruction for row in new]):
                return False
        self.lists, self.ends = lists, ends
        return True


def _chunks(rows: Iterable[Row]) -> list[int]:
    """Return the chunks with separate weight gradients, in the order of their last input gradients."""
    deferred = {row.instruction.chunk for row in rows if row.instruction.op is Op.BACKWARD_WEIGHT}
    last = {row.instruction.chunk: k for k, row in enumerate(rows) if row.instruction.op is Op.BACKWARD_INPUT}
    return sorted(deferred, key=last.__getitem__)


def _neighbours(rows: list[Row], clock: ListClock) -> Iterator[list[Row]]:
    """Yield other orders of a rank's weight gradients: first those that complete one chunk after the other.

    Then one weight gradient moves, the last ones first: alone, out of a whole backward, or into one.
    """
    chunks = _chunks(rows)
    turned = [chunks[k:] + chunks[:k] for k in range(len(chunks))]
    orders = list(permutations(chunks)) if len(chunks) <= _MOST_PERMUTED else turned + [t[::-1] for t in turned]
    for share in _SHARES:
        yield from _completing(rows, orders, share)
    for place in reversed(range(len(rows))):
        op, chunk, m = rows[place].instruction[:3]
        if op is Op.BACKWARD_INPUT:
            later = range(place, len(rows))
            half = next(k for k in later if rows[k].instruction[:2] == (Op.BACKWARD_WEIGHT, chunk))
            yield [
                *rows[:place],
                clock.row(Instruction(Op.BACKWARD, chunk, m)),
                *rows[place + 1 : half],
                *rows[half + 1 :],
            ]
        elif op is Op.BACKWARD:
            halves = [clock.row(Instruction(half, chunk, m)) for half in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)]
            cut = [*rows[:place], *halves, *rows[place + 1 :]]
            yield cut
            yield from _moved(cut, place + 1, later_only=True)
        elif op is Op.BACKWARD_WEIGHT:
            yield from _moved(rows, place)


def _moved(rows: list[Row], place: int, later_only: bool = False) -> Iterator[list[Row]]:
    """Yield lists in which the weight gradient at `place` is elsewhere after an input gradient of its chunk, nearest first."""
    row = rows[place]
    rest = [*rows[:place], *rows[place + 1 :]]
    of_chunk = [r.instruction.op if r.instruction.chunk == row.completes else None for r in rest]
    ready = list(accumulate(((op is Op.BACKWARD_INPUT) - (op is Op.BACKWARD_WEIGHT) for op in of_chunk), initial=0))
    earlier = () if later_only else takewhile(lambda k: ready[k] >= 1, range(place - 1, -1, -1))
    for k in chain(earlier, range(place + 1, len(rows))):
        if of_chunk[k if k < place else k - 1] is not Op.BACKWARD_WEIGHT:  # these are interchangeable
            yield [*rest[:k], row, *rest[k:]]


def _completing(rows: list[Row], orders: Iterable[Sequence[int]], share: float) -> Iterator[list[Row]]:
    """Yield a list for each order: its last `share` of weight gradients take the first chunk that has one ready."""
    places = [k for k, row in enumerate(rows) if row.instruction.op is Op.BACKWARD_WEIGHT]
    since = places[int(len(places) * (1 - share))] if places else 0
    of_chunk = {rows[k].completes: rows[k] for k in places}
    for order in orders:
        ready: Counter[int] = Counter()
        out = []
        for k, row in enumerate(rows):
            if row.instruction.op is Op.BACKWARD_INPUT:
                ready[row.instruction.chunk] += 1
            elif row.instruction.op is Op.BACKWARD_WEIGHT:
                chunk = next(c for c in order if ready[c]) if k >= since else row.completes
                ready[chunk] -= 1
                row = of_chunk[chunk]
            out.append(row)
        if any(new.completes != old.completes for new, old in zip(out, rows, strict=True)):
            yield out
