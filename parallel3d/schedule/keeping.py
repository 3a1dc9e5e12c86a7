"""How long a rank needs what it receives, in messages of the channel that it came by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from parallel3d.schedule.instructions import RECV_OPS, Instruction, Op, Program

_BACKWARDS = (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


def messages_behind(program: Program, rank: int) -> dict[Instruction, int]:
    """RECV of a rank -> how many more of its channel stand in the list before nothing needs the message any more.

    That is at the end of the micro-batch's last backward, of the message's chunk or of those that the rank has right before and
    behind it: a chunk may hand on what it is given, or a view. Without those of a forward alone: its output may be the message.
    """
    instructions, first = program.instructions[rank], _first_neighbours(program.placement)
    last = {(first[i.chunk], i.micro_batch): k for k, i in enumerate(instructions) if i.op in _BACKWARDS}
    posted: Counter[int] = Counter()  # by the rank that sends
    number: dict[Instruction, int] = {}
    received: dict[tuple[int, int], list[Instruction]] = {}
    behind = {}
    for position, i in enumerate(instructions):
        place = first[i.chunk], i.micro_batch
        if i.op in RECV_OPS:
            source, _ = program.channel(i)
            posted[source] += 1
            number[i] = posted[source]
            received.setdefault(place, []).append(i)
        elif last.get(place) == position:
            for r in received.pop(place, ()):
                behind[r] = posted[program.channel(r)[0]] - number[r]
    return behind


def _first_neighbours(placement: Sequence[int]) -> list[int]:
    """Of each chunk the first of those on its rank that no other rank's stand between."""
    firsts: list[int] = []
    for _, chunks in groupby(placement):
        firsts += [len(firsts)] * len(list(chunks))
    return firsts
