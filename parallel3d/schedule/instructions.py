"""The instruction set, the Program, and the only two rules that relate instructions to each other.

A pipeline schedule is data: for each rank an ordered list of instructions. The executor runs it, the simulator times it, the
validator proves it free of deadlock and the drawings show it, all through `depends_on` and `matches` below.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from parallel3d.errors import ScheduleError


class Op(Enum):
    """Kind of an instruction; the value is its short printed form."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    LOAD_MICRO_BATCH = "L"
    SEND_ACTIVATION = "SA"
    RECV_ACTIVATION = "RA"
    SEND_GRADIENT = "SG"
    RECV_GRADIENT = "RG"
    GATHER_PARAMS = "AG"
    RELEASE_PARAMS = "RL"
    REDUCE_GRADS = "RED"
    REDUCE_REPLICAS = "REP"

    # Members are singletons, and programs hash thousands of instructions: skip Enum's hash in Python.
    __hash__ = object.__hash__


COMPUTE_OPS = frozenset({Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})
SEND_OPS = frozenset({Op.SEND_ACTIVATION, Op.SEND_GRADIENT})
RECV_OPS = frozenset({Op.RECV_ACTIVATION, Op.RECV_GRADIENT})
COLLECTIVE_OPS = frozenset({Op.GATHER_PARAMS, Op.REDUCE_GRADS, Op.REDUCE_REPLICAS})
BUCKET_OPS = frozenset({Op.REDUCE_GRADS, Op.REDUCE_REPLICAS})
LIFETIME_OPS = frozenset({Op.GATHER_PARAMS, Op.RELEASE_PARAMS})

_PATTERN = re.compile(r"([A-Z]+)(\d+)@(\d+)(?:#(\d+)(?:\.(\d+))?)?")


class Instruction(NamedTuple):
    """One step of a rank's list.

    - bucket: index of a bucket, for REDUCE_* and for a GATHER_PARAMS that was launched; the unit of sharded weights, for the
      GATHER_PARAMS and RELEASE_PARAMS of ZeRO-3.
    - run: for these two, the number of the layer's run before which it happens, of all runs of layers on the rank.

    It is a tuple because programs create and hash hundreds of thousands of instructions.
    """

    op: Op
    chunk: int
    micro_batch: int
    bucket: int | None = None
    run: int | None = None

    def __str__(self) -> str:
        suffix = "" if self.bucket is None else f"#{self.bucket}"
        return f"{self.op.value}{self.micro_batch}@{self.chunk}{suffix}" + ("" if self.run is None else f".{self.run}")

    @staticmethod
    def parse(text: str) -> Instruction:
        """Read 'F3@2' as the forward of micro-batch 3 on chunk 2. Raises ScheduleError for any other form."""
        match = _PATTERN.fullmatch(text.strip())
        if match is None or match[1] not in {op.value for op in Op}:
            raise ScheduleError(
                f"{text!r} is not an instruction; write OP MICRO_BATCH @ CHUNK as in 'F3@2', with OP one of "
                + ", ".join(op.value for op in Op)
            )
        op, micro_batch, chunk, bucket, run = match.groups()
        if (bucket is not None) != (Op(op) in BUCKET_OPS or run is not None):
            raise ScheduleError(
                f"{text!r}: a bucket ('#0') belongs to {Op.REDUCE_GRADS.value} and {Op.REDUCE_REPLICAS.value}"
            )
        if (run is not None and Op(op) not in LIFETIME_OPS) or (run is None and Op(op) is Op.RELEASE_PARAMS):
            raise ScheduleError(
                f"{text!r}: a unit and a run ('#0.3') belong to {Op.GATHER_PARAMS.value} and {Op.RELEASE_PARAMS.value}"
            )
        numbers = (None if number is None else int(number) for number in (bucket, run))
        return Instruction(Op(op), int(chunk), int(micro_batch), *numbers)


def depends_on(i: Instruction) -> tuple[Instruction, ...]:
    """Return the instructions that must end before `i` starts; those that a program doesn't contain don't count.

    A program without communication is ordered by the compute instructions among them; once transfers are added, the same
    rule orders it through them.
    """
    m, c = i.micro_batch, i.chunk
    match i.op:
        case Op.FORWARD:
            return (
                Instruction(Op.FORWARD, c - 1, m),
                Instruction(Op.RECV_ACTIVATION, c, m),
                Instruction(Op.LOAD_MICRO_BATCH, c, m),
                Instruction(Op.GATHER_PARAMS, c, 0),
            )
        case Op.BACKWARD | Op.BACKWARD_INPUT:
            return (
                Instruction(Op.FORWARD, c, m),
                Instruction(Op.BACKWARD, c + 1, m),
                Instruction(Op.BACKWARD_INPUT, c + 1, m),
                Instruction(Op.RECV_GRADIENT, c, m),
            )
        case Op.BACKWARD_WEIGHT:
            return (Instruction(Op.BACKWARD_INPUT, c, m),)
        case Op.SEND_ACTIVATION:
            return (Instruction(Op.FORWARD, c, m),)
        case Op.SEND_GRADIENT:
            return (Instruction(Op.BACKWARD, c, m), Instruction(Op.BACKWARD_INPUT, c, m))
        case Op.REDUCE_GRADS:
            return (Instruction(Op.BACKWARD, c, m), Instruction(Op.BACKWARD_WEIGHT, c, m))
        case _:
            # LOAD needs nothing, GATHER_PARAMS the optimizer step before the program, RECV its other end (`matches`),
            # REDUCE_REPLICAS all that precedes it in its list. GATHER_PARAMS and RELEASE_PARAMS of units are part of the
            # compute that they precede.
            return ()


