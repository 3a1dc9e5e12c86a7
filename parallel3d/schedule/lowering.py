"""Passes from a schedule's compute instructions to the whole program that a rank runs."""

from __future__ import annotations

from collections.abc import Sequence

from parallel3d.schedule.instructions import RECV_OPS, SEND_OPS, Instruction, Op, Program, depends_on, matches


def add_loads(program: Program) -> Program:
    """LOAD_MICRO_BATCH before each forward of the first chunk (inputs) and of the last one (labels). Add it last."""
    return program.with_instructions([_with_loads(program, instructions) for instructions in program.instructions])


def _with_loads(program: Program, instructions: Sequence[Instruction]) -> list[Instruction]:
    ends = (0, program.num_chunks - 1)
    out: list[Instruction] = []
    for i in instructions:
        if i.op is Op.FORWARD and i.chunk in ends:
            out.append(Instruction(Op.LOAD_MICRO_BATCH, i.chunk, i.micro_batch))
        out.append(i)
    return out


def transfers_after(program: Program, i: Instruction) -> list[Instruction]:
    """The transfer that `i`'s result needs: none where the neighbouring chunk is on the same rank or doesn't exist."""
    if i.op is Op.FORWARD:
        send = Instruction(Op.SEND_ACTIVATION, i.chunk, i.micro_batch)
        neighbour = i.chunk + 1
    elif i.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
        send = Instruction(Op.SEND_GRADIENT, i.chunk, i.micro_batch)
        neighbour = i.chunk - 1
    else:
        return []
    inside = 0 <= neighbour < program.num_chunks
    return [send] if inside and program.placement[neighbour] != program.placement[i.chunk] else []


def add_communication(program: Program) -> Program:
    """SEND right after the compute that makes it; RECV one compute instruction before the one that waits for it.

    Each ordered pair of ranks has one FIFO channel, so a receiver posts in the sender's order, whatever it needs first.
    """
    transfers = _Transfers(program)
    return program.with_instructions([transfers.added(rank) for rank in range(program.num_ranks)])


class _Transfers:
    """The transfers of a program, or those that one rank receives, by channel in the sender's order."""

    def __init__(self, program: Program, receiver: int | None = None):
        self._program, self._rules = program, _Rules(program)
        self._queues: dict[Channel, list[Instruction]] = {}
        for sender in range(program.num_ranks) if receiver is None else _neighbours(program, receiver):
            for op, chunk, m, _ in program.instructions[sender]:
                for _, (recv, at), channel in self._rules.after(op, chunk):
                    if receiver is None or channel[1] == receiver:
                        self._queues.setdefault(channel, []).append(Instruction(recv, at, m))
        self._place: dict[Place, int] = {r: k for queue in self._queues.values() for k, r in enumerate(queue)}

    def added(self, rank: int) -> list[Instruction]:
        """A rank's list with its transfers."""
        instructions = self._program.instructions[rank]
        posted = dict.fromkeys(self._queues, 0)
        out = self._due(instructions[0], posted) if instructions else []
        sends: list[Instruction] = []
        for i, following in zip(instructions, [*instructions[1:], None], strict=False):
            if sends and i.op is not Op.REDUCE_GRADS:
                out += sends  # behind the reductions that the backward before launches
                sends = []
            if following is not None:
                out += self._due(following, posted)
            out.append(i)
            for (send, at), _, _ in self._rules.after(i.op, i.chunk):
                sends.append(Instruction(send, at, i.micro_batch))
        return out + sends

    def _due(self, i: Instruction, posted: dict[Channel, int]) -> list[Instruction]:
        """Return the receives to post before an instruction: all that its channels' senders send until then."""
        out: list[Instruction] = []
        for (recv, at), channel in self._rules.before(i.op, i.chunk):
            stop = self._place.get((recv, at, i.micro_batch, None), -1) + 1
            if stop > posted.get(channel, 0):
                out += self._queues[channel][posted[channel] : stop]
                posted[channel] = stop
        return out


def _neighbours(program: Program, rank: int) -> set[int]:
    """The ranks of the chunks around its own."""
    own = [c for c, r in enumerate(program.placement) if r == rank]
    around = {c + step for c in own for step in (-1, 1)}
    return {program.placement[c] for c in around if 0 <= c < program.num_chunks}


Place = tuple[Op, int, int, int | None]  # of an instruction, which is such a tuple
Kind = tuple[Op, int]  # on a chunk
Channel = tuple[int, int]


