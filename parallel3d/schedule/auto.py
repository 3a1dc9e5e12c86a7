"""The best program for measured times and memory, with what was measured and what is promised: schedule "auto"."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pydantic import BaseModel, ConfigDict

from parallel3d.errors import ScheduleError
from parallel3d.schedule.builders import BUILDERS, from_lists
from parallel3d.schedule.fuse import fuse_backwards
from parallel3d.schedule.instructions import COLLECTIVE_OPS, SEND_OPS, Instruction, Op, Program
from parallel3d.schedule.order import validate
from parallel3d.schedule.search import Memory, search
from parallel3d.schedule.timing import decoder_cost, simulate
from parallel3d.schedule.traffic import Traffic, hide_reductions


class Measured(BaseModel):
    """Measurements of the chunks of a pipeline.

    forward, input_gradient, weight_gradient, backward: seconds of a micro-batch on each chunk; backward: of a whole one.
    transfer: seconds of a message between ranks.
    held: bytes of a micro-batch on each chunk from its forward to its input gradient; deferred: from there to its weight
        gradient; limit: of each rank.
    gather: seconds to all-gather each chunk's weights, empty for none.
    reductions: seconds to reduce each of the chunk's buckets of gradients, after its last backward or, with
        reduces_every_micro_batch, after each; empty for none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    forward: tuple[float, ...]
    input_gradient: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    backward: tuple[float, ...]
    transfer: float
    held: tuple[float, ...]
    deferred: tuple[float, ...]
    limit: tuple[float, ...]
    gather: tuple[float, ...] = ()
    reductions: tuple[tuple[float, ...], ...] = ()
    reduces_every_micro_batch: bool = False

    def cost(self, i: Instruction) -> float:
        """As simulate() takes it."""
        if i.op in SEND_OPS:
            return self.transfer
        if i.op in COLLECTIVE_OPS:
            return self.traffic.cost(i)
        times = {
            Op.FORWARD: self.forward,
            Op.BACKWARD_INPUT: self.input_gradient,
            Op.BACKWARD_WEIGHT: self.weight_gradient,
            Op.BACKWARD: self.backward,
        }
        return times[i.op][i.chunk] if i.op in times else 0.0

    @property
    def memory(self) -> Memory:
        """As search() takes it."""
        return Memory(self.held, self.deferred, self.limit)

    @property
    def traffic(self) -> Traffic:
        """As hide_reductions() takes it."""
        chunks = len(self.forward)
        return Traffic(
            self.gather or (0.0,) * chunks, self.reductions or ((),) * chunks, self.reduces_every_micro_batch
        )


