"""Builders of schedules. Each emits only compute instructions; the passes of lowering.py add the rest.

In zero-bubble schedules a backward is split, and weight gradients run where a rank would wait for input gradients. The idea,
ZB-H1 and ZBV are those of arXiv:2401.10241; F, I and W are the times of a forward, an input gradient (the paper's B) and a
weight gradient of one chunk. An activation is held from its FORWARD to its BACKWARD_WEIGHT.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import ceil

from parallel3d.errors import ScheduleError, nearest
from parallel3d.schedule.instructions import (
    COMPUTE_OPS,
    Instruction,
    Op,
    Program,
    chunks_by_rank,
    loop_placement,
    v_placement,
)
from parallel3d.schedule.search import ALL_RULES, LIKELY_RULES, Memory, search
from parallel3d.schedule.timing import Cost, decoder_cost


def _each(op: Op, chunk: int, micro_batches: Sequence[int]) -> list[Instruction]:
    return [Instruction(op, chunk, m) for m in micro_batches]


def placement_of(kind: str, num_stages: int, num_chunks: int) -> tuple[int, ...]:
    """Return the rank of each chunk for placement "loop" (any number of chunks) or "v" (two). Raises ScheduleError."""
    if kind == "loop":
        return loop_placement(num_stages, num_chunks)
    if kind != "v":
        raise ScheduleError(f"unknown placement {kind!r}; use 'loop' or 'v'." + nearest(kind, ("loop", "v")))
    check_chunks(None, num_chunks, kind)
    return v_placement(num_stages)


def gpipe(num_stages: int, num_micro_batches: int, num_chunks: int = 1, placement: str = "loop") -> Program:
    """Run all forwards, then all backwards, the last micro-batch first: arXiv:1811.06965, figure 2c.

    Every rank holds the activations of all its forwards: num_chunks * num_micro_batches.
    """
    check_sizes(num_stages, num_micro_batches, num_chunks)
    where = placement_of(placement, num_stages, num_chunks)
    order = range(num_micro_batches)
    lists = []
    for chunks in chunks_by_rank(where):
        forwards = [i for c in chunks for i in _each(Op.FORWARD, c, order)]
        backwards = [i for c in reversed(chunks) for i in _each(Op.BACKWARD, c, order[::-1])]
        lists.append(tuple(forwards + backwards))
    return Program("gpipe", where, num_micro_batches, tuple(lists))


def _alternate(forwards: list[Instruction], backwards: list[Instruction], warmup: int) -> tuple[Instruction, ...]:
    """Put `warmup` forwards first, then one forward and one backward in turn, then the remaining backwards."""
    steady = [i for pair in zip(forwards[warmup:], backwards, strict=False) for i in pair]
    return (*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :])


def one_f_one_b(num_stages: int, num_micro_batches: int) -> Program:
    """Build 1F1B with flushes (PipeDream-Flush): arXiv:2006.09503; arXiv:2104.04473, figure 4, top.

    Rank r holds min(m, p - r) activations at most; the makespan is 3(m + p - 1) for forward = 1, backward = 2.
    """
    check_sizes(num_stages, num_micro_batches)
    order = range(num_micro_batches)
    lists = tuple(
        _alternate(
            _each(Op.FORWARD, rank, order),
            _each(Op.BACKWARD, rank, order),
            min(num_stages - rank - 1, num_micro_batches),
        )
        for rank in range(num_stages)
    )
    return Program("1f1b", loop_placement(num_stages, 1), num_micro_batches, lists)


def interleaved(num_stages: int, num_micro_batches: int, num_chunks: int) -> Program:
    """Build interleaved 1F1B with `num_chunks` chunks a rank, for any m >= 1: arXiv:2104.04473, figure 4, bottom.

    The paper's order needs m to be a multiple of p. For another m the order of the next multiple is built and its first
    micro-batches are dropped, which keeps it valid (dropping the last ones does too, but is longer). With p > 1 and v > 1
    rank r holds at most min(m * v, (v - 1) * p + 2 * (p - r - 1) + 1) activations of a chunk.
    """
    check_sizes(num_stages, num_micro_batches, num_chunks)
    if num_chunks == 1:
        return one_f_one_b(num_stages, num_micro_batches)
    missing = -num_micro_batches % num_stages
    groups = [range(start, start + num_stages) for start in range(-missing, num_micro_batches, num_stages)]
    lists = []
    for rank in range(num_stages):
        chunks = range(rank, num_stages * num_chunks, num_stages)
        forwards = [i for group in groups for c in chunks for i in _each(Op.FORWARD, c, group)]
        backwards = [i for group in groups for c in reversed(chunks) for i in _each(Op.BACKWARD, c, group)]
        warmup = min(2 * (num_stages - rank - 1) + (num_chunks - 1) * num_stages, len(forwards))
        lists.append(tuple(i for i in _alternate(forwards, backwards, warmup) if i.micro_batch >= 0))
    return Program("interleaved", loop_placement(num_stages, num_chunks), num_micro_batches, tuple(lists))


def inference(num_stages: int, num_micro_batches: int, num_chunks: int = 1, placement: str = "loop") -> Program:
    """Run only forwards, in groups of p micro-batches, chunk by chunk within a group; no activation is held."""
    check_sizes(num_stages, num_micro_batches, num_chunks)
    where = placement_of(placement, num_stages, num_chunks)
    order = range(num_micro_batches)
    groups = [order[start : start + num_stages] for start in range(0, num_micro_batches, num_stages)]
    lists = tuple(
        tuple(i for group in groups for c in chunks for i in _each(Op.FORWARD, c, group))
        for chunks in chunks_by_rank(where)
    )
    return Program("inference", where, num_micro_batches, lists)


DEFAULT_MAX_IN_FLIGHT = 1.5


def check_sizes(num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> None:
    """Raise ScheduleError unless all are at least 1."""
    sizes = {"num_stages": num_stages, "num_micro_batches": num_micro_batches, "num_chunks": num_chunks}
    for name, value in sizes.items():
        if value < 1:
            raise ScheduleError(f"{name} is {value}; a schedule needs at least 1")


def zb_h1(num_stages: int, num_micro_batches: int) -> Program:
    """Build ZB-H1, 1F1B with deferred weight gradients, for any m >= 1: arXiv:2401.10241, section 2.1, figure 3, top.

    Rank r's weight gradients trail its input gradients by r micro-batches. So every rank holds at most min(m, p)
    activations, as many as the first rank of 1F1B. For m >= p a step takes m (F + I + W) + (p - 1) (F + I - W) if W is the
    shortest, and 3m + p - 1 if all are 1; for m < p, 2m + 2p - 1.
    """
    check_sizes(num_stages, num_micro_batches)
    lists = []
    for rank in range(num_stages):
        delays = ((Op.FORWARD, 0), (Op.BACKWARD_INPUT, num_stages - rank - 1), (Op.BACKWARD_WEIGHT, num_stages - 1))
        steps = product(range(num_micro_batches + num_stages - 1), delays)
        lists.append(tuple(Instruction(op, rank, k - b) for k, (op, b) in steps if 0 <= k - b < num_micro_batches))
    return Program("zb-h1", loop_placement(num_stages, 1), num_micro_batches, tuple(lists))


def zbv(num_stages: int, num_micro_batches: int) -> Program:
    """Build ZBV: two chunks a rank, down and back up the ranks, for any m >= 1: arXiv:2401.10241, section 6.

    A rank holds at most min(2m, 2p) activations of a chunk, each half as large as one of 1F1B: its memory. As the paper
    states, with F = I = W no rank waits between its first and its last instruction, once m >= 2p - 1 fill the pipeline.
    Rank r starts r forwards late, so a step that all ranks end together (the paper's without post-validation of the
    optimizer step) takes 6m + p - 1, or 4m + 4p - 2 where that is more; 2m (F + I + W) + (p - 1) I where F, W <= I <= 2W.
    """
    check_sizes(num_stages, num_micro_batches)
    full = max(num_micro_batches, 2 * num_stages - 1)  # fewer don't fill the pipeline: drop the surplus
    lists = []
    for rank in range(num_stages):
        rest = num_stages - rank
        phases = (
            (2 * rest - 1, "F0"),
            (rank, "F1 F0"),
            (rest, "F1 I1 W1"),
            (full - 2 * num_stages + rank + 1, "F0 I0 W0 F1 I1 W1"),
            (rest - 1, "I0 W0 F1 I1 W1"),
            (rank, "I0 I1"),
            (rest, "I0 W0"),
            (rank, "W1"),
            (rank, "W0"),
        )
        lists.append(tuple(_play(phases, chunks=(rank, 2 * num_stages - 1 - rank))))
    return Program("zbv", v_placement(num_stages), full, tuple(lists)).first(num_micro_batches)


def _play(phases: Sequence[tuple[int, str]], chunks: Sequence[int]) -> Iterator[Instruction]:
    """Yield each pattern as often as it says: "F0" is the next micro-batch's forward on the first of `chunks`."""
    played: Counter[str] = Counter()
    for times, pattern in phases:
        steps = [(Op(step[0]), chunks[int(step[1])], step) for step in pattern.split()]
        for op, chunk, step in steps * times:
            yield Instruction(op, chunk, played[step])
            played[step] += 1


