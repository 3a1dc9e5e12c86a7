"""Schedule "auto": the best program for measured times and memory, with the measurements and the predicted length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, product
from operator import add, gt, itemgetter, le, lt

from pydantic import BaseModel, ConfigDict

from parallel3d.errors import ScheduleError
from parallel3d.schedule.builders import build, from_lists
from parallel3d.schedule.instructions import SEND_OPS, Instruction, Op, Program
from parallel3d.schedule.order import validate
from parallel3d.schedule.search import ALL_RULES, SPLIT_OPS, ListClock, Memory, Rule, search
from parallel3d.schedule.timing import Cost, decoder_cost, simulate
from parallel3d.schedule.traffic import Traffic, fuse_backwards, orders_that_hide_reductions, whole_backwards


class Measured(Memory, Traffic):
    """Measurements of the chunks of a pipeline: times in seconds, memory in bytes.

    forward, input_gradient, weight_gradient, backward: times of one micro-batch on each chunk; backward is not split.
    transfer: time of a message between ranks.
    """

    forward: tuple[float, ...]
    input_gradient: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    backward: tuple[float, ...]
    transfer: float

    @staticmethod
    def of(
        placement: Sequence[int],
        cost: Cost,
        held: Sequence[float],
        deferred: Sequence[float],
        max_in_flight: float,
        room: Sequence[float] | None = None,
        transfer: float = 0.0,
        traffic: Traffic | None = None,
    ) -> Measured:
        """Collect measurements.

        - cost: seconds of a compute instruction. If no whole backward takes time, it takes as long as its two halves.
        - max_in_flight: see limits. room: the bytes that each rank has; the limit is at least what one micro-batch needs if its
          backward is whole.
        """
        forward, input_gradient, weight_gradient, backward = (
            tuple(cost(Instruction(op, c, 0)) for c in range(len(placement))) for op in (*SPLIT_OPS, Op.BACKWARD)
        )
        needed = list(map(max, held, deferred))
        wanted, least = limits(placement, needed, max_in_flight), limits(placement, held, 0.0)
        return Measured(
            forward=forward,
            input_gradient=input_gradient,
            weight_gradient=weight_gradient,
            backward=backward if any(backward) else tuple(map(add, input_gradient, weight_gradient)),
            transfer=transfer,
            held=tuple(held),
            deferred=tuple(deferred),
            limit=tuple(map(max, map(min, wanted, room or wanted), least)),
            **(traffic.model_dump() if traffic is not None else {}),
        )

    def ways(self, whole: bool = False) -> list[float]:
        """Return the time that a micro-batch takes from each chunk to the loss and back. whole: whether backwards are whole."""
        back = self.backward if whole else self.input_gradient
        return list(accumulate(map(add, reversed(self.forward), reversed(back))))[::-1]

    def cost(self, i: Instruction) -> float:
        """Return the seconds of an instruction, for simulate(); a SEND has those of its transfer."""
        if i.op in SEND_OPS:
            return self.transfer
        times = {
            Op.FORWARD: self.forward,
            Op.BACKWARD_INPUT: self.input_gradient,
            Op.BACKWARD_WEIGHT: self.weight_gradient,
            Op.BACKWARD: self.backward,
            Op.GATHER_PARAMS: self.gather,
        }
        if i.op is Op.REDUCE_GRADS and i.bucket is not None:
            return self.reductions[i.chunk][i.bucket]
        return times[i.op][i.chunk] if times.get(i.op) else 0.0


class Plan(BaseModel):
    """A program and why it was chosen; as JSON it is the plan's file.

    name: the search or the schedule that made the shortest program; makespan: predicted seconds to the end of all reductions;
    exposed: the part of makespan that gathers and reductions add; bubble: predicted share, without them; held: the most
    bytes of each rank; waits_for_host: the largest share of a rank's compute time in which its device waits for the host, if
    CUDA graphs can be captured; instructions: each rank's compute instructions, as in a schedule that the user writes.
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
    waits_for_host: float = 0.0
    instructions: tuple[tuple[str, ...], ...]

    @property
    def captures(self) -> bool:
        """Whether CUDA graphs are captured: most of a rank's compute time is the host's."""
        return self.waits_for_host > 0.5

    def program(self, num_micro_batches: int) -> Program:
        """Return the planned program; for another number of micro-batches, the best one for the same measurements."""
        if num_micro_batches != self.num_micro_batches:
            return make_plan(self.placement, num_micro_batches, self.measured).program(num_micro_batches)
        return replace(from_lists(self.instructions, self.placement), name="auto")

    def check(self, placement: Sequence[int]) -> None:
        """Raise ScheduleError unless the plan is for a pipeline with this placement and can run."""
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


def make_plan(placement: Sequence[int], num_micro_batches: int, measured: Measured) -> Plan:
    """Return a plan of the shortest program: the search's, or a named schedule that fits this placement and memory.

    The length counts from the start of the first gather to the end of the last reduction. Equal arguments give equal plans.
    Raises ScheduleError if one micro-batch exceeds a rank's limit.
    """
    best: tuple[str, Program, float] | None = None
    for name, program in _candidates(tuple(placement), num_micro_batches, measured):
        fused = fuse_backwards(program, measured.cost)
        # Gathers and reductions make no program shorter.
        if best is not None and not _is_shorter(simulate(fused, measured.cost).makespan, best[2]):
            continue
        order, makespan = _hiding(fused, measured)
        if best is None or _is_shorter(makespan, best[2]):
            best = name, order, makespan
    assert best is not None, "the search finds a program or raises"
    return _plan(*best, measured)