class Plan(BaseModel):
    """A program and why it was chosen; as JSON it is the plan's file.

    name: of the order that was the shortest; makespan: predicted, in seconds, to the end of all reductions; exposed: the part
    of it that is due to gathers and reductions; bubble: predicted, a share, without them; held: the most bytes of each rank;
    instructions: compute alone, each rank's as schedules are written.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    placement: tuple[int, ...]
    num_micro_batches: int
    makespan: float
    exposed: float = 0.0
    bubble: float
    held: tuple[float, ...]
    measured: Measured
    instructions: tuple[tuple[str, ...], ...]

    def program(self, num_micro_batches: int) -> Program:
        """The planned program; of another number of micro-batches, what is best for the same measurements."""
        if num_micro_batches != self.num_micro_batches:
            return make_plan(self.placement, num_micro_batches, self.measured).program(num_micro_batches)
        return replace(from_lists(self.instructions, self.placement), name="auto")

    def check(self, placement: Sequence[int]) -> None:
        """Raise ScheduleError unless this is a plan for such a pipeline, and can run."""
        if tuple(placement) != self.placement:
            raise ScheduleError(
                f"the plan is for chunks on stages {list(self.placement)}, but the module's are on {list(placement)}; build "
                "it with the plan's stages, num_chunks and placement, or make another plan"
            )
        chunks = [len(getattr(self.measured, name)) for name in _PER_CHUNK]
        if chunks != [len(placement)] * len(chunks) or len(self.measured.limit) != max(placement) + 1:
            raise ScheduleError(f"the plan's measurements are not of {len(placement)} chunks; make another plan")
        if any(len(times) not in (0, len(placement)) for times in (self.measured.gather, self.measured.reductions)):
            raise ScheduleError(
                f"the plan's gathers or reductions are not of {len(placement)} chunks; make another plan"
            )
        program = self.program(self.num_micro_batches)
        if program.num_micro_batches != self.num_micro_batches:
            raise ScheduleError(
                f"the plan says {self.num_micro_batches} micro-batches, but its lists have {program.num_micro_batches}; make "
                "another plan"
            )
        validate(program)


_PER_CHUNK = ("forward", "input_gradient", "weight_gradient", "backward", "held", "deferred")


@dataclass(frozen=True)
class _Candidate:
    name: str
    program: Program
    makespan: float


def make_plan(placement: Sequence[int], num_micro_batches: int, measured: Measured) -> Plan:
    """The shortest of what the search finds and of the named schedules that fit this placement and memory.

    Up to the end of all reductions, from the beginning of the first gather. Pure: equal arguments give equal plans. Raises
    ScheduleError where a micro-batch doesn't fit a rank's limit.
    """
    best: _Candidate | None = None
    for name, program in _candidates(tuple(placement), num_micro_batches, measured):
        fused = fuse_backwards(program, measured.cost)
        # Traffic makes no program shorter.
        if best is not None and not _is_shorter(simulate(fused, measured.cost).makespan, best.makespan):
            continue
        order, makespan = _hiding(fused, measured)
        if best is None or _is_shorter(makespan, best.makespan):
            best = _Candidate(name, order, makespan)
    assert best is not None, "the search finds a program or raises"
    return _plan(best, measured)


def _is_shorter(makespan: float, other: float) -> bool:
    return makespan < other * (1 - 1e-6)


def _hiding(program: Program, measured: Measured) -> tuple[Program, float]:
    """The program with its weight gradients where they hide reductions, within its memory, and its makespan with traffic."""

    def exactly(order: Program) -> float:
        return simulate(measured.traffic.added(order), measured.cost).makespan

    if not any(map(any, measured.reductions)):
        return program, exactly(program)
    limit = [max(pair) for pair in zip(most_held(program, measured.memory), measured.limit, strict=True)]

    def fits(rank: int, instructions: Sequence[Instruction]) -> bool:
        return _peak(instructions, measured.memory) <= limit[rank]

    order, least = hide_reductions(program, measured.cost, measured.traffic, fits)
    makespan = exactly(order)
    if order != program and makespan > least * (1 + 1e-9):
        # Transfers that wait for one another count from here on.
        before = exactly(program)
        return (order, makespan) if makespan < before else (program, before)
    return order, makespan


def _plan(best: _Candidate, measured: Measured) -> Plan:
    program = best.program
    timeline = simulate(program, measured.cost)
    return Plan(
        name=best.name,
        placement=program.placement,
        num_micro_batches=program.num_micro_batches,
        makespan=best.makespan,
        exposed=best.makespan - timeline.makespan,
        bubble=timeline.bubble,
        held=most_held(program, measured.memory),
        measured=measured,
        instructions=tuple(tuple(map(str, rank)) for rank in program.instructions),
    )


def _candidates(
    placement: tuple[int, ...], num_micro_batches: int, measured: Measured
) -> Iterator[tuple[str, Program]]:
    memory = measured.memory
    yield "search", search("auto", placement, num_micro_batches, memory, measured.cost)
    num_stages = max(placement) + 1
    num_chunks = len(placement) // num_stages
    for name in ("1f1b", "zb-h1", "zbv", "interleaved"):
        for kind in ("loop", "v"):
            try:
                program = BUILDERS[name](num_stages, num_micro_batches, num_chunks, kind)
            except ScheduleError:
                continue  # not of so many chunks, or placed so
            held = most_held(program, memory)
            if program.placement == placement and all(h <= most for h, most in zip(held, memory.limit, strict=True)):
                yield name, program


def most_held(program: Program, memory: Memory) -> tuple[float, ...]:
    """Return the most bytes that each rank holds after any instruction of the program."""
    return tuple(_peak(instructions, memory) for instructions in program.instructions)


def _peak(instructions: Sequence[Instruction], memory: Memory) -> float:
    held = peak = 0.0
    for i in instructions:
        held += _change(i, memory)
        peak = max(peak, held)
    return peak


def _change(i: Instruction, memory: Memory) -> float:
    needed, deferred = memory.needed(i.chunk), memory.deferred[i.chunk]
    changes = {
        Op.FORWARD: needed,
        Op.BACKWARD: -needed,
        Op.BACKWARD_INPUT: deferred - needed,
        Op.BACKWARD_WEIGHT: -deferred,
    }
    return changes.get(i.op, 0.0)


def first_plan(placement: Sequence[int], num_micro_batches: int, max_in_flight: float) -> Plan:
    """Return the plan to run before anything is measured: every backward split, equal times on all chunks.

    max_in_flight: activations in flight, as a multiple of those of 1F1B on its first rank.
    """
    where, ones = tuple(placement), (1.0,) * len(placement)
    ops = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.BACKWARD)
    forward, input_gradient, weight_gradient, backward = (
        tuple(decoder_cost(Instruction(op, c, 0)) for c in range(len(where))) for op in ops
    )
    guessed = Measured(
        forward=forward,
        input_gradient=input_gradient,
        weight_gradient=weight_gradient,
        backward=backward,
        transfer=0.0,
        held=ones,
        deferred=ones,
        limit=limits(where, ones, max_in_flight),
    )
    program = search("auto", where, num_micro_batches, guessed.memory, guessed.cost)
    return _plan(_Candidate("search", program, simulate(program, guessed.cost).makespan), guessed)


def limits(placement: Sequence[int], needed: Sequence[float], max_in_flight: float) -> tuple[float, ...]:
    """Return the activation limit of each rank: `max_in_flight` times what it would hold as first stage of 1F1B.

    needed: by a micro-batch on each chunk. The limit is at least what one micro-batch needs.
    """
    num_ranks = max(placement) + 1
    own = [sum(n for n, r in zip(needed, placement, strict=True) if r == rank) for rank in range(num_ranks)]
    return tuple(max(max_in_flight * num_ranks, 1.0) * total for total in own)