def looped_zero_bubble(
    num_stages: int,
    num_micro_batches: int,
    num_chunks: int,
    max_in_flight: float | None = None,
    cost: Cost = decoder_cost,
    roughly: bool = False,
) -> Program:
    """Place chunks in loops and defer weight gradients as far as memory allows, by list scheduling, for any m >= 1.

    max_in_flight: the most activations that a rank holds, as a multiple of those of 1F1B's first rank, which are p v
    activations of a chunk (of v a rank); 1.5 by default. cost: the times to plan for, as for simulate().
    roughly: whether the search tries fewer rules, in about a sixth of the time.

    A step can't be shorter than v m (F + I + W) + (p - 1) F, for the last rank starts p - 1 forwards late; planned for
    F = I = W with the default memory it is no longer for any m >= p up to 8 stages, 16 micro-batches and 4 chunks.
    Raises ScheduleError if memory doesn't suffice for the v activations of one micro-batch.
    """
    check_sizes(num_stages, num_micro_batches, num_chunks)
    placement = loop_placement(num_stages, num_chunks)
    # The most activations of a chunk that a rank may hold; a micro-batch has one for each chunk of the rank.
    multiple = DEFAULT_MAX_IN_FLIGHT if max_in_flight is None else max_in_flight
    bound = multiple * num_stages * num_chunks + 1e-9  # tolerance of rounding
    if not bound >= num_chunks:
        least = ceil(1e4 / num_stages) / 1e4
        raise ScheduleError(
            f"max_in_flight {multiple:g} lets a stage hold {bound:.3g} activations of a chunk, but a micro-batch alone "
            f"needs those of its {num_chunks} chunks; set pipeline.max_in_flight to {least:g} or more"
        )
    memory, rules = Memory.of_activations(placement, bound), LIKELY_RULES if roughly else ALL_RULES
    return search("zb-looped", placement, num_micro_batches, memory, cost, rules)


