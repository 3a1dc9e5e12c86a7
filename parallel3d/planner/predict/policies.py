"""Recomputation by layer: the choice that the engine makes too (pipe/policies.py), by the memory that the planner predicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from parallel3d.config import RecomputationPolicy
from parallel3d.config.layout import Layout
from parallel3d.pipe.policies import LayerOptions, Option, ProgramBytes, options_of
from parallel3d.planner.predict.chunks import Chunks
from parallel3d.planner.predict.profile import ModelProfile
from parallel3d.planner.search.result import StageMemory, fullness_of
from parallel3d.schedule.instructions import Op, Program

# Choices that are made, each corrected by how far the previous one's memory exceeded the sum over its layers.
_ROUNDS = 4


def choose_policies(
    profile: ModelProfile,
    split: Chunks,
    program: Program,
    samples: float,
    memory_of: Callable[[Layout], Sequence[StageMemory]],
) -> Layout:
    """Return the layout with a policy for each layer: the cheapest with which each stage fits, or what comes closest.

    - samples: micro-batches in flight over those in the program.
    - memory_of: predicts the memory of each stage of the layout with such policies.
    """
    layout, bounds, placement = split.layout, split.bounds, split.placement
    options = _options(profile, layout, any(i.op is Op.BACKWARD_WEIGHT for own in program.instructions for i in own))
    first = [next(iter(split.layers_on(stage)), None) for stage in range(layout.stages)]
    most = ProgramBytes(program)

    def in_flight(stage: int, saved: Mapping[int, int], deferred: Mapping[int, int]) -> int:
        return round(samples * most(stage, saved, deferred))

    state = [0] * len(options)
    choice = LayerOptions([own[:1] for own in options], bounds, placement, state, 0.0).choose(in_flight)
    found: dict[tuple[RecomputationPolicy, ...], tuple[float, float]] = {}
    while len(found) < _ROUNDS and tuple(choice.policies) not in found:
        chosen = tuple(choice.policies)
        memory = memory_of(layout.model_copy(update={"policy": chosen}))
        seconds = sum(o.seconds for own, p in zip(options, chosen, strict=True) for o in own if o.policy == p)
        found[chosen] = max(1.0, fullness_of(memory)), seconds
        for k, stage, nbytes in zip(first, memory, choice.held, strict=True):
            if k is not None:  # the budget is 0: state is so far below 0 that layers' bytes may fill it
                needed = stage.reserved - stage.allocated + stage.phases["backward"] - stage.capacity
                state[k] += needed - int(nbytes)
        choice = LayerOptions(options, bounds, placement, state, 0.0).choose(in_flight)
    return layout.model_copy(update={"policy": min(found, key=found.__getitem__)})


def _options(profile: ModelProfile, layout: Layout, splits: bool) -> list[list[Option]]:
    """Return each layer under each policy that it may have; equal layers share theirs."""
    traces, known = profile.by_policy(layout), dict[tuple[int, ...], list[Option]]()
    keys = [tuple(id(profiles[k]) for profiles in traces.values()) for k in range(len(profile.specs))]
    for k, key in enumerate(keys):
        if key not in known:
            known[key] = options_of(traces, k, splits)
    return [known[key][:1] if profile.keeps(k) else known[key] for k, key in enumerate(keys)]
