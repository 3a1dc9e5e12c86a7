"""Replay of a stage's instructions: the bytes in flight, for any bytes of its chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from parallel3d.planner.predict.chunk_memory import ChunkMemory
from parallel3d.schedule.instructions import Instruction, Op, Program


@dataclass(frozen=True)
class ActivationPeak:
    """Peak bytes of activations, messages and their gradients on a rank.

    between: between instructions; within: inside one, with what it needs for itself; held: between instructions, when
    `within` is reached.
    """

    between: int
    within: int
    held: int


_Kind = tuple[Op, int, bool]  # operation, chunk, whether it hands over an output: see _prepare


class MemoryReplay:
    """Replays a program's stages. lists: returns a stage's lowered instructions, and is called when they are first used."""

    def __init__(self, placement: Sequence[int], lists: Callable[[int], Sequence[Instruction]]):
        self.placement = tuple(placement)
        self._prepared = cache(lambda stage: _prepare(lists(stage)))

    @staticmethod
    def of(program: Program) -> MemoryReplay:
        """Return the replay of a lowered program."""
        return MemoryReplay(program.placement, program.instructions.__getitem__)

    def splits(self, stage: int) -> bool:
        """Whether the stage defers weight gradients."""
        return any(op is Op.BACKWARD_WEIGHT for op, _, _ in self._prepared(stage)[0])

    def peak(self, stage: int, chunks: Mapping[int, ChunkMemory]) -> ActivationPeak:
        """Return the peak of a stage. chunks: bytes of one micro-batch on each of the stage's chunks."""
        kinds, order = self._prepared(stage)
        if not len(order):
            return ActivationPeak(0, 0, 0)
        changes = np.array([_change(kind, chunks) for kind in kinds], dtype=np.int64)[order]
        own = np.array([chunks[c].within.get(op, 0) if c in chunks else 0 for op, c, _ in kinds], dtype=np.int64)[order]
        after = np.cumsum(changes)
        before = after - changes
        # What arrives without an instruction's own need, such as a message's buffer, is there between instructions.
        around = np.maximum(before, after)
        within = np.maximum(before + own, around)
        between, most = max(0, int(after.max())), int(within.argmax())
        if within[most] <= 0:
            return ActivationPeak(between, 0, 0)
        return ActivationPeak(between, int(within[most]), int(around[most]))


def _prepare(instructions: Sequence[Instruction]) -> tuple[list[_Kind], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Return the kinds of instruction, and the number of each instruction's kind.

    An output that a chunk of the same rank uses counts for the chunk that made it until its backward, and from then on for
    the chunk that used it, if its deferred gradients keep it: the backward hands it over.
    """
    kinds: dict[_Kind, int] = {}
    deferred: dict[
        tuple[int, int], bool
    ] = {}  # (chunk, micro-batch) with deferred gradients -> whether it was handed over
    order = []
    for op, chunk, micro_batch, _ in instructions:
        if op is Op.BACKWARD_WEIGHT:
            hands = deferred.pop((chunk, micro_batch), False)
        else:
            if op is Op.BACKWARD_INPUT:
                deferred[chunk, micro_batch] = False
            hands = op in (Op.BACKWARD, Op.BACKWARD_INPUT) and (chunk + 1, micro_batch) in deferred
            if hands:
                deferred[chunk + 1, micro_batch] = True
        order.append(kinds.setdefault((op, chunk, hands), len(kinds)))
    return list(kinds), np.array(order, dtype=np.int64)


def _change(kind: _Kind, chunks: Mapping[int, ChunkMemory]) -> int:
    """Return by how much bytes grow over an instruction."""
    op, chunk, hands = kind
    if chunk not in chunks:
        return 0
    change = chunks[chunk].held.change(Instruction(op, chunk, 0))
    if hands:
        change += -chunks[chunk].kept_input if op is Op.BACKWARD_WEIGHT else chunks[chunk + 1].kept_input
    return change
