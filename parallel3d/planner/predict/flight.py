"""What a rank's list of instructions holds in flight, with any bytes of its chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from parallel3d.planner.predict.chunk_memory import ChunkMemory
from parallel3d.schedule.instructions import Instruction, Op, Program


@dataclass(frozen=True)
class Flight:
    """Most bytes of activations, messages and their gradients that a rank holds: between instructions, and within one with
    what it needs for itself; held: between instructions, when the latter is reached.
    """

    between: int
    within: int
    held: int


class Replay:
    """A rank's list, made ready to be replayed. splits: whether its weight gradients are deferred."""

    def __init__(self, instructions: Sequence[Instruction]):
        kinds: dict[tuple[Op, int, bool], int] = {}
        deferred: dict[tuple[int, int], bool] = {}
        self._order = np.array([kinds.setdefault(_kind(i, deferred), len(kinds)) for i in instructions], dtype=np.int64)
        self._kinds = list(kinds)
        self.splits = any(op is Op.BACKWARD_WEIGHT for op, _, _ in kinds)

    def flight(self, chunks: Mapping[int, ChunkMemory]) -> Flight:
        """chunks: of the rank's own what each holds of a micro-batch."""
        if not len(self._order):
            return Flight(0, 0, 0)
        changes = np.array([_change(op, c, hands, chunks) for op, c, hands in self._kinds], dtype=np.int64)[self._order]
        added = np.array([_within(op, chunks[c]) if c in chunks else 0 for op, c, _ in self._kinds], dtype=np.int64)
        after = np.cumsum(changes)
        before = after - changes
        # What comes without an instruction's own need, as a message's buffer, is there between instructions.
        between = np.maximum(before, after)
        within = np.maximum(before + added[self._order], between)
        most = int(within.argmax())
        if within[most] <= 0:
            return Flight(max(0, int(after.max())), 0, 0)
        return Flight(max(0, int(after.max())), int(within[most]), int(between[most]))


class Replays:
    """Of a pipeline's stages, each made ready when it is first asked for. lists: a stage's instructions, lowered."""

    def __init__(self, placement: Sequence[int], lists: Callable[[int], Sequence[Instruction]]):
        self.placement = tuple(placement)
        self._lists = lists
        self._of: dict[int, Replay] = {}

    @staticmethod
    def of_program(program: Program) -> Replays:
        """program: lowered."""
        return Replays(program.placement, program.instructions.__getitem__)

    def of(self, stage: int) -> Replay:
        """Of a stage's list."""
        if stage not in self._of:
            self._of[stage] = Replay(self._lists(stage))
        return self._of[stage]


def _kind(i: Instruction, deferred: dict[tuple[int, int], bool]) -> tuple[Op, int, bool]:
    """(op, chunk, whether it hands an output that a chunk of the same rank has taken from one count to another).

    Such an output counts for the chunk that made it until its backward, and from then on for the one that took it, where its
    deferred gradients keep it. deferred: (chunk, micro-batch) with deferred gradients -> whether that has happened.
    """
    place, after = (i.chunk, i.micro_batch), (i.chunk + 1, i.micro_batch)
    if i.op is Op.BACKWARD_WEIGHT:
        return i.op, i.chunk, deferred.pop(place, False)
    if i.op is Op.BACKWARD_INPUT:
        deferred[place] = False
    hands = i.op in (Op.BACKWARD, Op.BACKWARD_INPUT) and after in deferred
    if hands:
        deferred[after] = True
    return i.op, i.chunk, hands


def _change(op: Op, chunk: int, hands: bool, chunks: Mapping[int, ChunkMemory]) -> int:
    """By how much bytes grow over an instruction of a kind."""
    if chunk not in chunks:
        return 0
    change = chunks[chunk].held.change(Instruction(op, chunk, 0))
    if hands:
        change += -chunks[chunk].kept_input if op is Op.BACKWARD_WEIGHT else chunks[chunk + 1].kept_input
    return change


def _within(op: Op, chunk: ChunkMemory) -> int:
    """The most that an instruction adds while it runs."""
    held = chunk.held
    own = held.saved + held.received + held.loaded + held.output_gradient
    added = {
        Op.FORWARD: chunk.forward,
        Op.BACKWARD: chunk.backward - own,
        Op.BACKWARD_INPUT: chunk.backward - own,
        Op.BACKWARD_WEIGHT: chunk.weight,
    }
    return added.get(op, 0)
