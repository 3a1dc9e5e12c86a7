"""A model of what kernels do to peers' staging (csrc/peers.cuh), whose interleavings are played: every order of its steps.

A thread block is one thread of the model, but at a meeting, where its signals and waits are each on their own, as the
kernel's threads are. StagingBuffers consists of cells that hold who wrote them in which call. A state in which two blocks may
at once touch a cell, one of them writing, is a race: without one, the hardware's weaker order of memory is no other
than the order of steps (a meeting's release and acquire order the rest). A state in which nobody can go on is a lost signal.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

# (call number, this block's own number of calls) -> the half of the staging buffer.
Half = Callable[[int, int], int]
# What reads cells -> what has written them.
WRITTEN_BY = {"read": "stage", "copy": "put", "sum": "push"}


class Fault(AssertionError):
    """A stale read, a race or a lost signal."""


@dataclass(frozen=True)
class Call:
    """One launch of every rank: an all-reduce in one shot or two, or a reduce-scatter."""

    kind: Literal["one-shot", "two-shot", "scatter"]
    blocks: int


@dataclass(frozen=True)
class Rules:
    """The protocol as it is; tests break one rule at a time. meets: of the first and of the second meeting."""

    half: Half = lambda number, own: number % 2
    meets: tuple[bool, bool] = (True, True)
    signals_first: bool = False
    enough: Callable[[int, int], bool] = lambda found, epoch: found >= epoch
    waits_for_own_kernel: bool = True


class Step(NamedTuple):
    """cells: (owner's rank, cell) in the call's half.

    what: begin, meet or end; of cells, which are written by stage, put or push, and read by read, copy or sum, in turn.
    """

    what: str
    cells: tuple[tuple[int, int], ...] = ()
    meeting: int = 0


class Block(NamedTuple):
    """Where a thread block is: its step of which call, the number it read, whom it has signalled to and seen."""

    call: int = 0
    step: int = 0
    number: int = -1
    own: int = 0
    sent: int = 0
    seen: int = 0


class State(NamedTuple):
    """blocks, calls and done by rank; words: (rank, block, peer); memory: (rank, half, cell) -> what was written."""

    blocks: tuple[tuple[Block, ...], ...]
    calls: tuple[int, ...]
    done: tuple[int, ...]
    words: tuple[int, ...]
    memory: tuple[tuple[str, int, int] | None, ...]


Access = tuple[object, bool]  # a place, and whether it is written


@dataclass
class Model:
    """`ranks` ranks that make these calls, of messages of `ranks` x `width` cells."""

    ranks: int
    sequence: Sequence[Call]
    rules: Rules = field(default_factory=Rules)
    width: int = 2

    def __post_init__(self) -> None:
        self.most = max(call.blocks for call in self.sequence)
        self.cells = self.ranks * self.width
        self.programs = {
            (n, r, b): self._program(call, r, b)
            for n, call in enumerate(self.sequence)
            for r in range(self.ranks)
            for b in range(self.most)
        }

    def _program(self, call: Call, rank: int, block: int) -> list[Step]:
        if block >= call.blocks:
            return []
        others = [p for p in range(self.ranks) if p != rank]
        if call.kind == "one-shot":
            places = [cell for cell in range(self.cells) if cell % call.blocks == block]
            work = [Step("stage", tuple((rank, cell) for cell in places)), Step("meet", meeting=1)]
            work += [Step("read", tuple((p, cell) for p in others for cell in places))]
        else:
            places = [place for place in range(self.width) if place % call.blocks == block]
            slices = [[s * self.width + place for place in places] for s in range(self.ranks)]
            foreign = tuple((rank, cell) for s in others for cell in slices[s])
            theirs = tuple((p, cell) for p in others for cell in slices[rank])
            if call.kind == "scatter":
                work = [Step("push", theirs), Step("meet", meeting=1), Step("sum", foreign)]
            else:
                work = [Step("stage", foreign), Step("meet", meeting=1), Step("read", theirs), Step("put", theirs)]
                work += [Step("meet", meeting=2), Step("copy", foreign)]
        work = [step for step in work if step.what != "meet" or self.rules.meets[step.meeting - 1]]
        if self.rules.signals_first:
            work[0], work[1] = work[1], work[0]
        return [Step("begin"), *work, Step("end")]

    def start(self) -> State:
        blocks = tuple(tuple(Block() for _ in range(self.most)) for _ in range(self.ranks))
        state = State(
            blocks,
            (0,) * self.ranks,
            (0,) * self.ranks,
            (0,) * (self.ranks * self.most * self.ranks),
            (None,) * (self.ranks * 2 * self.cells),
        )
        for rank in range(self.ranks):
            state = self._skip(state, rank)
        return state

    def ended(self, state: State) -> bool:
        return all(block.call == len(self.sequence) for blocks in state.blocks for block in blocks)

    def choices(self, state: State) -> Iterator[tuple[State, frozenset[Access]]]:
        """Return the possible next events and the memory that they touch. Raises Fault for a stale read."""
        for rank, blocks in enumerate(state.blocks):
            for index, block in enumerate(blocks):
                if self.programs.get((block.call, rank, index)):
                    yield from self._choices_of(state, rank, index, block)

    def _choices_of(
        self, state: State, rank: int, index: int, block: Block
    ) -> Iterator[tuple[State, frozenset[Access]]]:
        step = self.programs[block.call, rank, index][block.step]
        if step.what == "meet":
            yield from self._meet(state, rank, index, block, 2 * block.number + step.meeting)
        elif step.what == "begin":
            others = [other.call for other in state.blocks[rank]]
            if not self.rules.waits_for_own_kernel or min(others) >= block.call:
                begun = Block(block.call, block.step + 1, state.calls[rank], *block[3:])
                yield self._with(state, rank, index, begun), frozenset({(("calls", rank), False)})
        elif step.what == "end":
            yield self._end(state, rank, index, block)
        else:
            yield self._touch(state, rank, index, block, step)

    def _meet(
        self, state: State, rank: int, index: int, block: Block, epoch: int
    ) -> Iterator[tuple[State, frozenset[Access]]]:
        for peer in range(self.ranks):
            bit = 1 << peer
            if peer == rank:
                continue
            if not block.sent & bit:
                words = list(state.words)
                words[self._word(peer, index, rank)] = epoch
                told = Block(*block[:4], block.sent | bit, block.seen)
                yield self._with(state, rank, index, told, words=tuple(words)), frozenset()
            elif not block.seen & bit and self.rules.enough(state.words[self._word(rank, index, peer)], epoch):
                seen = block.seen | bit
                if seen.bit_count() < self.ranks - 1:
                    met = Block(*block[:5], seen)
                else:
                    met = Block(block.call, block.step + 1, block.number, block.own)
                yield self._with(state, rank, index, met), frozenset()

    def _end(self, state: State, rank: int, index: int, block: Block) -> tuple[State, frozenset[Access]]:
        last = state.done[rank] == self.sequence[block.call].blocks - 1
        done, calls = list(state.done), list(state.calls)
        done[rank] = 0 if last else done[rank] + 1
        calls[rank] = block.number + 1 if last else calls[rank]
        ended = Block(call=block.call + 1, own=block.own + 1)
        after = self._with(state, rank, index, ended, calls=tuple(calls), done=tuple(done))
        return self._skip(after, rank), frozenset({(("calls", rank), True)} if last else ())

    def _touch(self, state: State, rank: int, index: int, block: Block, step: Step) -> tuple[State, frozenset[Access]]:
        half = self.rules.half(block.number, block.own)
        places = [(owner * 2 + half) * self.cells + cell for owner, cell in step.cells]
        writes, memory = step.what not in WRITTEN_BY, state.memory
        if writes:
            cells = list(memory)
            for place in places:
                cells[place] = (step.what, block.call, rank)
            memory = tuple(cells)
        else:
            for place, (owner, cell) in zip(places, step.cells, strict=True):
                writer = owner if step.what == "read" else cell // self.width
                by = (WRITTEN_BY[step.what], block.call, writer)
                if state.memory[place] != by:
                    raise Fault(f"stale: rank {rank} block {index} wants {by}, reads {state.memory[place]}")
        after = self._with(state, rank, index, Block(block.call, block.step + 1, *block[2:]), memory=memory)
        return after, frozenset((place, writes) for place in places)

    def _with(
        self,
        state: State,
        rank: int,
        index: int,
        block: Block,
        calls: tuple[int, ...] | None = None,
        done: tuple[int, ...] | None = None,
        words: tuple[int, ...] | None = None,
        memory: tuple[tuple[str, int, int] | None, ...] | None = None,
    ) -> State:
        """Return the state with these parts changed, in less time than _replace takes."""
        blocks, row = list(state.blocks), list(state.blocks[rank])
        row[index] = block
        blocks[rank] = tuple(row)
        return State(
            tuple(blocks), calls or state.calls, done or state.done, words or state.words, memory or state.memory
        )

    def _skip(self, state: State, rank: int) -> State:
        """Blocks that a call doesn't have go on to the next one, once the kernels before it are complete."""
        while True:
            row = list(state.blocks[rank])
            least = min(block.call for block in row)
            idle = [i for i, b in enumerate(row) if b.call == least < len(self.sequence) and i >= self._blocks(least)]
            if not idle:
                return state
            for i in idle:
                row[i] = row[i]._replace(call=least + 1)
            blocks = list(state.blocks)
            blocks[rank] = tuple(row)
            state = state._replace(blocks=tuple(blocks))

    def _blocks(self, number: int) -> int:
        return self.sequence[number].blocks

    def _word(self, rank: int, block: int, peer: int) -> int:
        return (rank * self.most + block) * self.ranks + peer


def check(model: Model, state: State) -> list[State]:
    """The states that may follow. Raises Fault for what must not be."""
    choices = list(model.choices(state))
    if not choices and not model.ended(state):
        raise Fault(f"a lost signal: {state.blocks}, words {state.words}")
    seen: dict[object, bool] = {}
    for _, accesses in choices:
        for place, writes in accesses:
            if place in seen and (writes or seen[place]):
                raise Fault(f"a race at {place}: {state.blocks}")
            seen[place] = seen.get(place, False) or writes
    return [after for after, _ in choices]


def explore(model: Model) -> int:
    """Play every interleaving; the number of states. Raises Fault."""
    todo = [model.start()]
    known = set(todo)
    while todo:
        for after in check(model, todo.pop()):
            if after not in known:
                known.add(after)
                todo.append(after)
    return len(known)


def play(model: Model, rng: random.Random) -> None:
    """One interleaving, in which some ranks are much slower than others for a while. Raises Fault."""
    state = model.start()
    while not model.ended(state):
        following = check(model, state)
        slow = rng.randrange(model.ranks)
        for _ in range(rng.randrange(1, 12)):
            quick = [after for after in following if after.blocks[slow] == state.blocks[slow]]
            state = rng.choice(quick or following)
            if model.ended(state):
                break
            following = check(model, state)
