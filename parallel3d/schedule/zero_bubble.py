"""Zero-bubble schedules: a backward is split, and weight gradients run where a rank would wait for input gradients.

The idea, ZB-H1 and ZBV are those of arXiv:2401.10241; F, I and W below are the times of a forward, an input gradient (the
paper's B) and a weight gradient of one chunk. An activation is held from its FORWARD to its BACKWARD_WEIGHT.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, product
from math import ceil, inf

from parallel3d.errors import ScheduleError
from parallel3d.schedule.instructions import Instruction, Op, Program, depends_on, loop_placement, v_placement
from parallel3d.schedule.lowering import transfers_after
from parallel3d.schedule.simulate import Cost, unit_cost

DEFAULT_MAX_IN_FLIGHT = 1.5


def check_sizes(num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> None:
    """Raise ScheduleError unless all are at least 1."""
    for name, value in (
        ("num_stages", num_stages),
        ("num_micro_batches", num_micro_batches),
        ("num_chunks", num_chunks),
    ):
        if value < 1:
            raise ScheduleError(f"{name} is {value}; a schedule needs at least 1")


def zb_h1(num_stages: int, num_micro_batches: int) -> Program:
    """ZB-H1, 1F1B with deferred weight gradients, for any m >= 1: arXiv:2401.10241, section 2.1, figure 3, top.

    Rank r's weight gradients trail its input gradients by r micro-batches. So every rank holds at most min(m, p)
    activations, as many as the first rank of 1F1B. For m >= p a step takes m (F + I + W) + (p - 1) (F + I - W) if W is the
    shortest, and 3m + p - 1 if all are 1; for m < p, 2m + 2p - 1.
    """
    check_sizes(num_stages, num_micro_batches)
    lists = []
    for rank in range(num_stages):
        behind = ((Op.FORWARD, 0), (Op.BACKWARD_INPUT, num_stages - rank - 1), (Op.BACKWARD_WEIGHT, num_stages - 1))
        steps = product(range(num_micro_batches + num_stages - 1), behind)
        lists.append(tuple(Instruction(op, rank, k - b) for k, (op, b) in steps if 0 <= k - b < num_micro_batches))
    return Program("zb-h1", loop_placement(num_stages, 1), num_micro_batches, tuple(lists))


def zbv(num_stages: int, num_micro_batches: int) -> Program:
    """ZBV: two chunks a rank, down and back up the ranks, for any m >= 1: arXiv:2401.10241, section 6.

    A rank holds at most min(2m, 2p) activations of a chunk, each half as large as one of 1F1B: its memory. As the paper
    states, with F = I = W no rank waits between its first and its last instruction, once m >= 2p - 1 fill the pipeline.
    Rank r starts r forwards late, so a step that all ranks end together (the paper's without post-validation of the
    optimizer step) takes 6m + p - 1, or 4m + 4p - 2 where that is more; 2m (F + I + W) + (p - 1) I where F, W <= I <= 2W.
    """
    check_sizes(num_stages, num_micro_batches)
    full = max(num_micro_batches, 2 * num_stages - 1)  # fewer don't fill the pipeline: drop those that are too many
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
    """Each pattern as often as it says: "F0" is the next micro-batch's forward on the first of `chunks`."""
    played: Counter[str] = Counter()
    for times, pattern in phases:
        for step in pattern.split() * times:
            yield Instruction(Op(step[0]), chunks[int(step[1])], played[step])
            played[step] += 1


def looped_zero_bubble(
    num_stages: int,
    num_micro_batches: int,
    num_chunks: int,
    max_in_flight: float | None = None,
    cost: Cost = unit_cost,
) -> Program:
    """Chunks in loops with weight gradients deferred as far as memory allows, by list scheduling, for any m >= 1.

    max_in_flight: the most activations that a rank holds, as a multiple of those of 1F1B's first rank, which are p v
    activations of a chunk (of v a rank); 1.5 by default. cost: the times to plan for, as for simulate().

    Several rules, in the manner of the heuristic of arXiv:2401.10241, section 3, are tried. The shortest order is taken,
    of equals the one that bears slow transfers best; equal arguments give equal programs. A step can't be shorter than
    v m (F + I + W) + (p - 1) F, for the last rank starts p - 1 forwards late; with F = I = W and the default memory it is
    no longer for any m >= p up to 8 stages, 16 micro-batches and 4 chunks. Raises ScheduleError if memory doesn't suffice
    for the v activations of one micro-batch.
    """
    check_sizes(num_stages, num_micro_batches, num_chunks)
    bound = _bound(num_stages, num_micro_batches, num_chunks, max_in_flight)
    empty = Program("zb-looped", loop_placement(num_stages, num_chunks), num_micro_batches, ((),) * num_stages)
    work = _Work(empty, cost)
    orders = [_ListSchedule(work, rule, bound).run() for rule in _rules(empty, bound)]
    best = min(orders, key=work.quality)
    return empty.with_instructions([[work.instructions[n] for n in order] for order in best])


