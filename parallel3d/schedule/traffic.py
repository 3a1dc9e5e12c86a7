"""Weight gradients where they help: fused with the input gradient before them, or ordered so that compute hides ZeRO's traffic.

A whole backward overlaps a layer's communication with its weight gradients and frees its tensors at once. But the stage that
waits for its input gradient then waits for the weight gradients too.

A reduction starts when its chunk's gradients are complete. If the chunks of a rank all complete at the end of its list, little
compute is left to overlap with; if they complete one after the other, all reductions but the last one's are hidden.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from math import ceil

from pydantic import BaseModel, ConfigDict

from parallel3d.schedule.instructions import Instruction, Op, Program, chunks_by_rank
from parallel3d.schedule.lowering import add_gradient_reduction, add_parameter_gather, with_communication
from parallel3d.schedule.search import ListClock
from parallel3d.schedule.timing import Cost, simulate

_MOST_TRIALS = 40
_Pair = tuple[int, int]  # (rank, position of the input gradient in the rank's list)


def fuse_backwards(program: Program, cost: Cost) -> Program:
    """Fuse each input gradient with the weight gradient of its chunk right after it, where that makes the step no longer.

    program: only compute instructions. Weight gradients of one chunk are exchanged among micro-batches for this, which
    changes neither times nor memory if micro-batches are equal. cost: as simulate()'s, also for whole backwards. All pairs
    are tried together; a set that makes the step longer is tried again in two halves.
    """
    clock = ListClock(program, cost)

    def length(fused: Program) -> float:
        return clock.makespan(clock.lists(fused))

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


_SHARES = (1.0, 0.5, 0.25)  # shares of a rank's weight gradients that are moved


def orders_that_hide_reductions(program: Program) -> Iterator[Program]:
    """Yield orders of the weight gradients of all ranks in which compute may hide reductions, to be timed with these.

    program: only compute instructions. In some orders the last weight gradients complete one chunk after the other, so that
    only the last chunk's reductions are exposed; in the others the first ones follow their input gradients at once, which
    helps where each micro-batch is reduced.
    """
    for share in _SHARES:
        for turn in (1, -1):
            yield program.with_instructions([_completing(rank, share, turn) for rank in program.instructions])
        yield program.with_instructions([_hurried(rank, share) for rank in program.instructions])


def _completing(instructions: Sequence[Instruction], share: float, turn: int) -> list[Instruction]:
    """Let a rank's last `share` of weight gradients be those of the first chunk that has one ready.

    turn: 1 to take the chunks in the order of their last input gradients, -1 to take them in the reverse order.
    """
    last = {i.chunk: k for k, i in enumerate(instructions) if i.op is Op.BACKWARD_INPUT}
    chunks = sorted(last, key=last.__getitem__)[::turn]
    kept = int((1 - share) * sum(i.op is Op.BACKWARD_WEIGHT for i in instructions))
    ready: Counter[int] = Counter()
    out = []
    for i in instructions:
        if i.op is Op.BACKWARD_INPUT:
            ready[i.chunk] += 1
        elif i.op is Op.BACKWARD_WEIGHT:
            chunk = i.chunk if kept > 0 else next(c for c in chunks if ready[c])
            kept, i = kept - 1, i._replace(chunk=chunk)
            ready[chunk] -= 1
        out.append(i)
    return renamed(out)


def _hurried(instructions: Sequence[Instruction], share: float) -> list[Instruction]:
    """Let a rank's first `share` of weight gradients follow their input gradients at once."""
    weights = [i for i in instructions if i.op is Op.BACKWARD_WEIGHT]
    moved = set(weights[: ceil(share * len(weights))])
    out = []
    for i in instructions:
        if i not in moved:
            out.append(i)
        if i.op is Op.BACKWARD_INPUT and (own := i._replace(op=Op.BACKWARD_WEIGHT)) in moved:
            out.append(own)
    return out