def shortest_program(
    placement: Sequence[int], num_micro_batches: int, measured: Measured, rules: Sequence[Rule]
) -> tuple[float, Program]:
    """Return the makespan of a plan without traffic, and its program before backwards are fused.

    Where fusing backwards gains nothing, the makespan is that of `make_plan`'s program, except that no transfer waits for
    another one. rules: those that the search tries.
    """
    found = [program for _, program in _candidates(tuple(placement), num_micro_batches, measured, rules)]
    clock = ListClock(found[0], measured.cost)
    return min(((clock.makespan(clock.lists(p)), p) for p in found), key=itemgetter(0))


def _is_shorter(makespan: float, other: float) -> bool:
    return makespan < other * (1 - 1e-6)


def _hiding(program: Program, measured: Measured) -> tuple[Program, float]:
    """Move weight gradients to where they hide reductions, within memory; return the program and its makespan with traffic."""
    limit = list(map(max, most_held(program, measured), measured.limit))
    orders = dict.fromkeys((program, *(orders_that_hide_reductions(program) if measured.has_reductions else ())))
    fitting = (order for order in orders if all(map(le, most_held(order, measured), limit)))
    timed = ((order, simulate(measured.with_traffic(order), measured.cost).makespan) for order in fitting)
    return min(timed, key=itemgetter(1))


def _plan(name: str, program: Program, makespan: float, measured: Measured) -> Plan:
    timeline = simulate(program, measured.cost)
    return Plan(
        name=name,
        placement=program.placement,
        num_micro_batches=program.num_micro_batches,
        makespan=makespan,
        exposed=makespan - timeline.makespan,
        bubble=timeline.bubble,
        held=most_held(program, measured),
        measured=measured,
        instructions=tuple(tuple(map(str, rank)) for rank in program.instructions),
    )


def _candidates(
    placement: tuple[int, ...], num_micro_batches: int, measured: Measured, rules: Sequence[Rule] = ALL_RULES
) -> Iterator[tuple[str, Program]]:
    """Yield the programs that a plan may run. rules: those that the search tries."""
    # With recomputation, a micro-batch whose backward is whole holds less.
    holds_less = any(map(lt, measured.held, measured.deferred))
    if not (holds_less and any(map(gt, measured.least(placement), measured.limit))):
        yield "search", search("auto", placement, num_micro_batches, measured, measured.cost, rules)
    if holds_less:
        none = (0.0,) * len(placement)
        changes = {"deferred": none, "input_gradient": measured.backward, "weight_gradient": none}
        undivided = measured.model_copy(update=changes)
        order = search("auto", placement, num_micro_batches, undivided, undivided.cost, rules)
        yield "search", whole_backwards(order, range(num_micro_batches))
    for name, program in _named(placement, num_micro_batches):
        if all(map(le, most_held(program, measured), measured.limit)):
            yield name, program


@lru_cache(maxsize=1)  # the same for all policies of recomputation that are compared
def _named(placement: tuple[int, ...], num_micro_batches: int) -> list[tuple[str, Program]]:
    """Return the schedules of fixed form for this placement."""
    num_stages = max(placement) + 1
    found = []
    for name, kind in product(("1f1b", "zb-h1", "zbv", "interleaved"), ("loop", "v")):
        try:
            program = build(name, num_stages, num_micro_batches, len(placement) // num_stages, kind)
        except ScheduleError:
            continue  # the schedule does not support this number or placement of chunks
        if program.placement == placement:
            found.append((name, program))
    return found


def most_held(program: Program, memory: Memory) -> tuple[float, ...]:
    """Return the most bytes that each rank holds after any instruction of the program."""
    return tuple(_peak(instructions, memory) for instructions in program.instructions)


def _peak(instructions: Sequence[Instruction], memory: Memory) -> float:
    needed, deferred, held = memory.needed, memory.deferred, memory.held
    changes = {
        Op.BACKWARD: [-h for h in held],
        Op.BACKWARD_INPUT: [d - n for d, n in zip(deferred, needed, strict=True)],
        Op.BACKWARD_WEIGHT: [-d for d in deferred],
    }
    # A forward reserves what its backward will need.
    split = {(i.chunk, i.micro_batch) for i in instructions if i.op is Op.BACKWARD_INPUT}
    return max(
        accumulate(
            (needed if (i.chunk, i.micro_batch) in split else held)[i.chunk]
            if i.op is Op.FORWARD
            else changes[i.op][i.chunk]
            for i in instructions
        ),
        default=0.0,
    )


def first_plan(
    placement: Sequence[int], num_micro_batches: int, max_in_flight: float, predicted: Measured | None = None
) -> Plan:
    """Return the plan to run before anything is measured: every backward split.

    - max_in_flight: activations in flight, as a multiple of those of 1F1B on its first rank.
    - predicted: predicted times and memory of the chunks; without it, all chunks take equal times, and memory is not limited
      any further.
    """
    ones = (1.0,) * len(placement)
    guessed = predicted or Measured.of(placement, decoder_cost, ones, ones, max_in_flight)
    most = limits(placement, guessed.needed, max_in_flight)
    limit = map(max, map(min, guessed.limit, most), guessed.least(placement))
    guessed = guessed.model_copy(update={"limit": tuple(limit)})
    program = search("auto", tuple(placement), num_micro_batches, guessed, guessed.cost)
    return _plan("search", program, simulate(program, guessed.cost).makespan, guessed)


def limits(placement: Sequence[int], needed: Sequence[float], max_in_flight: float) -> tuple[float, ...]:
    """Return the activation limit of each rank: `max_in_flight` times what it would hold as first stage of 1F1B.

    needed: memory of one micro-batch on each chunk. The limit is at least the memory of one micro-batch.
    """
    least = Memory(held=tuple(needed), deferred=tuple(needed), limit=()).least(placement)
    return tuple(max(max_in_flight * len(least), 1.0) * total for total in least)