class _Rules:
    """The rules for each kind of instruction on each chunk, which hold for all micro-batches; looked up once."""

    def __init__(self, program: Program):
        self._program = program
        self._after: dict[Kind, list[tuple[Kind, Kind, Channel]]] = {}
        self._before: dict[Kind, list[tuple[Kind, Channel]]] = {}

    def after(self, op: Op, chunk: int) -> list[tuple[Kind, Kind, Channel]]:
        """Both ends of the transfers that the result needs, and their channel."""
        if (op, chunk) not in self._after:
            found = []
            for send in transfers_after(self._program, Instruction(op, chunk, 0)):
                other = matches(send)
                assert other is not None
                found.append(((send.op, send.chunk), (other.op, other.chunk), self._program.channel(send)))
            self._after[op, chunk] = found
        return self._after[op, chunk]

    def before(self, op: Op, chunk: int) -> list[tuple[Kind, Channel]]:
        """The ends of transfers that it would wait for if there were some, and their channels."""
        if (op, chunk) not in self._before:
            needed = [r for r in depends_on(Instruction(op, chunk, 0)) if r.op in RECV_OPS]
            sent = [(r, matches(r)) for r in needed]
            inside = [r for r, send in sent if send is not None and 0 <= send.chunk < self._program.num_chunks]
            self._before[op, chunk] = [((r.op, r.chunk), self._program.channel(r)) for r in inside]
        return self._before[op, chunk]


def with_communication(program: Program) -> Program:
    """The program itself if it has transfers, else with those it needs."""
    has = any(i.op in SEND_OPS or i.op in RECV_OPS for rank in program.instructions for i in rank)
    return program if has else add_communication(program)


def add_parameter_gather(program: Program) -> Program:
    """GATHER_PARAMS of each chunk at the head of its rank's list, in the order of first use.

    The gathers run beside the first forwards; a layer waits for its own weights alone.
    """
    lists = []
    for instructions in program.instructions:
        chunks = dict.fromkeys(i.chunk for i in instructions if i.op is Op.FORWARD)
        lists.append([*(Instruction(Op.GATHER_PARAMS, c, 0) for c in chunks), *instructions])
    return program.with_instructions(lists)


_COMPLETING = (Op.BACKWARD, Op.BACKWARD_WEIGHT)  # of a chunk's gradients


def add_gradient_reduction(program: Program, num_buckets: Sequence[int], per_micro_batch: bool = False) -> Program:
    """REDUCE_GRADS of each of the chunk's `num_buckets[chunk]` buckets after the chunk's last backward, or after each.

    They stand right behind that backward, which launches each as its bucket fills, in list order.
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
    """REDUCE_REPLICAS for parameters that several ranks hold, behind all backwards, in one order for all.

    owners[bucket]: the chunks whose ranks hold that replica bucket.
    """
    lists = [list(instructions) for instructions in program.instructions]
    for bucket, chunks in enumerate(owners):
        for rank in sorted({program.placement[c] for c in chunks}):
            lists[rank].append(Instruction(Op.REDUCE_REPLICAS, chunks[0], program.num_micro_batches - 1, bucket))
    return program.with_instructions(lists)


def lower(program: Program) -> Program:
    """Communication and loads: what every program needs to run."""
    return add_loads(add_communication(program))


def lower_rank(program: Program, rank: int) -> tuple[Instruction, ...]:
    """One rank's list of what lower() makes of a program, in less time."""
    return tuple(_with_loads(program, _Transfers(program, receiver=rank).added(rank)))


def lower_training(
    program: Program,
    chunk_buckets: Sequence[int],
    replica_owners: Sequence[tuple[int, ...]] = (),
    partitioned: bool = False,
    per_micro_batch: bool = False,
) -> Program:
    """A schedule's compute with all that a training step runs beside it; the executor's program, and the planner's.

    chunk_buckets, per_micro_batch: see add_gradient_reduction; replica_owners: see add_replica_reduction; partitioned:
    weights are gathered before they are used.
    """
    return add_collectives(lower(program), chunk_buckets, replica_owners, partitioned, per_micro_batch)


def add_collectives(
    lowered: Program,
    chunk_buckets: Sequence[int],
    replica_owners: Sequence[tuple[int, ...]] = (),
    partitioned: bool = False,
    per_micro_batch: bool = False,
) -> Program:
    """Add the collectives of a training step to a lowered program, see lower_training."""
    reduced = add_gradient_reduction(lowered, chunk_buckets, per_micro_batch)
    whole = add_replica_reduction(reduced, replica_owners)
    return add_parameter_gather(whole) if partitioned else whole
