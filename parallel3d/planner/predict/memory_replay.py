"""Replay of a stage's instructions: the most bytes in flight, for any bytes of its chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from parallel3d.planner.predict.chunk_memory import ChunkMemory
from parallel3d.schedule.instructions import Instruction, Op, Program


class ActivationPeak(NamedTuple):
    """Peak bytes of activations, messages and their gradients on a rank.

    within: inside an instruction, with what it needs for itself; held: then, of what is held between instructions.
    """

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
        changes, own = np.array([_bytes_of(kind, chunks) for kind in kinds], dtype=np.int64)[order].T
        after = np.cumsum(changes)
        before = after - changes
        # What arrives without an instruction's own need, such as a message's buffer, is there between instructions.
        around = np.maximum(before, after)
        within = np.maximum(before + own, around)
        most = int(within.argmax())
        return ActivationPeak(int(within[most]), int(around[most]))


def _prepare(instructions: Sequence[Instruction]) -> tuple[list[_Kind], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Return the kinds of instruction, and the number of each instruction's kind.

    An output that a chunk of the same rank uses counts for the chunk that made it until its backward, and from then on for
    the chunk that used it, if its deferred gradients keep it: the backward hands it over.
    """
    kinds: dict[_Kind, int] = {}
    # (chunk, micro-batch) with deferred gradients -> whether it was handed over
    deferred: dict[tuple[int, int], bool] = {}
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


def _bytes_of(kind: _Kind, chunks: Mapping[int, ChunkMemory]) -> tuple[int, int]:
    """Return by how much an instruction changes the bytes that are held, and the most that it adds while it runs."""
    op, chunk, hands = kind
    if chunk not in chunks:
        return 0, 0
    change = chunks[chunk].held.change(Instruction(op, chunk, 0))
    if hands:
        change += -chunks[chunk].kept_input if op is Op.BACKWARD_WEIGHT else chunks[chunk + 1].kept_input
    return change, chunks[chunk].within.get(op, 0)
