"""Random orders, and an emulator that knows no graph of waits: only ranks, channels and a clock."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from parallel3d.schedule.instructions import Instruction, Op, Program
from parallel3d.schedule.order import validate

SEEDS = st.integers(0, 2**32 - 1)
# A loaded machine is no failure.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

SENDS = {Op.SEND_ACTIVATION: "activation", Op.SEND_GRADIENT: "gradient"}
RECVS = {Op.RECV_ACTIVATION: "activation", Op.RECV_GRADIENT: "gradient"}
Times = dict[tuple[int, Instruction], tuple[int, int]]


class Stuck(Exception):
    """Nothing runs, nothing is under way, and not all lists are through."""


class Mixup(Exception):
    """A channel hands a receiver another message than the one it has posted."""


class Emulator:
    """Steps the ranks of a program with communication, tick by tick; cost: in whole ticks, of a transfer by its SEND.

    A rank posts transfers without waiting and is occupied by compute. A channel between two ranks carries one message
    at a time, in the order of posting, from when both ends have posted it and the sender has made it.
    """

    def __init__(self, program: Program, cost: Callable[[Instruction], int]) -> None:
        self.program, self.cost = program, cost
        self.clock = self.events = self.running = 0
        self.done: set[Instruction] = set()
        self.arrived: set[tuple[str, int, int]] = set()
        self.sends: dict[tuple[int, int], deque] = defaultdict(deque)
        self.recvs: dict[tuple[int, int], deque] = defaultdict(deque)
        self.carried: dict[tuple[int, int], tuple] = {}
        self.times: Times = {}

    def run(self) -> Times:
        """(rank, instruction) -> start and end tick. Raises Stuck or Mixup."""
        threads = [self._rank(rank) for rank in range(self.program.num_ranks)]
        while True:
            before = -1
            while before != self.events:
                before = self.events
                threads = [t for t in threads if next(t, "through") != "through"]
                for ends in list(self.sends):
                    self._carry(ends)
            if not threads and not self.carried:
                return self.times
            if not self.running and not self.carried:
                raise Stuck(f"tick {self.clock}")
            self.clock += 1

    def _rank(self, rank: int) -> Iterator[str]:
        """One thread of control; yields while it is blocked or busy."""
        where = self.program.placement
        for i in self.program.instructions[rank]:
            if i.op in SENDS:
                to = i.chunk + (1 if i.op is Op.SEND_ACTIVATION else -1)
                self.sends[rank, where[to]].append((i, (SENDS[i.op], to, i.micro_batch)))
                self.events += 1
            elif i.op in RECVS:
                origin = i.chunk - (1 if i.op is Op.RECV_ACTIVATION else -1)
                self.recvs[where[origin], rank].append((i, (RECVS[i.op], i.chunk, i.micro_batch)))
                self.events += 1
            else:
                while not self._ready(i):
                    yield "blocked"
                start = self.clock
                self.running += 1
                self.events += 1
                while self.clock < start + self.cost(i):
                    yield "busy"
                self.running -= 1
                self.events += 1
                self.done.add(i)
                self.times[rank, i] = (start, self.clock)

    def _ready(self, i: Instruction) -> bool:
        m, c, where = i.micro_batch, i.chunk, self.program.placement

        def ran(op: Op, chunk: int) -> bool:
            return Instruction(op, chunk, m) in self.done

        if i.op is Op.FORWARD:
            here = c > 0 and where[c - 1] == where[c]
            return c == 0 or (ran(Op.FORWARD, c - 1) if here else ("activation", c, m) in self.arrived)
        if i.op is Op.BACKWARD_WEIGHT:
            return ran(Op.BACKWARD_INPUT, c)
        last = c == len(where) - 1
        here = not last and where[c + 1] == where[c]
        gradient = last or (
            ran(Op.BACKWARD, c + 1) or ran(Op.BACKWARD_INPUT, c + 1) if here else ("gradient", c, m) in self.arrived
        )
        return ran(Op.FORWARD, c) and gradient

    def _carry(self, ends: tuple[int, int]) -> None:
        if ends in self.carried:
            send, recv, message, start = self.carried[ends]
            if self.clock < start + self.cost(send):
                return
            del self.carried[ends]
            self.arrived.add(message)
            self.times[ends[0], send] = self.times[ends[1], recv] = (start, self.clock)
            self.events += 1
        if not self.sends[ends] or not self.recvs[ends]:
            return
        (send, message), (recv, expected) = self.sends[ends][0], self.recvs[ends][0]
        if message != expected:
            raise Mixup(f"{send} meets {recv}")
        made = (Op.FORWARD,) if send.op is Op.SEND_ACTIVATION else (Op.BACKWARD, Op.BACKWARD_INPUT)
        if any(Instruction(op, send.chunk, send.micro_batch) in self.done for op in made):
            self.sends[ends].popleft()
            self.recvs[ends].popleft()
            self.carried[ends] = (send, recv, message, self.clock)
            self.events += 1


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


def check(program: Program, max_in_flight: Sequence[int]) -> None:
    """The program can run, and no rank holds more activations than its bound."""
    validate(program)
    assert all(peak <= bound for peak, bound in zip(in_flight(program), max_in_flight, strict=True)), in_flight(program)


@st.composite
def programs(draw: st.DrawFn, max_ranks: int = 4, max_micro_batches: int = 4) -> Program:
    """A valid order on any placement, some backwards split, as a user may write it. Sizes shrink, the order doesn't."""
    num_ranks = draw(st.integers(1, max_ranks))
    num_chunks = draw(st.integers(num_ranks, 2 * num_ranks))
    num_micro_batches = draw(st.integers(1, max_micro_batches))
    return random_program(random.Random(draw(SEEDS)), num_ranks, num_chunks, num_micro_batches)


