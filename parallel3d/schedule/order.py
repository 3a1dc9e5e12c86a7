"""The order in which a program can run: what waits for what, and the proof that every rank reaches the end of its list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from graphlib import CycleError, TopologicalSorter

from parallel3d.errors import ScheduleError
from parallel3d.schedule.instructions import (
    COLLECTIVE_OPS,
    RECV_OPS,
    SEND_OPS,
    Instruction,
    Op,
    Program,
    depends_on,
    matches,
)
from parallel3d.schedule.lowering import transfers_after, with_communication

# (rank, position in its list): the host reaches this instruction; an instruction: what it does is under way or done.
Post = tuple[int, int]
Node = Post | Instruction


def transfer_of(i: Instruction) -> Instruction:
    """A transfer is one node for both ends: its SEND."""
    other = matches(i)
    return other if i.op in RECV_OPS and other is not None else i


def wait_graph(program: Program) -> dict[Node, list[Node]]:
    """node -> the nodes it waits for: host order, channel order, dependences and the other ends of transfers.

    The host passes compute instructions in list order and blocks in them, as a CPU does; transfers and collectives are
    posted and go on by themselves, but start only when every end has posted them (rendezvous) and when the transfer
    ahead of them in the channel is through. Data-parallel replicas run identical lists, so a cycle over the whole
    world projects to a cycle in this one pipeline: checking one is checking all.
    """
    known = {i for instructions in program.instructions for i in instructions}
    graph: dict[Node, list[Node]] = {}
    # Along each line nodes start in order: a channel by its sender's list and by its receiver's, a rank's collectives.
    last_in_line: dict[object, Node] = {}
    for rank, instructions in enumerate(program.instructions):
        for position, i in enumerate(instructions):
            post = (rank, position)
            graph[post] = list(_host_order(program, rank, position))
            node = transfer_of(i)
            waits = graph.setdefault(node, [])
            waits.append(post)
            if not blocks_host(i.op):
                line = line_of(program, rank, i)
                if line in last_in_line:
                    waits.append(last_in_line[line])
                last_in_line[line] = node
            if i.op not in RECV_OPS:
                waits += [transfer_of(d) for d in depends_on(i) if d in known]
    return graph


def line_of(program: Program, rank: int, i: Instruction) -> object:
    """Return the queue of an instruction that doesn't block the host: one end of a channel, or a rank's collectives."""
    return rank if i.op in COLLECTIVE_OPS else (i.op in SEND_OPS, *program.channel(i))


def _host_order(program: Program, rank: int, position: int) -> Iterator[Node]:
    """The host reaches a position once it has passed the one before it, blocked until done where that is no transfer."""
    if position == 0:
        return
    before = program.instructions[rank][position - 1]
    yield before if blocks_host(before.op) else (rank, position - 1)


def blocks_host(op: Op) -> bool:
    """Whether the rank's compute is occupied until an instruction of this kind is done."""
    return op not in SEND_OPS and op not in RECV_OPS and op not in COLLECTIVE_OPS


def validate(program: Program, max_in_flight: Sequence[int] | None = None, training: bool = True) -> None:
    """Raise ScheduleError unless every rank can run its list to the end.

    program: with or without communication; max_in_flight: per rank, the most chunk activations it may hold.
    """
    _check_complete(program, training)
    program = with_communication(program)
    _check_transfers(program)
    _check_deadlock(program)
    if max_in_flight is not None:
        _check_memory(program, max_in_flight)


def _check_complete(program: Program, training: bool) -> None:
    """Each micro-batch passes each chunk once in each direction, on the rank that holds the chunk."""
    for rank, instructions in enumerate(program.instructions):
        for i in instructions:
            if not (0 <= i.chunk < program.num_chunks and 0 <= i.micro_batch < program.num_micro_batches):
                raise ScheduleError(
                    f"{i} is outside a program of {program.num_chunks} chunks and {program.num_micro_batches} micro-batches"
                )
            if i.op not in COLLECTIVE_OPS and program.placement[i.chunk] != rank:
                raise ScheduleError(
                    f"{i} stands in the list of stage {rank}, which holds chunks "
                    f"{[c for c, r in enumerate(program.placement) if r == rank]}; move it to the stage of chunk {i.chunk}"
                )
    count = Counter(i for rank in program.instructions for i in rank if i.op not in COLLECTIVE_OPS)
    for i, times in count.items():
        if times > 1:
            raise ScheduleError(f"{i} stands {times} times in the schedule; an instruction runs once")
    for chunk in range(program.num_chunks):
        for m in range(program.num_micro_batches):
            _check_passes(chunk, m, count, training)


def _check_passes(chunk: int, micro_batch: int, count: Counter[Instruction], training: bool) -> None:
    def has(op: Op) -> bool:
        return count[Instruction(op, chunk, micro_batch)] > 0

    if not has(Op.FORWARD):
        raise ScheduleError(f"F{micro_batch}@{chunk} is missing: every micro-batch passes every chunk")
    whole, split = has(Op.BACKWARD), (has(Op.BACKWARD_INPUT), has(Op.BACKWARD_WEIGHT))
    right = (whole and not any(split)) or (not whole and all(split))
    if training and not right:
        raise ScheduleError(
            f"micro-batch {micro_batch} on chunk {chunk} needs either B, or I and W; it has "
            f"{[op for op, there in zip('BIW', (whole, *split), strict=True) if there]}"
        )
    if not training and (whole or any(split)):
        raise ScheduleError(f"micro-batch {micro_batch} on chunk {chunk} has a backward in a program for evaluation")


def _check_transfers(program: Program) -> None:
    for rank, instructions in enumerate(program.instructions):
        for i in instructions:
            other = matches(i)
            if other is not None and other not in program.rank_of:
                raise ScheduleError(f"{i} in the list of stage {rank} has no other end {other}; both must be there")
            for send in transfers_after(program, i):
                if send not in program.rank_of:
                    raise ScheduleError(
                        f"{i} needs the transfer {send}, which no list holds; add it, or leave out all transfers"
                    )


def _check_deadlock(program: Program) -> None:
    try:
        TopologicalSorter(wait_graph(program)).prepare()
    except CycleError as error:
        cycle: list[Node] = error.args[1]
        steps = [program.instructions[n[0]][n[1]] if not isinstance(n, Instruction) else n for n in cycle]
        shown = " <- ".join(str(i) for k, i in enumerate(steps) if k == 0 or steps[k - 1] != i)
        raise ScheduleError(f"the schedule deadlocks, each waits for the one to its left: {shown}") from None


def in_flight(program: Program) -> tuple[int, ...]:
    """Per rank, the most activations of a chunk held at once: from its FORWARD to its BACKWARD or BACKWARD_WEIGHT."""
    peaks = []
    for instructions in program.instructions:
        held = peak = 0
        for i in instructions:
            held += (i.op is Op.FORWARD) - (i.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT))
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


def _check_memory(program: Program, max_in_flight: Sequence[int]) -> None:
    for rank, (peak, bound) in enumerate(zip(in_flight(program), max_in_flight, strict=True)):
        if peak > bound:
            raise ScheduleError(
                f"stage {rank} holds {peak} activations at once, {peak - bound} over its bound of {bound}; "
                "start fewer forwards before the first backward"
            )
