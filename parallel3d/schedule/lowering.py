"""Passes from a schedule's compute instructions to the whole program that a rank runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

from parallel3d.schedule.instructions import RECV_OPS, SEND_OPS, Instruction, Op, Program, depends_on, matches


def add_loads(program: Program) -> Program:
    """Load micro-batches before each forward of the first chunk (inputs) and of the last one (labels); run this pass last."""
    ends = (0, program.num_chunks - 1)

    def loads(i: Instruction) -> list[Instruction]:
        needed = i.op is Op.FORWARD and i.chunk in ends
        return [Instruction(Op.LOAD_MICRO_BATCH, i.chunk, i.micro_batch)] if needed else []

    return program.with_instructions([[made for i in own for made in (*loads(i), i)] for own in program.instructions])


# Compute -> the SEND of its result.
SENDS = {
    Op.FORWARD: Op.SEND_ACTIVATION,
    Op.BACKWARD: Op.SEND_GRADIENT,
    Op.BACKWARD_INPUT: Op.SEND_GRADIENT,
}


def send_after(program: Program, i: Instruction) -> Instruction | None:
    """Return the SEND that `i`'s result needs; None where the neighbouring chunk is on the same rank or doesn't exist."""
    if i.op not in SENDS:
        return None
    send = Instruction(SENDS[i.op], i.chunk, i.micro_batch)
    receive = matches(send)
    assert receive is not None
    inside = 0 <= receive.chunk < program.num_chunks
    return send if inside and program.placement[receive.chunk] != program.placement[i.chunk] else None


def add_communication(program: Program) -> Program:
    """Send right after the compute that makes a result; receive one compute instruction before the one that waits for it.

    Each ordered pair of ranks has one FIFO channel, so a receiver posts in the sender's order, whatever it needs first.
    """
    # The rules are the same for all micro-batches: they are applied once for each kind of instruction on each chunk.
    kinds = [Instruction(op, chunk, 0) for op in SENDS for chunk in range(program.num_chunks)]
    of_kind = {i[:2]: send for i in kinds if (send := send_after(program, i)) is not None}
    sends = {kind: send[:2] for kind, send in of_kind.items()}
    receives = {kind: receive[:2] for kind, send in of_kind.items() if (receive := matches(send)) is not None}
    needed = {i[:2]: d[:2] for i in kinds for d in depends_on(i) if d.op in RECV_OPS}
    channels = {kind: program.channel(send) for kind, send in of_kind.items()}
    queues: dict[tuple[int, int], list[Instruction]] = {c: [] for c in channels.values()}
    place: dict[Instruction, tuple[tuple[int, int], int]] = {}  # RECV -> its channel, and its number there from 1 on
    for i in chain.from_iterable(program.instructions):
        if (channel := channels.get(i[:2])) is not None:
            receive = Instruction(*receives[i[:2]], i.micro_batch)
            queues[channel].append(receive)
            place[receive] = channel, len(queues[channel])

    def with_transfers(instructions: Sequence[Instruction]) -> Iterator[Instruction]:
        posted = dict.fromkeys(queues, 0)
        made: list[Instruction] = []  # sends of the last backward: they follow the reductions that it launches
        for i, following in pairwise((None, *instructions, None)):
            if i is not None and i.op is not Op.REDUCE_GRADS:
                yield from made
                made = []
            if following is not None and following[:2] in needed:
                receive = Instruction(*needed[following[:2]], following.micro_batch)
                if receive in place:
                    channel, stop = place[receive]
                    yield from queues[channel][posted[channel] : stop]
                    posted[channel] = max(posted[channel], stop)
            if i is not None:
                yield i
                if i[:2] in sends:
                    made.append(Instruction(*sends[i[:2]], i.micro_batch))
        yield from made

    return program.with_instructions([list(with_transfers(instructions)) for instructions in program.instructions])


def with_communication(program: Program) -> Program:
    """Return the program itself if it has transfers, else with those it needs."""
    has = any(i.op in SEND_OPS or i.op in RECV_OPS for rank in program.instructions for i in rank)
    return program if has else add_communication(program)


def add_parameter_gather(program: Program) -> Program:
    """Gather each chunk's weights at the head of its rank's list, in the order of first use.

    The gathers overlap with the first forwards; a layer waits only for its own weights.
    """
    lists = []
    for instructions in program.instructions:
        chunks = dict.fromkeys(i.chunk for i in instructions if i.op is Op.FORWARD)
        lists.append([*(Instruction(Op.GATHER_PARAMS, c, 0) for c in chunks), *instructions])
    return program.with_instructions(lists)


_COMPLETING = (Op.BACKWARD, Op.BACKWARD_WEIGHT)  # kinds of instructions that complete a chunk's gradients


def add_gradient_reduction(program: Program, num_buckets: Sequence[int], per_micro_batch: bool = False) -> Program:
    """Reduce each of a chunk's `num_buckets[chunk]` buckets after the chunk's last backward, or after each backward.

    They follow that backward, which launches each as its bucket fills, in list order.
    """
    lists = []
    for instructions in program.instructions:
        completing = [i for i in instructions if i.op in _COMPLETING]
        reduced = set(completing if per_micro_batch else {i.chunk: i for i in completing}.values())
        out: list[Instruction] = []
        for i in instructions:
            out.append(i)
            if i.op in _COMPLETING and i in reduced:
                out += [Instruction(Op.REDUCE_GRADS, i.chunk, i.micro_batch, b) for b in range(num_buckets[i.chunk])]
        lists.append(out)
    return program.with_instructions(lists)


def add_replica_reduction(program: Program, owners: Sequence[tuple[int, ...]]) -> Program:
    """Reduce parameters that several ranks hold, after all backwards, in one order for all.

    owners[bucket]: the chunks whose ranks hold that replica bucket.
    """
    lists = [list(instructions) for instructions in program.instructions]
    for bucket, chunks in enumerate(owners):
        for rank in sorted({program.placement[c] for c in chunks}):
            lists[rank].append(Instruction(Op.REDUCE_REPLICAS, chunks[0], program.num_micro_batches - 1, bucket))
    return program.with_instructions(lists)


def lower(program: Program) -> Program:
    """Add communication and loads, which every program needs to run."""
    return add_loads(add_communication(program))


def add_collectives(
    lowered: Program,
    chunk_buckets: Sequence[int],
    replica_owners: Sequence[tuple[int, ...]] = (),
    partitioned: bool = False,
    per_micro_batch: bool = False,
) -> Program:
    """Add the collectives of a training step to a lowered program: the executor's program, and the planner's.

    chunk_buckets, per_micro_batch: see add_gradient_reduction; replica_owners: see add_replica_reduction; partitioned:
    weights are gathered before they are used.
    """
    reduced = add_gradient_reduction(lowered, chunk_buckets, per_micro_batch)
    whole = add_replica_reduction(reduced, replica_owners)
    return add_parameter_gather(whole) if partitioned else whole
