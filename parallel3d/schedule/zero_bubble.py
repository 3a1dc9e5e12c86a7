"""Zero-bubble schedules: a backward is split, and weight gradients run where a rank would wait for input gradients.

The idea, ZB-H1 and ZBV are those of arXiv:2401.10241; F, I and W below are the times of a forward, an input gradient (the
paper's B) and a weight gradient of one chunk. An activation is held from its FORWARD to its BACKWARD_WEIGHT.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from math import ceil

from parallel3d.errors import ScheduleError
from parallel3d.schedule.instructions import Instruction, Op, Program, loop_placement, v_placement
from parallel3d.schedule.search import Memory, search
from parallel3d.schedule.timing import Cost, decoder_cost

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
    activations of a chunk (of v a rank); 1.5 by default. cost: the times to plan for, as for simulate(). roughly: see search().

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
    return search("zb-looped", placement, num_micro_batches, Memory.of_activations(placement, bound), cost, roughly)
