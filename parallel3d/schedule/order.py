"""Order in which a program can run: the waits between instructions, and the proof that every rank ends its list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from graphlib import CycleError, TopologicalSorter
from itertools import chain, product
from typing import Any

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
from parallel3d.schedule.lowering import send_after, with_communication

_BACKWARDS = (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


class WaitGraph:
    """Waits in a program with communication: host order, channel order, dependences and other ends of transfers.

    The host passes compute instructions in list order and blocks in them, as a CPU does; transfers and collectives are
    posted and go on by themselves, but start only when every end has posted them (rendezvous) and when the transfer
    ahead of them in the channel is done. Data-parallel replicas run identical lists, so a cycle over the whole
    world projects to a cycle in this one pipeline: checking one is checking all. Gathers of units, which replicas launch in
    list order, can add none; when they run, and what waits for them, depends on the layers (see timing.Simulation).

    nodes: instructions by number. A transfer is one node for both ends, its SEND; a collective is one node for all ranks.
    numbers: instruction -> its number; lists: the program's lists as numbers; waits: number -> the numbers that it waits for.
    beside: number -> the last gather of a unit before it on its rank, which comes earlier in the order, but may still run.
    """

    def __init__(self, program: Program) -> None:
        self.numbers: dict[Instruction, int] = {}
        self.nodes: list[Instruction] = []
        for i in chain.from_iterable(program.instructions):
            node = matches(i) if i.op in RECV_OPS else i
            assert node is not None
            number = self.numbers.setdefault(node, len(self.nodes))
            if number == len(self.nodes):
                self.nodes.append(node)
            self.numbers[i] = number
        self.lists = [[self.numbers[i] for i in instructions] for instructions in program.instructions]
        self.waits: list[list[int]] = [[] for _ in self.nodes]
        self.beside: dict[int, int] = {}
        kinds = {i[:2] for i in self.numbers}
        for rank in range(len(self.lists)):
            self._add_waits(program, rank, kinds)

    def _add_waits(self, program: Program, rank: int, kinds: Set[tuple[Op, int]]) -> None:
        """Add what the instructions of a rank wait for. kinds: the kinds of instructions in the program, with their chunks."""
        find: Any = self.numbers.get  # by a tuple, which is made faster and is equal
        passed: int | None = None  # the last instruction that blocked the host
        last_in_line: dict[object, int] = {}
        # The rules are the same for all micro-batches: they are applied once for each kind of instruction and chunk.
        rules: dict[tuple[Op, int], tuple[object, list[tuple[Op, int, bool]]]] = {}
        for i, number in zip(program.instructions[rank], self.lists[rank], strict=True):
            waits = self.waits[number]
            if passed is not None:
                waits.append(passed)
            if i.run is not None:  # carried out while the next compute runs, on a communicator of its own
                continue
            op, chunk, m = i[:3]
            if i[:2] not in rules:
                needs = () if op in RECV_OPS else depends_on(Instruction(op, chunk, 1))
                known_kinds = [(*d[:2], d.micro_batch == 1) for d in needs if d[:2] in kinds]
                rules[op, chunk] = _line(program, rank, i), known_kinds
            line, dependences = rules[op, chunk]
            if line is None:
                passed = number
            else:
                if line in last_in_line:
                    waits.append(last_in_line[line])
                last_in_line[line] = number
            for need, at, is_own in dependences:
                known = find((need, at, m if is_own else 0, None, None))
                if known is not None:
                    waits.append(known)

    def order(self) -> list[int]:
        """Return the numbers so that each comes after all that it waits for. Raises CycleError with the nodes of a cycle."""
        waiting: list[list[int]] = [[] for _ in self.waits]
        missing = [len(before) for before in self.waits]
        for number, before in enumerate(self.waits):
            for w in before:
                waiting[w].append(number)
        for number, gather in self.beside.items():
            waiting[gather].append(number)
            missing[number] += 1
        order = [number for number, count in enumerate(missing) if count == 0]
        for number in order:
            for later in waiting[number]:
                missing[later] -= 1
                if missing[later] == 0:
                    order.append(later)
        if len(order) < len(self.waits):
            TopologicalSorter(
                dict(zip(self.nodes, ([self.nodes[w] for w in ws] for ws in self.waits), strict=True))
            ).prepare()
        return order


def _line(program: Program, rank: int, i: Instruction) -> object:
    """Return the queue of an instruction, one end of a channel or a rank's collectives; None if it blocks the host."""
    if blocks_host(i.op):
        return None
    return rank if i.op in COLLECTIVE_OPS else (i.op in SEND_OPS, *program.channel(i))


def blocks_host(op: Op) -> bool:
    """Return whether the rank's compute is occupied until an instruction of this kind is done."""
    return op not in SEND_OPS and op not in RECV_OPS and op not in COLLECTIVE_OPS and op is not Op.RELEASE_PARAMS


def validate(program: Program, training: bool = True) -> None:
    """Raise ScheduleError unless every rank can run its list, with or without communication, to the end."""
    _check_complete(program, training)
    program = with_communication(program)
    _check_transfers(program)
    try:
        WaitGraph(program).order()
    except CycleError as error:
        shown = " <- ".join(f"{i}/{matches(i)}" if i.op in SEND_OPS else f"{i}" for i in error.args[1])
        raise ScheduleError(f"the schedule deadlocks, each waits for the one to its left: {shown}") from None


def _check_complete(program: Program, training: bool) -> None:
    """Check that each micro-batch passes each chunk once in each direction, on the rank that holds the chunk."""
    for rank, instructions in enumerate(program.instructions):
        for i in instructions:
            if not (0 <= i.chunk < program.num_chunks and 0 <= i.micro_batch < program.num_micro_batches):
                raise ScheduleError(
                    f"{i} is outside a program of {program.num_chunks} chunks and {program.num_micro_batches} micro-batches"
                )
            if i.op not in COLLECTIVE_OPS and program.placement[i.chunk] != rank:
                raise ScheduleError(
                    f"{i} is in the list of stage {rank}, which holds chunks "
                    f"{[c for c, r in enumerate(program.placement) if r == rank]}; move it to the stage of chunk {i.chunk}"
                )
    count = Counter(i for rank in program.instructions for i in rank if i.op not in COLLECTIVE_OPS)
    for i, times in count.items():
        if times > 1:
            raise ScheduleError(f"{i} occurs {times} times in the schedule; an instruction runs once")
    for chunk, m in product(range(program.num_chunks), range(program.num_micro_batches)):
        if not count[Instruction(Op.FORWARD, chunk, m)]:
            raise ScheduleError(f"F{m}@{chunk} is missing: every micro-batch passes every chunk")
        backwards = [op.value for op in _BACKWARDS if count[Instruction(op, chunk, m)]]
        if training and backwards not in (["B"], ["I", "W"]):
            raise ScheduleError(f"micro-batch {m} on chunk {chunk} needs either B, or I and W; it has {backwards}")
        if backwards and not training:
            raise ScheduleError(f"micro-batch {m} on chunk {chunk} has a backward in a program for evaluation")


def _check_transfers(program: Program) -> None:
    for rank, instructions in enumerate(program.instructions):
        for i in instructions:
            other = matches(i)
            if other is not None and other not in program.rank_of:
                raise ScheduleError(f"{i} in the list of stage {rank} has no other end {other}; both must be there")
            send = send_after(program, i)
            if send is not None and send not in program.rank_of:
                raise ScheduleError(
                    f"{i} needs the transfer {send}, which no list holds; add it, or leave out all transfers"
                )