def _bound(num_stages: int, num_micro_batches: int, num_chunks: int, max_in_flight: float | None) -> int:
    """In activations of a chunk, of which each micro-batch has one for each chunk of a rank."""
    multiple = DEFAULT_MAX_IN_FLIGHT if max_in_flight is None else max_in_flight
    bound = multiple * num_stages * num_chunks + 1e-9  # a third of 3 is 1
    if not bound >= num_chunks:
        least = ceil(1e4 / num_stages) / 1e4
        raise ScheduleError(
            f"max_in_flight {multiple:g} lets a stage hold {bound:.3g} activations of a chunk, but a micro-batch alone "
            f"needs those of its {num_chunks} chunks; set pipeline.max_in_flight to {least:g} or more"
        )
    return int(min(bound, num_micro_batches * num_chunks))


@dataclass(frozen=True)
class _Rule:
    """How ranks choose among what is ready. Each has its micro-batches pass the chunks in groups, in a fixed order."""

    groups: tuple[range, ...]
    alternate: bool  # forwards and input gradients in turn where both are ready, else input gradients first
    slack: float  # transfers are taken to be longer by so many forwards, for an order that bears delays
    patience: float  # a weight gradient waits for what will be ready before this share of it would be through


def _rules(program: Program, bound: int) -> list[_Rule]:
    """The rules to try. Groups of more than p hide transfers, and a last group of few micro-batches would stall."""
    p, m, v = program.num_ranks, program.num_micro_batches, program.num_chunks // program.num_ranks
    # Before the first input gradient a rank runs all chunks of a group but the last, and one micro-batch of that.
    largest = m if v == 1 else (bound - 1) // (v - 1)
    count = -(-m // min(p, largest))
    splits = [_evenly(m, k) for k in (m // p - 1, m // p, count) if k > 0]
    splits.append((p,) * (m // p) + ((m % p,) if m % p else ()))
    # With one chunk groups make no difference.
    kept = dict.fromkeys(sizes for sizes in splits if max(sizes) <= largest) if v > 1 else [(m,)]
    groups = [tuple(range(end - size, end) for size, end in zip(s, accumulate(s), strict=True)) for s in kept]
    return [_Rule(*choices) for choices in product(groups, (True, False), (0.5, 0.1, 0.0), (0.0, 0.5))]


def _evenly(total: int, parts: int) -> tuple[int, ...]:
    return tuple(total // parts + (k < total % parts) for k in range(parts))


class _Work:
    """A program's instructions as numbers, with the time that each takes and its result travels, and what it waits for."""

    def __init__(self, program: Program, cost: Cost) -> None:
        self.placement, self.num_ranks = program.placement, program.num_ranks
        ops = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
        chunks, order = range(program.num_chunks), range(program.num_micro_batches)
        self.instructions = [Instruction(*i) for i in product(ops, chunks, order)]
        self.number = {i: n for n, i in enumerate(self.instructions)}
        self.times = [cost(i) for i in self.instructions]
        transfers = [transfers_after(program, i) for i in self.instructions]
        self.travels = [sum(map(cost, sends)) for sends in transfers]
        self.is_sent = [bool(sends) for sends in transfers]
        # (what it needs, whether that comes from another chunk)
        self.needs = [
            [(self.number[d], d.chunk != i.chunk) for d in depends_on(i) if d in self.number] for i in self.instructions
        ]
        self.forward_time = sum(self.times[: len(chunks) * len(order)]) / (len(chunks) * len(order))

    def numbers(self, op: Op, chunks: Sequence[int], groups: Sequence[range]) -> list[int]:
        """Group by group, in it chunk by chunk."""
        return [self.number[Instruction(op, c, m)] for group in groups for c in chunks for m in group]

    def quality(self, order: Sequence[Sequence[int]]) -> tuple[float, float]:
        """The less the better: the makespan; with transfers longer by half a forward. Rounded, so that equals tie."""
        whole = sum(self.times) or 1.0
        return round(self._makespan(order, 0.0) / whole, 9), round(self._makespan(order, 0.5) / whole, 9)

    def _makespan(self, order: Sequence[Sequence[int]], slack: float) -> float:
        """As simulate() has it, without building its graph; transfers longer by `slack` forwards, no wait for a channel."""
        clock = _Clock(self, slack)
        free, position, left = [0.0] * len(order), [0] * len(order), sum(map(len, order))
        while left:
            for rank, numbers in enumerate(order):
                while position[rank] < len(numbers):
                    n = numbers[position[rank]]
                    ready = clock.ready(n)
                    if ready == inf:
                        break
                    free[rank] = clock.start(n, max(ready, free[rank]))
                    position[rank] += 1
                    left -= 1
        return max(free)


class _Clock:
    """When each instruction ends and its result arrives; never, until it starts."""

    def __init__(self, work: _Work, slack: float) -> None:
        self._times, self._needs = work.times, work.needs
        self._travels = [
            travel + sent * slack * work.forward_time for travel, sent in zip(work.travels, work.is_sent, strict=True)
        ]
        self._ends = [inf] * len(work.times)
        self.arrivals = [inf] * len(work.times)

    def ready(self, number: int) -> float:
        latest = 0.0
        for need, elsewhere in self._needs[number]:
            time = self.arrivals[need] if elsewhere else self._ends[need]
            if time > latest:
                latest = time
        return latest

    def start(self, number: int, now: float) -> float:
        """Returns its end."""
        end = self._ends[number] = now + self._times[number]
        self.arrivals[number] = end + self._travels[number]
        return end


class _Rank:
    """What a rank has to do, each kind in its order, and what it holds."""

    def __init__(self, forwards: Sequence[int], gradients: Sequence[int]) -> None:
        self.forwards, self.gradients, self.weights = deque(forwards), deque(gradients), deque[int]()
        self.free = 0.0
        self.held = 0
        self.after_forward = False
        self.order: list[int] = []


class _ListSchedule:
    """Whenever a rank is free it starts the best that is ready: a forward within `bound`, an input or a weight gradient.

    It never gets stuck. Ranks that can't go on have no weight gradient to do, and have run out of forwards or hold `bound`
    activations; then all have run those forwards that the first input gradient still to run needs (see _rules).
    """

    def __init__(self, work: _Work, rule: _Rule, bound: int) -> None:
        self._work, self._rule, self._bound = work, rule, bound
        self._clock = _Clock(work, rule.slack)
        self._ranks = []
        for rank in range(work.num_ranks):
            chunks = [c for c, r in enumerate(work.placement) if r == rank]
            forwards = work.numbers(Op.FORWARD, chunks, rule.groups)
            self._ranks.append(_Rank(forwards, work.numbers(Op.BACKWARD_INPUT, chunks[::-1], rule.groups)))

    def run(self) -> list[list[int]]:
        """The order of each rank."""
        moments = [0.0]
        while moments:
            now = heappop(moments)
            while moments and moments[0] <= now:
                heappop(moments)
            for rank in self._ranks:
                number = self._choose(rank, now) if rank.free <= now else None
                if number is not None:
                    rank.free = self._clock.start(number, now)
                    rank.order.append(number)
                    heappush(moments, rank.free)
                    heappush(moments, self._clock.arrivals[number])
        assert not any(rank.forwards or rank.gradients or rank.weights for rank in self._ranks)
        return [rank.order for rank in self._ranks]

    def _choose(self, rank: _Rank, now: float) -> int | None:
        """What a free rank starts now; None: it waits."""
        may_forward = rank.forwards and rank.held < self._bound
        forward = self._clock.ready(rank.forwards[0]) if may_forward else inf
        gradient = self._clock.ready(rank.gradients[0]) if rank.gradients else inf
        if gradient <= now and (rank.after_forward or not self._rule.alternate or forward > now):
            rank.after_forward = False
            number = rank.gradients.popleft()
            rank.weights.append(self._weight_of(number))
            return number
        if forward <= now:
            rank.after_forward = True
            rank.held += 1
            return rank.forwards.popleft()
        if rank.weights:
            through = now + self._rule.patience * self._work.times[rank.weights[0]]
            if min(forward, gradient) >= through:
                rank.held -= 1
                return rank.weights.popleft()
        return None

    def _weight_of(self, gradient: int) -> int:
        # Numbers count op by op, and weight gradients follow input gradients.
        return gradient + len(self._work.instructions) // 3
