"""What waits for what in a program: the one graph that the validator checks and the simulator times."""

from __future__ import annotations

from collections.abc import Iterator

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
    """What an instruction that doesn't block the host waits in: a channel by one of its ends, or a rank's collectives."""
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