# Transfer -> its other end, and the step from its chunk to that end's.
_OTHER_ENDS = {
    Op.SEND_ACTIVATION: (Op.RECV_ACTIVATION, 1),
    Op.RECV_ACTIVATION: (Op.SEND_ACTIVATION, -1),
    Op.SEND_GRADIENT: (Op.RECV_GRADIENT, -1),
    Op.RECV_GRADIENT: (Op.SEND_GRADIENT, 1),
}


def matches(i: Instruction) -> Instruction | None:
    """Return the other end of a transfer, or `i` itself for a collective: all ranks whose list holds it take part.

    REDUCE_REPLICAS is written with the first chunk that owns the replica, on every owner, so that it is one instruction.
    """
    if i.op in COLLECTIVE_OPS:
        return i
    if i.op not in _OTHER_ENDS:
        return None
    op, step = _OTHER_ENDS[i.op]
    return Instruction(op, i.chunk + step, i.micro_batch)


def reduces_after(instructions: Sequence[Instruction], position: int) -> Sequence[Instruction]:
    """Return the REDUCE_GRADS that the backward at `position` launches: those right after it."""
    if instructions[position].op not in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
        return ()
    stop = position + 1
    while stop < len(instructions) and instructions[stop].op is Op.REDUCE_GRADS:
        stop += 1
    return instructions[position + 1 : stop]


def loop_placement(num_stages: int, num_chunks: int) -> tuple[int, ...]:
    """Place chunk c on rank c mod p: arXiv:2104.04473, figure 4."""
    return tuple(c % num_stages for c in range(num_stages * num_chunks))


def v_placement(num_stages: int) -> tuple[int, ...]:
    """Place two chunks a rank, down and back up, so that the first and the last share rank 0: arXiv:2401.10241, section 6."""
    return (*range(num_stages), *reversed(range(num_stages)))


def chunks_by_rank(placement: Sequence[int]) -> list[list[int]]:
    """Return the chunks that each rank holds, in ascending order."""
    return [[c for c, r in enumerate(placement) if r == rank] for rank in range(max(placement) + 1)]


@dataclass(frozen=True)
class Program:
    """A schedule: `instructions[rank]` is that rank's ordered list, `placement[chunk]` the rank that holds the chunk.

    Ranks are positions along the pipeline axis; every data-parallel replica runs the same program.
    """

    name: str
    placement: tuple[int, ...]
    num_micro_batches: int
    instructions: tuple[tuple[Instruction, ...], ...]

    @property
    def num_ranks(self) -> int:
        """Number of ranks along the pipeline axis."""
        return len(self.instructions)

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the whole model, over all ranks."""
        return len(self.placement)

    @cached_property
    def rank_of(self) -> dict[Instruction, tuple[int, ...]]:
        """The ranks whose list holds each instruction; several only for a collective."""
        where: dict[Instruction, tuple[int, ...]] = {}
        for rank, instructions in enumerate(self.instructions):
            for i in instructions:
                where[i] = (*where.get(i, ()), rank)
        return where

    def channel(self, i: Instruction) -> tuple[int, int]:
        """Return (sending rank, receiving rank) of a SEND or RECV; each ordered pair of ranks has one FIFO channel."""
        other = matches(i)
        assert other is not None, f"{i} is no transfer"
        ends = (self.placement[i.chunk], self.placement[other.chunk])
        return ends if i.op in SEND_OPS else (ends[1], ends[0])

    def with_instructions(self, instructions: Sequence[Sequence[Instruction]]) -> Program:
        """Return the same schedule with other lists, as lowering passes make."""
        return replace(self, instructions=tuple(tuple(i) for i in instructions))

    def first(self, num_micro_batches: int) -> Program:
        """Return the schedule (only compute instructions) of the first micro-batches, at least 1.

        Dropping a micro-batch removes nodes from an acyclic order, so what was free of deadlock stays so.
        Raises ScheduleError when the program has fewer.
        """
        if num_micro_batches < 1:
            raise ScheduleError(f"a schedule of {num_micro_batches} micro-batches; it needs at least 1")
        if num_micro_batches > self.num_micro_batches:
            raise ScheduleError(
                f"schedule {self.name!r} is written for {self.num_micro_batches} micro-batches and can't run "
                f"{num_micro_batches}; extend its lists or lower gradient_accumulation_steps"
            )
        kept = [[i for i in rank if i.micro_batch < num_micro_batches] for rank in self.instructions]
        return replace(self.with_instructions(kept), num_micro_batches=num_micro_batches)