def from_lists(lists: Sequence[Sequence[str]], placement: Sequence[int]) -> Program:
    """Read a schedule that the user writes: for each rank its instructions, as ["F0@0", "F1@0", "B0@0", "B1@0"].

    Raises ScheduleError for a malformed or non-compute instruction. validate() says whether the order can run.
    """
    parsed = tuple(tuple(Instruction.parse(text) for text in rank) for rank in lists)
    for i in (i for rank in parsed for i in rank):
        if i.op not in COMPUTE_OPS:
            raise ScheduleError(
                f"{i} in a user's schedule: list compute instructions alone (F, B, I, W); the rest is added"
            )
    num_ranks = max(placement) + 1
    if len(parsed) != num_ranks:
        raise ScheduleError(f"the schedule has {len(parsed)} lists for {num_ranks} stages; give one list a stage")
    num_micro_batches = 1 + max((i.micro_batch for rank in parsed for i in rank), default=-1)
    return Program("custom", tuple(placement), num_micro_batches, parsed)


# Schedules that never split a backward.
WHOLE_BACKWARDS = ("1f1b", "gpipe", "interleaved")

BUILDERS: dict[str, Callable[..., Program]] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zbv": zbv,
    "zb-looped": looped_zero_bubble,
}
# Schedule -> (chunks per stage and placement that it needs, None for any; the schedules that support others).
_NEEDS: dict[str | None, tuple[int | None, str | None, str]] = {
    "1f1b": (1, None, '"interleaved" or "gpipe"'),
    "zb-h1": (1, None, '"zb-looped"'),
    "interleaved": (None, "loop", '"gpipe"'),
    "zb-looped": (None, "loop", '"zbv"'),
    "zbv": (2, "v", '"zb-looped"'),
}


def check_chunks(schedule: str | None, num_chunks: int | None, placement: str | None) -> None:
    """Raise ScheduleError for a number or placement of chunks that the schedule does not have.

    - schedule: its name; None for any schedule.
    - num_chunks, placement: None if not decided yet.
    """
    given = f"num_chunks is {num_chunks} and placement is {placement!r}"
    chunks, kind, others = _NEEDS.get(schedule, (None, None, ""))
    pairs = ((num_chunks, chunks), (placement, kind))
    if any(need is not None and value not in (None, need) for value, need in pairs):
        needs = [f"num_chunks {chunks}"] * (chunks is not None) + [f'placement "{kind}"'] * (kind is not None)
        raise ScheduleError(
            f'schedule "{schedule}" needs {" and ".join(needs)}, but {given}; set that, or schedule to {others}'
        )
    if placement == "v" and num_chunks not in (None, 2):
        raise ScheduleError(
            f'placement "v" puts 2 chunks on each stage, but {given}; set num_chunks to 2, or placement to "loop"'
        )


def build(
    schedule: str | Sequence[Sequence[str]],
    num_stages: int,
    num_micro_batches: int,
    num_chunks: int,
    placement: str,
    max_in_flight: float | None = None,
) -> Program:
    """Build the program of a named schedule, or of a user's lists, for this number of micro-batches.

    max_in_flight: only for "zb-looped", see looped_zero_bubble. Raises ScheduleError.
    """
    if max_in_flight is not None and schedule != "zb-looped":
        name = repr(schedule) if isinstance(schedule, str) else "written as lists"
        raise ScheduleError(f"max_in_flight bounds schedule 'zb-looped', but the schedule is {name}; leave it out")
    if not isinstance(schedule, str):
        return from_lists(schedule, placement_of(placement, num_stages, num_chunks)).first(num_micro_batches)
    if schedule not in BUILDERS:
        known = ", ".join(BUILDERS)
        raise ScheduleError(f"unknown schedule {schedule!r}; known: {known}." + nearest(schedule, BUILDERS))
    check_chunks(schedule, num_chunks, placement)
    options = {
        "gpipe": (num_chunks, placement),
        "interleaved": (num_chunks,),
        "zb-looped": (num_chunks, max_in_flight),
    }
    return BUILDERS[schedule](num_stages, num_micro_batches, *options.get(schedule, ()))
