"""Two halves of a backward that stand side by side, made whole again.

A whole backward hides a layer's communication behind its weight gradients and frees its tensors at once; but what waits
for its input gradient waits for the weight gradients too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from itertools import product
from math import inf

from parallel3d.schedule.instructions import Instruction, Op, Program
from parallel3d.schedule.lowering import transfers_after
from parallel3d.schedule.simulate import Cost, simulate

_MOST_TRIALS = 40

Pair = tuple[int, int]  # (rank, position of the input gradient in the rank's list)


def fuse_backwards(program: Program, cost: Cost) -> Program:
    """Make each input gradient and the weight gradient of its chunk that follows one backward, where nothing gets later.

    program: compute instructions alone. Weight gradients of one chunk change places among micro-batches for that, which
    changes neither times nor memory where micro-batches are alike. cost: as simulate()'s, of whole backwards too. All pairs
    are tried together, then halves of what made the step longer.
    """
    step = _Step(program, cost)
    shortest = step.length(program)
    accepted: list[Pair] = []
    waiting = deque([pairs]) if (pairs := _pairs(program)) else deque()
    for _ in range(_MOST_TRIALS):
        if not waiting:
            break
        tried = waiting.popleft()
        length = step.length(_fused(program, [*accepted, *tried]))
        if length <= shortest * (1 + 1e-9):
            shortest, accepted = length, [*accepted, *tried]
        elif len(tried) > 1:
            waiting += [tried[: len(tried) // 2], tried[len(tried) // 2 :]]
    fused = _fused(program, accepted)
    # Exactly, with transfers that wait for one another.
    later = simulate(fused, cost).makespan > simulate(program, cost).makespan * (1 + 1e-9)
    return program if later else fused


class _Step:
    """How long programs of the same chunks and micro-batches take: as simulate(), but for transfers in each other's way."""

    def __init__(self, program: Program, cost: Cost):
        self._shape = program.num_chunks, program.num_micro_batches
        chunks, order = range(program.num_chunks), range(program.num_micro_batches)
        ops = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
        self._times = {i: cost(i) for i in (Instruction(*key) for key in product(ops, chunks, order))}
        self._travels = {i: sum(map(cost, transfers_after(program, i))) for i in self._times}

    def length(self, program: Program) -> float:
        """From the start of the first instruction to the end of the last."""
        num_chunks, num_micro_batches = self._shape
        # When each chunk's input and output gradient are there; beyond the ends from the beginning on.
        inputs = [[0.0 if c == 0 else inf] * num_micro_batches for c in range(num_chunks + 1)]
        gradients = [[0.0 if c == num_chunks else inf] * num_micro_batches for c in range(num_chunks + 1)]
        free, left = [0.0] * program.num_ranks, [deque(instructions) for instructions in program.instructions]
        while any(left):
            before = sum(map(len, left))
            for rank, instructions in enumerate(left):
                while instructions and (end := self._end(instructions[0], free[rank], inputs, gradients)) < inf:
                    free[rank] = end
                    instructions.popleft()
            assert sum(map(len, left)) < before, "the program deadlocks"
        return max(free)

    def _end(self, i: Instruction, free: float, inputs: list[list[float]], gradients: list[list[float]]) -> float:
        """Of an instruction on a rank that is free at a time, noting when its result arrives; inf while it can't start.

        A forward, and an input gradient, stand in the list of their rank ahead of what needs them there.
        """
        c, m = i.chunk, i.micro_batch
        if i.op is Op.BACKWARD_WEIGHT:
            return free + self._times[i]
        end = max(free, inputs[c][m] if i.op is Op.FORWARD else gradients[c + 1][m]) + self._times[i]
        if end < inf:
            (inputs[c + 1] if i.op is Op.FORWARD else gradients[c])[m] = end + self._travels[i]
        return end


def _pairs(program: Program) -> list[Pair]:
    """From the end on: there a step has no other work that could wait."""
    found = []
    for rank, instructions in enumerate(program.instructions):
        for position in range(len(instructions) - 1):
            first, second = instructions[position : position + 2]
            halves = (first.op, second.op) == (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
            if halves and first.chunk == second.chunk:
                found.append((rank, position))
    return sorted(found, key=lambda pair: pair[1])


def _fused(program: Program, pairs: Sequence[Pair]) -> Program:
    chosen = set(pairs)
    lists = [
        _fused_list(instructions, {position for r, position in chosen if r == rank})
        for rank, instructions in enumerate(program.instructions)
    ]
    return program.with_instructions(lists)


def _fused_list(instructions: Sequence[Instruction], chosen: set[int]) -> list[Instruction]:
    """The other weight gradients of a chunk keep their order in the places that are left."""
    fused = {instructions[position] for position in chosen}
    left: dict[int, deque[Instruction]] = {}
    for i in instructions:
        if i.op is Op.BACKWARD_WEIGHT and Instruction(Op.BACKWARD_INPUT, i.chunk, i.micro_batch) not in fused:
            left.setdefault(i.chunk, deque()).append(i)
    out = []
    for position, i in enumerate(instructions):
        if position in chosen:
            out.append(Instruction(Op.BACKWARD, i.chunk, i.micro_batch))
        elif position - 1 not in chosen:
            out.append(left[i.chunk].popleft() if i.op is Op.BACKWARD_WEIGHT else i)
    return out


def whole_backwards(program: Program, micro_batches: Collection[int]) -> Program:
    """The backwards of these micro-batches whole, where their input gradients stood."""
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
