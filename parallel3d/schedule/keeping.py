"""How long a rank needs what it receives, in messages of the channel that it came by."""

from __future__ import annotations

from collections import Counter

from parallel3d.schedule.instructions import RECV_OPS, Instruction, Op, Program

_BACKWARDS = (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


def messages_behind(program: Program, rank: int) -> dict[Instruction, int]:
    """RECV of a rank -> how many more of its channel stand in the list before the end of the last backward of its chunk and
    micro-batch, where nothing needs the message any more. Without those of a forward alone: its output may be the message.
    """
    instructions = program.instructions[rank]
    last = {(i.chunk, i.micro_batch): k for k, i in enumerate(instructions) if i.op in _BACKWARDS}
    posted: Counter[int] = Counter()  # by the rank that sends
    number: dict[Instruction, int] = {}
    received: dict[tuple[int, int], list[Instruction]] = {}
    behind = {}
    for position, i in enumerate(instructions):
        place = i.chunk, i.micro_batch
        if i.op in RECV_OPS:
            source, _ = program.channel(i)
            posted[source] += 1
            number[i] = posted[source]
            received.setdefault(place, []).append(i)
        elif last.get(place) == position:
            for r in received.pop(place, ()):
                behind[r] = posted[program.channel(r)[0]] - number[r]
    return behind
