"""Policy "auto": what it chooses fits, and takes no longer than the best single policy that fits, by trying all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import pytest

from parallel3d.pipe.policies import Option, ProgramBytes, choose, choose_with_program, with_plan
from parallel3d.schedule.builders import build, placement_of
from parallel3d.schedule.memory import ChunkBytes, bytes_in_flight

# Of a 7b block: ms and MiB. Attention is dear, as with long sequences: no single layer should stop there.
BLOCK = [
    Option("none", 0.0, 502, 480, 199),
    Option("cheap", 0.5, 356, 480, 346),
    Option("attention", 2.5, 324, 480, 377),
    Option("full", 3.6, 31, 480, 670),
]
BLOCKS_MS = 4 * 9.6  # forward and backward of the four blocks below
HEAD = [Option("none", 0.0, 275, 0, 488)]
PLACES = {"1f1b": (2, 1, "loop"), "zbv": (2, 2, "v"), "interleaved": (2, 2, "loop")}


def chosen_of(policies: Sequence[str], options: Sequence[Sequence[Option]]) -> tuple[Option, ...]:
    return tuple(next(o for o in own if o.policy == p) for own, p in zip(options, policies, strict=True))


@pytest.mark.parametrize("schedule", PLACES)
def test_the_choice_fits_at_the_least_cost(schedule: str):
    stages, chunks, kind = PLACES[schedule]
    program, placement = build(schedule, stages, 4, chunks, kind), placement_of(kind, stages, chunks)
    options = [BLOCK] * 4 + [HEAD]
    bounds = [0, 2, 5] if chunks == 1 else [0, 1, 2, 3, 5]
    state, counted = [100] * 5, ProgramBytes(program)

    def in_flight(stage: int, saved: Mapping[int, int], deferred: Mapping[int, int]) -> int:
        held = {c: ChunkBytes(saved=nbytes, deferred=deferred.get(c, 0)) for c, nbytes in saved.items()}
        most = max(bytes_in_flight(program.instructions[stage], held))
        assert counted(stage, saved, deferred) == most
        return most

    def needs(chosen: tuple[Option, ...]) -> list[int]:
        single = [[option] for option in chosen]
        return choose(single, bounds, placement, state, in_flight, 0.0)[1]

    uniform = [tuple(next((o for o in own if o.policy == p.policy), own[0]) for own in options) for p in BLOCK]
    every = [(sum(o.seconds for o in chosen), max(needs(chosen))) for chosen in product(*options)]
    mixed = 0
    for budget in range(min(max(needs(chosen)) for chosen in uniform), max(needs(uniform[0])) + 200, 150):
        policies, held = choose(options, bounds, placement, state, in_flight, budget)
        chosen = chosen_of(policies, options)
        seconds = sum(option.seconds for option in chosen)
        assert max(held) <= budget
        assert held == needs(chosen)
        assert seconds <= min(sum(o.seconds for o in one) for one in uniform if max(needs(one)) <= budget)
        assert seconds <= min(cost for cost, nbytes in every if nbytes <= budget) + 0.01 * BLOCKS_MS
        mixed += len({option.policy for option in chosen if option in BLOCK}) > 1
    assert mixed
    _, held = choose(options, bounds, placement, state, in_flight, 0.0)
    assert max(held) <= min(max(needs(chosen)) for chosen in uniform)


@pytest.mark.parametrize(("schedule", "bounds", "budget"), [("1f1b", [0, 2, 5], 1792), ("zbv", [0, 1, 2, 3, 5], 2169)])
def test_policies_and_program_are_chosen_together(schedule: str, bounds: list[int], budget: int):
    """No assignment of policies has a program that fits and is shorter by 1%, by trying all; a single policy's is longer."""
    stages, chunks, kind = PLACES[schedule]
    # Seconds of a forward, an input gradient and a weight gradient; the second repeats what is recomputed.
    block = [replace(BLOCK[k], times=(3.2, 4.0 + BLOCK[k].seconds, 2.4)) for k in (0, 1, 3)]
    options = [block] * 4 + [[replace(HEAD[0], times=(0.8, 1.0, 0.7))]]
    arguments = bounds, placement_of(kind, stages, chunks), [100] * 5, 6, 1.5, budget
    every = [with_plan(chosen, *arguments) for chosen in product(*options)]
    choice = choose_with_program(options, *arguments)
    assert choice in every
    assert max(choice.held) <= budget
    lengths = [(len(set(c.policies[:4])), c.plan.makespan) for c in every if c.plan and max(c.held) <= budget]
    assert choice.plan is not None
    assert choice.plan.makespan <= 1.01 * min(length for _, length in lengths)
    assert choice.plan.makespan < 0.99 * min(length for number, length in lengths if number == 1)
