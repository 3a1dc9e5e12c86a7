"""Policy "auto": what it chooses fits, and takes no longer than the best single policy that fits, by trying all."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product

import pytest

from parallel3d.pipe.policies import LayerOptions, Option, ProgramBytes
from parallel3d.schedule.auto import make_plan
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
        return list(LayerOptions(single, bounds, placement, state, 0.0).choose(in_flight).held)

    uniform = [tuple(next((o for o in own if o.policy == p.policy), own[0]) for own in options) for p in BLOCK]
    every = [(sum(o.seconds for o in chosen), max(needs(chosen))) for chosen in product(*options)]
    mixed = 0
    for budget in range(min(max(needs(chosen)) for chosen in uniform), max(needs(uniform[0])) + 200, 150):
        choice = LayerOptions(options, bounds, placement, state, budget).choose(in_flight)
        chosen = chosen_of(choice.policies, options)
        seconds = sum(option.seconds for option in chosen)
        assert max(choice.held) <= budget
        assert choice.held == needs(chosen)
        assert seconds <= min(sum(o.seconds for o in one) for one in uniform if max(needs(one)) <= budget)
        assert seconds <= min(cost for cost, nbytes in every if nbytes <= budget) + 0.01 * BLOCKS_MS
        mixed += len({option.policy for option in chosen if option in BLOCK}) > 1
    assert mixed
    choice = LayerOptions(options, bounds, placement, state, 0.0).choose(in_flight)
    assert max(choice.held) <= min(max(needs(chosen)) for chosen in uniform)


# Of the blocks, what is tried in every combination below.
KINDS = (0, 1, 3)


def timed(times: tuple[float, float, float], seconds: Sequence[float]) -> list[Option]:
    """Options of a block, with the seconds of its forward, input gradient and weight gradient, and of each recomputation."""
    forward, given, weight = times
    return [
        replace(BLOCK[k], seconds=s, times=(forward, given + s, weight)) for k, s in zip(KINDS, seconds, strict=True)
    ]


def shortest_of_all(layers: LayerOptions, num_micro_batches: int, max_in_flight: float) -> dict[tuple[str, ...], float]:
    """Length of the plan for each assignment of policies that fits."""
    lengths = {}
    plan_of = cache(partial(make_plan, layers.placement, num_micro_batches))  # many assignments measure the same
    for chosen in product(*layers.options):
        policies = tuple(option.policy for option in chosen)
        measured, others = layers.measure(policies, max_in_flight)
        plan = plan_of(measured)
        if all(held + other <= layers.budget for held, other in zip(plan.held, others, strict=True)):
            lengths[policies] = plan.makespan
    return lengths


@pytest.mark.parametrize(("schedule", "bounds", "budget"), [("1f1b", [0, 2, 5], 1792), ("zbv", [0, 1, 2, 3, 5], 2169)])
def test_policies_and_program_are_chosen_together(schedule: str, bounds: list[int], budget: int):
    """No assignment of policies has a program that fits and is shorter by 1%, by trying all; a single policy's is longer."""
    stages, chunks, kind = PLACES[schedule]
    block = timed((3.2, 4.0, 2.4), [BLOCK[k].seconds for k in KINDS])
    options = [block] * 4 + [[replace(HEAD[0], times=(0.8, 1.0, 0.7))]]
    layers = LayerOptions(options, bounds, placement_of(kind, stages, chunks), [100] * 5, budget)
    lengths = shortest_of_all(layers, 6, 1.5)
    choice = layers.choose_with_program(6, 1.5)
    assert max(choice.held) <= budget
    assert choice.makespan == pytest.approx(lengths[tuple(choice.policies)])
    assert choice.makespan <= 1.01 * min(lengths.values())
    assert choice.makespan < 0.99 * min(length for policies, length in lengths.items() if len(set(policies[:4])) == 1)


def random_layers(seed: int) -> tuple[LayerOptions, int, float]:
    """Four blocks and a head on two stages, of random times and budget; also micro-batches, and the most in flight."""
    rng = random.Random(seed)
    stages, chunks, kind = PLACES[rng.choice(list(PLACES))]
    times = rng.uniform(2.5, 4.0), rng.uniform(3.0, 5.0), rng.uniform(1.5, 3.0)
    block = timed(times, [0.0, rng.uniform(0.2, 0.8), rng.uniform(2.5, 6.0)])
    options = [block] * 4 + [[replace(HEAD[0], times=(rng.uniform(0.5, 4.0),) * 3)]]
    bounds = [0, 2, 5] if chunks == 1 else [0, 1, 2, 3, 5]
    layers = LayerOptions(options, bounds, placement_of(kind, stages, chunks), [100] * 5, rng.randint(1500, 3200))
    return layers, rng.choice([2, 4, 8]), rng.choice([1.0, 1.5, 2.0])


def test_random_layers_are_near_the_shortest_of_all_assignments():
    """On average within 0.5% of the best of 81, each with the program that a plan has."""
    over = []
    for seed in range(10):
        layers, num_micro_batches, most = random_layers(seed)
        lengths = shortest_of_all(layers, num_micro_batches, most)
        choice = layers.choose_with_program(num_micro_batches, most)
        assert max(choice.held) <= layers.budget
        assert choice.makespan == pytest.approx(lengths[tuple(choice.policies)])
        over.append(choice.makespan / min(lengths.values()))
    assert sum(over) / len(over) <= 1.005
    assert max(over) <= 1.05


@pytest.mark.parametrize(
    ("stages", "budget", "length"),
    [(4, 5506, 1798.4), (4, 11535, 1560.7), (4, 20578, 1278.6), (8, 15541, 3434.3)],
)
def test_no_longer_than_the_plans_of_all_candidates(stages: int, budget: int, length: float):
    """8 blocks a stage. Lengths are those of the shortest plan of more candidates."""
    block = [replace(option, times=(3.2, 4.0 + option.seconds, 2.4)) for option in BLOCK]
    number, chunks = 8 * stages, 2 * stages
    options = [block] * number + [[replace(HEAD[0], times=(0.8, 1.0, 0.7))]]
    bounds = [*(4 * k for k in range(chunks)), number + 1]
    layers = LayerOptions(options, bounds, placement_of("v", stages, 2), [100] * (number + 1), budget)
    choice = layers.choose_with_program(4 * stages, 1.5)
    assert max(choice.held) <= budget
    assert choice.makespan <= 1.005 * length


def test_backwards_are_whole_where_deferred_weight_gradients_would_not_fit():
    """Recomputed blocks hold less than what they defer. Of one micro-batch the first stage has room for the former alone."""
    block = timed((3.2, 4.0, 2.4), [BLOCK[k].seconds for k in KINDS])
    options = [block] * 4 + [[replace(HEAD[0], times=(0.8, 1.0, 0.7))]]
    budget = 2 * 100 + BLOCK[3].within + 4 * BLOCK[3].saved
    assert budget < 2 * 100 + BLOCK[3].within + 2 * BLOCK[3].deferred
    layers = LayerOptions(options, [0, 2, 4, 5], placement_of("loop", 3, 1), [100, 100, 100, 100, 0], budget)
    choice = layers.choose_with_program(4, 1.5)
    assert max(choice.held) <= budget