def random_placement(rng: random.Random, num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """Any chunk on any rank, so that neighbours may share one; every rank holds a chunk."""
    extra = [rng.randrange(num_ranks) for _ in range(num_chunks - num_ranks)]
    placement = [*range(num_ranks), *extra]
    rng.shuffle(placement)
    return tuple(placement)


def random_program(rng: random.Random, num_ranks: int, num_chunks: int, num_micro_batches: int) -> Program:
    """Drawn by running, again and again, any instruction whose needs are met."""
    placement = random_placement(rng, num_ranks, num_chunks)
    done: set[str] = set()
    waiting: list[tuple[str, set[str], int]] = []
    for m in range(num_micro_batches):
        for c, rank in enumerate(placement):
            waiting.append((f"F{m}@{c}", {f"F{m}@{c - 1}"} if c else set(), rank))
            needs = {f"F{m}@{c}", *([f"gradient{m}@{c + 1}"] if c + 1 < num_chunks else [])}
            if rng.random() < 0.4:
                waiting.append((f"I{m}@{c}", needs, rank))
                waiting.append((f"W{m}@{c}", {f"I{m}@{c}"}, rank))
            else:
                waiting.append((f"B{m}@{c}", needs, rank))
    lists: list[list[Instruction]] = [[] for _ in range(num_ranks)]
    while waiting:
        k = rng.choice([k for k, (_, needs, _) in enumerate(waiting) if needs <= done])
        text, _, rank = waiting.pop(k)
        done |= {text, "gradient" + text[1:]} if text[0] in "BI" else {text}
        lists[rank].append(Instruction.parse(text))
    return Program("random", placement, num_micro_batches, tuple(tuple(i) for i in lists))


def disturbed(rng: random.Random, program: Program, swaps: int) -> Program:
    """`program` with that many pairs of instructions swapped inside a rank's list: it may deadlock."""
    lists = [list(i) for i in program.instructions]
    for _ in range(swaps):
        instructions = rng.choice(lists)
        a, b = rng.randrange(len(instructions)), rng.randrange(len(instructions))
        instructions[a], instructions[b] = instructions[b], instructions[a]
    return program.with_instructions(lists)
