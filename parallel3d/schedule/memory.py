"""Bytes of activations that a program holds on a rank, from the bytes of one micro-batch on each chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median_low

from parallel3d.schedule.instructions import Instruction, Op, Program


@dataclass(frozen=True)
class ChunkBytes:
    """Bytes of one micro-batch on one chunk.

    - saved: held from the forward to the backward, without inputs from a message or the loader.
    - output: the part of the output that is held only from the forward until it is sent. The part that the backward needs, or
      the next chunk if it is on the same rank, is in `saved`.
    - received, loaded: inputs from messages and from the loader (labels too).
    - output_gradient: gradient that the backward receives; input_gradient: gradient that it makes for the previous chunk.
    - deferred: held from BACKWARD_INPUT to BACKWARD_WEIGHT.
    """

    saved: int = 0
    received: int = 0
    loaded: int = 0
    output_gradient: int = 0
    input_gradient: int = 0
    deferred: int = 0
    output: int = 0

    def change(self, i: Instruction) -> int:
        """Return by how much the bytes in flight grow over `i`, an instruction of this chunk."""
        freed = self.saved + self.received + self.loaded + self.output_gradient
        changes = {
            Op.LOAD_MICRO_BATCH: self.loaded,
            Op.RECV_ACTIVATION: self.received,
            Op.FORWARD: self.saved + self.output,
            Op.SEND_ACTIVATION: -self.output,
            Op.RECV_GRADIENT: self.output_gradient,
            Op.BACKWARD: self.input_gradient - freed,
            Op.BACKWARD_INPUT: self.input_gradient + self.deferred - freed,
            Op.BACKWARD_WEIGHT: -self.deferred,
            Op.SEND_GRADIENT: -self.input_gradient,
        }
        return changes.get(i.op, 0)


def bytes_in_flight(instructions: Sequence[Instruction], chunks: Mapping[int, ChunkBytes]) -> list[int]:
    """Return the bytes of activations and their gradients that a rank holds after each of its instructions.

    chunks: chunk -> its bytes; other chunks count as 0.
    """
    return list(accumulate(chunks[i.chunk].change(i) if i.chunk in chunks else 0 for i in instructions))


def most_in_flight(program: Program) -> list[int]:
    """Return, for each chunk, the largest number of micro-batches whose activations it holds at once."""
    one = ChunkBytes(saved=1, deferred=1)
    return [max(bytes_in_flight(program.instructions[rank], {c: one})) for c, rank in enumerate(program.placement)]


def learn_chunks(measured: Sequence[tuple[Instruction, int]]) -> dict[int, ChunkBytes]:
    """Return the ChunkBytes of a rank's chunks, from how much its memory grew over each of its instructions.

    Each kind of instruction has the median of its changes, because a sent tensor is freed during any later instruction.
    """
    changes: dict[tuple[Op, int], list[int]] = {}
    for i, change in measured:
        changes.setdefault((i.op, i.chunk), []).append(change)
    medians = {kind: median_low(values) for kind, values in changes.items()}
    learned: dict[int, ChunkBytes] = {}
    for chunk in sorted({chunk for _, chunk in medians}, reverse=True):
        grown = {op: medians.get((op, chunk), 0) for op in Op}
        output = -grown[Op.SEND_ACTIVATION]
        saved, received, loaded = grown[Op.FORWARD] - output, grown[Op.RECV_ACTIVATION], grown[Op.LOAD_MICRO_BATCH]
        # A gradient from a chunk on the same rank is passed on, not received.
        handed = learned[chunk + 1].input_gradient if chunk + 1 in learned else 0
        output_gradient, deferred = handed or grown[Op.RECV_GRADIENT], -grown[Op.BACKWARD_WEIGHT]
        left = grown[Op.BACKWARD] + grown[Op.BACKWARD_INPUT] + saved + received + loaded + output_gradient
        learned[chunk] = ChunkBytes(saved, received, loaded, output_gradient, left - deferred, deferred, output)
    return learned
