"""Layouts with ZeRO-3 in the search: against a prediction of every layout, every limit of live weights, and whole programs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
from planner_clusters import with_quick_hosts
from test_search import hosts, of_blocks, small_model, traced

import parallel3d
from parallel3d.config import load
from parallel3d.config.layout import Layout, parse_layout
from parallel3d.engine.fp8 import mark_gathers
from parallel3d.pipe import PipelineModule
from parallel3d.planner.cluster.file import load_cluster
from parallel3d.planner.predict import program
from parallel3d.planner.predict.costs import StepPrediction
from parallel3d.planner.report.timeline import columns
from parallel3d.planner.search.plan import Planner
from parallel3d.planner.search.search import BranchAndBound, evaluate
from parallel3d.schedule import draw
from parallel3d.schedule.instructions import Op
from parallel3d.schedule.timing import Timeline
from parallel3d.zero.memory import unit_sizes


def planner_of(
    words: str, batch: int, memory: str | None = None, bandwidth: str = "400 GB/s", **config: Any
) -> Planner:
    """Four GPUs of a host that calls operators in no time, and a model of 24 blocks with short samples."""
    model, cluster = small_model(seq=64, layers=24), hosts(1, memory)
    cluster["hosts"][0]["nvlink"] = {"bandwidth": bandwidth}
    like = traced(model) if config.keys() <= {"zero_optimization"} else None
    model = replace(model, config={**model.config, **config})
    return Planner(model, with_quick_hosts(load_cluster(cluster)), batch, fixed=parse_layout(words), like=like)


def every(planner: Planner) -> list[StepPrediction]:
    space = of_blocks(planner)
    return [evaluate(planner.predictor, space.layout(k)) for k in range(len(space))]


# Replicas alone of 24 blocks: ZeRO-2 needs 1.797 GB, with gradients that travel as bf16 and two samples 1.921 GB. Gathers then
# take longer than reductions, and a breadth-first program has fewer of them.
HALF_GRADIENTS = {"communication_data_type": "bf16"}
CASES = [
    ("dp4", 16, "1.746 GB", "10 GB/s", {}, "1f1b"),
    ("dp4,mb2,ckpt1", 32, "1.9 GB", "5 GB/s", HALF_GRADIENTS, "gpipe"),
]


@pytest.mark.parametrize(("words", "batch", "memory", "bandwidth", "config", "schedule"), CASES)
def test_zero3_is_offered_where_it_alone_fits_and_is_the_shortest_of_all(
    words: str, batch: int, memory: str, bandwidth: str, config: dict[str, Any], schedule: str
) -> None:
    planner = planner_of(words, batch, memory, bandwidth, **config)
    found = BranchAndBound(planner.predictor, of_blocks(planner)).run()
    fitting = [step for step in every(planner) if step.fits]
    assert {step.layout.zero for step in fitting} == {3}
    # Policies by layer count as 0.2% longer than they are.
    assert found[0].rank[1] == pytest.approx(min(step.rank[1] for step in fitting), rel=1e-9)
    assert found[0].layout.schedule == schedule
    result = planner.answer()
    winner, given = result.best[0], load(result.config)
    assert winner.seconds <= found[0].seconds
    assert all(stage.reserved <= stage.capacity for stage in winner.memory)
    assert given.zero_optimization.stage == 3
    assert given.zero_optimization.stage3_max_live_parameters == found[0].limits.live
    assert (given.pipeline.schedule, given.pipeline.num_chunks) == (winner.schedule, winner.chunks)
    assert list(given.pipeline.partition) == list(winner.bounds)


@pytest.mark.parametrize("memory", ["1.73 GB", None])
def test_live_weights_are_those_of_the_shortest_step_that_fits(memory: str | None) -> None:
    words, bandwidth = "dp4,zero3,1f1b,m16,mb1,ckpt1", "10 GB/s"

    def predicted(**limits: Any) -> StepPrediction:
        planner = planner_of(words, 64, memory, bandwidth, zero_optimization=limits)
        return planner.predictor.predict(planner.space.layout(0))

    chosen = predicted()
    assert chosen.limits is not None
    block = max(size for own in chosen.split.sharded.elements for size in own.values())
    tried = [predicted(stage3_max_live_parameters=count * block) for count in (2, 3, 4, 6, 8, 12, 16, 20, 24, 30)]
    fitting = [step.seconds for step in tried if step.fits]
    assert chosen.fits
    assert fitting
    assert chosen.seconds <= min(fitting) * 1.005


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_weights_of_fp8_linears_are_gathered_as_the_engine_gathers_them(
    recipe: Literal["tensorwise", "rowwise"],
) -> None:
    planner = planner_of("dp4,zero3,1f1b,m2,mb1", 8, fp8={"enabled": True, "recipe": recipe})
    step = planner.predictor.predict(planner.space.layout(0))
    assert step.split.sharded is not None
    planned = step.split.sharded.sizes[0]
    parallel3d.init_distributed()
    module = PipelineModule(planner.model.layers, num_stages=1)
    mark_gathers(module, planner.profile.config)
    assert planned == unit_sizes(module.parameter_infos(), [], step.split.policy, 4)
    blocks = [size for size in planned.values() if size.numel != 1024 * 512]  # without the embedding and the head
    per_element = [size.nbytes / size.numel for size in blocks]
    # All but the norms of a block: 1,024 elements of 2.4 million.
    assert per_element == pytest.approx([1.0 if recipe == "tensorwise" else 2.0] * len(blocks), rel=1e-3)


def exactly_and_not(
    monkeypatch: pytest.MonkeyPatch, words: str, config: dict[str, Any]
) -> tuple[StepPrediction, StepPrediction]:
    layout, found = parse_layout(words).complete(), []
    for most in (10**9, 1):
        monkeypatch.setattr(program, "_MOST_STEPS", most)
        planner = planner_of("dp4", 64, None, "20 GB/s", zero_optimization=config)
        found.append(planner.predictor.predict(Layout(**dict(layout))))
    return found[0], found[1]


@pytest.mark.parametrize("ahead", [0, "auto"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zbv"])
@pytest.mark.parametrize("live", [5_000_000, 30_000_000])
def test_long_programs_gather_as_long_as_whole_ones(
    monkeypatch: pytest.MonkeyPatch, schedule: str, live: int, ahead: int | str
) -> None:
    shape = "dp4" if schedule == "1f1b" and ahead == 0 else "pp2,dp2"
    config = {"stage3_max_live_parameters": live, "stage3_prefetch_bucket_size": ahead}
    whole, some = exactly_and_not(monkeypatch, f"{shape},zero3,{schedule},m48,mb1", config)
    assert some.program.num_micro_batches < whole.program.num_micro_batches == 48
    assert some.makespan == pytest.approx(whole.makespan, rel=0.02)
    assert some.exposed == pytest.approx(whole.exposed, rel=0.05, abs=0.005 * whole.makespan)
    assert [m.allocated for m in some.memory] == [m.allocated for m in whole.memory]


def test_drawings_show_gathers() -> None:
    planner = planner_of("dp4,zero3,1f1b,m2,mb1,ckpt1", 8, None, "10 GB/s")
    result = planner.answer()
    timeline = Timeline.of(result.timeline, 1)
    gathers = [
        span
        for span in timeline.spans
        if span.instruction.op is Op.GATHER_PARAMS and span.instruction.bucket is not None
    ]
    assert len(gathers) > 24
    ends = 0.0
    for span in gathers:
        assert span.start >= ends
        assert span.end > span.start
        ends = span.end
    assert draw.MARK_COLOURS["gather"] in draw.svg({"plan": timeline}, {"plan": "s"})
    assert "gather" in {op["name"] for op in columns(timeline)["ops"]}
