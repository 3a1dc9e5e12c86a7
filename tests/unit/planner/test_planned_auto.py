"""Schedule "auto" in a plan: as good as the named schedules on the same chunks, within the devices' memory, and runnable."""

from __future__ import annotations

import pytest
from test_search import hosts, planner_of, small_model

from parallel3d.config.layout import Layout, parse_layout
from parallel3d.planner.cluster.file import load_cluster
from parallel3d.planner.predict.costs import StepPrediction
from parallel3d.planner.search.autos import is_quick, with_auto
from parallel3d.planner.search.search import evaluate
from parallel3d.schedule.instructions import COMPUTE_OPS, Program
from parallel3d.schedule.order import validate


def planned(text: str, memory: str | None = None) -> tuple[StepPrediction, StepPrediction]:
    """(as named, with "auto") of one layout of 4 GPUs in a row."""
    fixed = parse_layout(text)
    model = small_model(layers=16)
    planner = planner_of(model, load_cluster(hosts(1, memory)), 8, fixed=fixed)
    layout = next(found for k in range(len(planner.space)) if (found := planner.space.layout(k)).recompute == 0)
    named = evaluate(planner.predictor, layout)
    auto = with_auto(planner.predictor, layout)
    assert auto is not None
    return named, auto


def compute_of(program: Program) -> Program:
    return program.with_instructions([[i for i in rank if i.op in COMPUTE_OPS] for rank in program.instructions])


@pytest.mark.parametrize(
    "text", ["pp4,zb-h1,m8,mb1", "pp4,zbv,v,chunks2,m8,mb1", "pp4,zb-looped,chunks4,m8,mb1", "pp4,1f1b,m8,mb1"]
)
def test_it_is_as_short_as_the_named_schedule_on_the_same_chunks(text: str) -> None:
    named, auto = planned(text)
    assert auto.layout == named.layout.model_copy(update={"schedule": "auto"})
    assert parse_layout(auto.layout.text).schedule == "auto"
    assert auto.program.placement == named.program.placement
    validate(compute_of(auto.program))
    # The rest is what the plan doesn't know of: which transfers share a link, and the collectives of a step.
    assert auto.makespan <= 1.01 * named.makespan
    assert auto.fits


def test_it_keeps_within_the_devices_memory() -> None:
    _, free = planned("pp4,zbv,v,chunks2,m8,mb1")
    least = min(stage.reserved for stage in planned("pp4,1f1b,m8,mb1")[0].memory)
    most = max(stage.reserved for stage in free.memory)
    _, bound = planned("pp4,zbv,v,chunks2,m8,mb1", f"{(2 * least + most) // 3} B")
    assert max(stage.reserved for stage in bound.memory) < most
    assert bound.makespan > free.makespan


def test_a_single_stage_has_none() -> None:
    planner = planner_of(small_model(), load_cluster(hosts(1)), 8, fixed=parse_layout("dp4"))
    assert with_auto(planner.predictor, planner.space.layout(0)) is None


def test_short_pipelines_are_quick() -> None:
    assert is_quick(Layout(stages=4, chunks=2, micro_batches=16))
    assert not is_quick(Layout(stages=8, chunks=4, micro_batches=64))


def test_who_asks_for_it_gets_nothing_else() -> None:
    cluster = load_cluster(hosts(1))
    asked = planner_of(small_model(), cluster, 16, fixed=parse_layout("pp4,auto")).answer()
    assert {prediction.schedule for prediction in asked.best} == {"auto"}
    pipeline = asked.config["pipeline"]
    assert (pipeline["stages"], pipeline["schedule"]) == (4, "auto")
    assert asked.best[0].layout.startswith("pp4,auto")


@pytest.mark.parametrize("every", [False, True])
def test_the_best_pipeline_is_planned_with_it_where_that_is_quick_or_asked_for(
    every: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parallel3d.planner.search.autos._QUICK", 0 if every else 160)
    fixed = parse_layout("pp4,m16")
    answers = [
        planner_of(small_model(), load_cluster(hosts(1)), 16, fixed=fixed, every_auto=asked).answer()
        for asked in (False, True)
    ]
    has_auto = ["auto" in {prediction.schedule for prediction in answer.best} for answer in answers]
    assert has_auto == [not every, True]


def test_it_weighs_recomputation_against_chunks_as_trying_all_would() -> None:
    fixed = parse_layout("pp4,auto,m4,mb1,zero0")
    planner = planner_of(small_model(seq=2048, layers=8), load_cluster(hosts(1, "1.65 GB")), 4, fixed=fixed)
    shortest = planner.answer().best[0].seconds
    layouts = map(planner.space.layout, range(len(planner.space)))
    every = [auto for layout in layouts if (auto := with_auto(planner.predictor, layout)) is not None]
    assert shortest == min(auto.seconds for auto in every if auto.fits)
