"""Pipelines of half blocks in a plan, against a prediction of every layout; and how they are named, measured and refused."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from planner_clusters import with_quick_hosts
from records import timing
from rich.console import Console
from test_search import hosts, small_model

from parallel3d.cli.plan import show
from parallel3d.config.layout import Layout, parse_layout
from parallel3d.costs.profilers import LayerCost
from parallel3d.errors import ConfigError
from parallel3d.monitor.run_record import ModelFingerprint, RankRecord, RunRecord
from parallel3d.parity.settings import Settings, check_config
from parallel3d.planner.calibrate.calibration import Calibration
from parallel3d.planner.calibrate.runs import RunPredictor
from parallel3d.planner.cluster.file import load_cluster
from parallel3d.planner.report import html_page
from parallel3d.planner.search.model import load_model
from parallel3d.planner.search.plan import Planner
from parallel3d.planner.search.result import PlanResult
from parallel3d.planner.search.search import evaluate
from parallel3d.specs import layer_name


def planner(name: str, words: str, batch: int, cluster: str = "4xH200", seq: int = 1024) -> Planner:
    """seq: tokens of a sample. Hosts take no time: what waits for them is as long in halves."""
    quick = with_quick_hosts(load_cluster(cluster))
    return Planner(load_model(name, seq=seq), quick, batch, fixed=parse_layout(words))


@pytest.mark.parametrize(
    ("name", "words", "batch", "units"),
    [("7b", "pp4,mb2", 16, "half"), ("gpt2-xl", "pp4,m8", 8, "half"), ("llama3-8b", "pp2,tp2,sp,m8", 8, None)],
)
def test_the_plan_is_the_shortest_of_all_layouts_of_blocks_and_of_halves(
    name: str, words: str, batch: int, units: str | None
) -> None:
    asked = planner(name, words, batch)
    layouts = map(asked.space.layout, range(len(asked.space)))
    every = [evaluate(asked.predictor, layout) for layout in layouts]
    seconds = {f.layout.text: f.seconds for f in every if f.fits}
    assert {f.layout.units for f in every} == {None, "half"}
    result = asked.answer()
    winner = next(p for p in result.best if p.schedule != "auto")
    assert winner.units == units
    # The winner's layers are split with more care than all others'.
    assert winner.seconds <= min(seconds.values()) * (1 + 1e-9)
    if units == "half":
        blocks = min(value for text, value in seconds.items() if "half" not in text)
        assert winner.seconds < 0.99 * blocks


def test_halves_are_found_though_their_whole_blocks_were_too_long_to_be_predicted() -> None:
    """Four chunks a stage of interleaved 1F1B, for which blocks are too coarse: of these ZBV's two chunks are shorter."""
    asked = planner("gpt3-22b", "pp4,tp2,sp,mb2,ckpt0", 32, "8xA100", 2048)
    result = asked.answer()
    layouts = map(asked.space.layout, range(len(asked.space)))
    every = [evaluate(asked.predictor, layout) for layout in layouts]
    best = min((f for f in every if f.fits), key=lambda f: f.seconds)
    assert result.best[0].units == best.layout.units == "half"
    assert result.best[0].seconds <= best.seconds * (1 + 1e-9)


@pytest.fixture(scope="module")
def result() -> PlanResult:
    return planner("7b", "pp4,mb2,zb-h1", 16).answer()


def test_a_plan_of_halves_says_so_wherever_it_is_read(result: PlanResult) -> None:
    winner = result.best[0]
    assert "half" in winner.layout.split(",")
    assert parse_layout(winner.layout).units == winner.units == "half"
    model = load_model("7b")
    assert result.layers == tuple(map(layer_name, model.layers))
    assert result.halves == tuple(map(layer_name, model.in_halves().layers))
    pipeline: Any = result.config["pipeline"]
    assert pipeline["units"] == "half"
    assert pipeline["partition"] == list(winner.bounds)
    assert winner.bounds[-1] == len(result.halves) == 67
    printed = io.StringIO()
    show(result, Console(file=printed, width=200))
    assert "half: config.json counts attention and feed-forward as layers" in printed.getvalue()
    page = html_page(result)
    assert "FeedForward" in page
    assert "layers are half blocks" in page


