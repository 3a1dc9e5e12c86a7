"""Policies by layer in a plan: no others that fit make a shorter step, by trying all, and the configuration has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations_with_replacement, product

import numpy as np
import pytest
from planner_clusters import with_quick_hosts
from test_search import hosts, planner_of, small_model

from parallel3d.config import RecomputationPolicy, load
from parallel3d.config.layout import Layout, parse_layout
from parallel3d.planner.cluster.file import load_cluster
from parallel3d.planner.predict.chunks import Chunks
from parallel3d.planner.predict.predict import Predictor
from parallel3d.planner.search.plan import Planner, profile_of
from parallel3d.schedule.builders import placement_of

BLOCKS, _LAYERS = range(1, 7), 9  # the embedding before them, norm and head after them
EVERY: tuple[RecomputationPolicy, ...] = ("none", "cheap", "attention", "full")


def planner(words: str, memory: str | None = None) -> Planner:
    cluster = with_quick_hosts(load_cluster(hosts(1, memory)))
    return planner_of(small_model(2048), cluster, 32, fixed=parse_layout(words))


def assignments(stages: list[list[int]]) -> Iterator[tuple[RecomputationPolicy, ...]]:
    """Every number of each policy among the blocks of each stage."""
    for chosen in product(*(combinations_with_replacement(EVERY, len(set(own) & set(BLOCKS))) for own in stages)):
        policies: list[RecomputationPolicy] = ["none"] * _LAYERS
        for own, some in zip(stages, chosen, strict=True):
            for k, policy in zip(sorted(set(own) & set(BLOCKS)), some, strict=True):
                policies[k] = policy
        yield tuple(policies)


@pytest.mark.parametrize("words", ["pp2,zero1,1f1b,m4,mb4", "pp2,zero1,interleaved,m4,mb4"])
def test_no_policies_that_fit_are_faster_by_a_hundredth(words: str) -> None:
    free = planner(words).predictor
    layout = parse_layout(words).complete(replicas=2, policy="auto", recompute=1)
    bounds = (0, 4, _LAYERS) if layout.chunks == 1 else (0, 2, 4, 6, _LAYERS)
    placement = placement_of("loop", 2, layout.chunks)
    stages = [Chunks(layout, placement, bounds).layers_on(stage) for stage in range(2)]

    def predicted(predictor: Predictor, own: Layout) -> tuple[float, int]:
        step = predictor._step(predictor.split(own, bounds=bounds), None, None)
        return step.seconds, max(stage.reserved for stage in step.memory)

    every = [predicted(free, layout.model_copy(update={"policy": own})) for own in assignments(stages)]
    seconds, needed = np.array(every).T
    least, none = needed.min(), needed[seconds.argmin()]
    mixed = 0
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        memory = int(least + share * (none - least))
        step = planner(words, f"{memory} B").predictor.predict(layout, bounds=bounds)
        assert step.fits
        assert step.seconds <= 1.01 * seconds[needed <= memory].min()
        mixed += len(set(step.layout.policy or ()) - {"none"}) > 1
    assert mixed


def test_the_configuration_has_the_policies() -> None:
    words = "pp2,zero1,1f1b,m4,mb4"
    steps = {word: planner(f"{words},{word}").answer().best[0] for word in ("ckpt0", "cheap", "ckpt1")}
    memory = (steps["cheap"].peak + steps["ckpt1"].peak) // 2
    made = planner(words, f"{memory} B")
    result = made.answer()
    best = result.best[0]
    assert "ckpt-auto" in best.layout
    assert steps["ckpt0"].seconds < best.seconds < steps["ckpt1"].seconds
    policies = load(result.config).activation_checkpointing.policy
    assert isinstance(best.policy, tuple)
    assert [policies.get(str(k), policies["default"]) for k in range(len(best.policy))] == list(best.policy)
    # A run with this configuration is predicted to take the same step and memory.
    layout = Layout(**{name: getattr(best, name) for name in Layout.model_fields} | {"policy": None, "units": None})
    model = replace(made.model, layers=made.model.halves if best.units else made.model.layers)
    profile = profile_of(model, made.cluster, load(result.config))
    again = Predictor(model, profile, made.network).predict(layout, bounds=best.bounds)
    assert (again.seconds, again.memory) == (pytest.approx(best.seconds), best.memory)


@pytest.mark.parametrize("memory", ["1.4 GB", "1.6 GB"])
def test_a_layout_that_gets_policies_by_layer_is_listed_once(memory: str) -> None:
    best = [prediction.layout for prediction in planner("pp4", memory).answer().best]
    assert best[0].endswith("ckpt-auto")
    assert len(set(best)) == len(best)