def test_stages_of_halves_end_inside_of_blocks_where_that_is_shorter(result: PlanResult) -> None:
    ends = {result.halves[bound] for bound in result.best[0].bounds[1:-1]}
    assert "FeedForward" in ends, "all stages begin with an attention: whole blocks would do"


def test_halves_can_be_asked_for_in_words() -> None:
    told = planner("7b", "half,pp2", 8).answer()
    assert {(p.units, p.stages) for p in told.best} == {("half", 2)}


def test_halves_are_refused_where_they_are_not_known() -> None:
    model = replace(small_model(), halves=None)
    with pytest.raises(ConfigError, match="leave half out"):
        Planner(model, load_cluster(hosts(1)), 8, fixed=parse_layout("pp2,half"))
    with pytest.raises(ConfigError, match="leave half out"):
        check_config(parse_layout("pp2,half"), {}, Settings())


@pytest.mark.parametrize(
    "section", [{"pipeline": {"checkpointable_layers": ["Block"]}}, {"compile": {"layers": ["Block"]}}]
)
def test_layers_chosen_by_name_stay_as_they_are_given(section: dict[str, object]) -> None:
    model = small_model()
    chosen = replace(model, config={**model.config, **section})
    assert Planner(model, load_cluster(hosts(1)), 8).space.halves.any()
    assert not Planner(chosen, load_cluster(hosts(1)), 8).space.halves.any()


def test_a_halfs_measured_seconds_are_longer_as_its_blocks_are() -> None:
    asked = planner("gpt2-xl", "pp4,m8", 8)
    expected = asked.predictor.expected
    slower = 1.0 + np.arange(len(expected.total)) / 10
    works = expected.compute * slower
    seconds = [LayerCost(*each) for each in works.T.tolist()]
    measured = replace(asked, measured=seconds).predictor
    layout = asked.space.where(asked.space.halves > 0).layout(0)
    own, plain = (each.stage_times(layout, each.links(layout))[0].compute[0] for each in (measured, asked.predictor))
    blocks = [k for k, name in enumerate(asked.predictor.profile().names) for _ in range(1 + (name == "Block"))]
    assert len(blocks) == len(own)
    np.testing.assert_allclose(own / plain, slower[blocks])


def test_runs_of_half_blocks_are_predicted_by_half_blocks() -> None:
    model = load_model("gpt2", seq=64)
    names = tuple(map(layer_name, model.in_halves().layers))
    cut = len(names) // 2
    layout = Layout(stages=2, micro_batches=4, micro_batch=2)
    record = RunRecord(
        **dict(layout),
        layout=layout.text,
        bounds=(0, cut, len(names)),
        seq=64,
        program=None,
        model=ModelFingerprint(layers=names, parameters=(1,) * len(names)),
        backend="nccl",
        versions={},
        config={**model.config, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
        instructions={},
        step=timing(1.0),
        optimizer=timing(1e-5),
        breakdown={},
        bubble=0.2,
        ranks=tuple(RankRecord(rank=r, stage=r, device="NVIDIA H200", parts={}) for r in range(2)),
    )
    cluster = load_cluster("2xH200")
    prediction, _ = RunPredictor(model, cluster).predict(record, Calibration())
    asked = Planner(model, cluster, 8, fixed=parse_layout("pp2,half,1f1b,mb2"))
    layout = asked.space.layout(0)
    wanted = asked.predictor.predict(layout, bounds=record.bounds)
    assert prediction.seconds == pytest.approx(wanted.seconds, rel=1e-9)
    with pytest.raises(ConfigError, match="give the run's model"):
        RunPredictor(replace(model, halves=None), cluster).predict(record, Calibration())
