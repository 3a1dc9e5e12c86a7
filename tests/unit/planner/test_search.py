"""The search against a prediction of every layout, and its answers: the same each time, with remedies where there is none."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from planner_clusters import with_quick_hosts
from torch import nn

from parallel3d.config import load
from parallel3d.config.layout import Layout, PartialLayout, parse_layout
from parallel3d.errors import ConfigError
from parallel3d.models import DecoderConfig, decoder
from parallel3d.planner.calibrate.calibration import Calibration, Factor
from parallel3d.planner.cluster.cluster import Cluster
from parallel3d.planner.cluster.file import load_cluster
from parallel3d.planner.predict.costs import StepPrediction
from parallel3d.planner.predict.predict import Predictor
from parallel3d.planner.search.bounds import NearBounds
from parallel3d.planner.search.model import DEFAULTS, MODELS, PlannedModel, load_model
from parallel3d.planner.search.plan import Planner, possible_tensor_ranks
from parallel3d.planner.search.result import PlanResult, Prediction
from parallel3d.planner.search.search import BranchAndBound, evaluate, out_of_memory
from parallel3d.planner.search.space import VARIANTS, Space, enumerate_space
from parallel3d.schedule.builders import build
from parallel3d.schedule.memory import ChunkBytes, bytes_in_flight
from parallel3d.specs import LayerSpec

GPU = {"device": "H200", "count": 4}


def hosts(count: int, memory: str | None = None, **more: Any) -> dict[str, Any]:
    """Hosts of four GPUs with a network card each."""
    gpu = {**GPU, "memory": memory} if memory else GPU
    host = {"gpus": [gpu], "nvlink": {"bandwidth": "400 GB/s"}, "nics": [{"bandwidth": "50 GB/s", "count": 4}]}
    listed = [{"name": f"host{k}", "switch": "spine", **host, **more} for k in range(count)]
    return {"name": "small", "hosts": listed, "switches": [{"name": "spine"}]}


@cache
def small_model(seq: int = 256, vocab: int = 1024, layers: int = 6, tied: bool = False) -> PlannedModel:
    import torch

    config = DecoderConfig(
        vocab_size=vocab,
        hidden_size=512,
        ffn_size=1024,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        max_positions=seq,
        tied=tied,
    )

    def sample(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.zeros(count, seq, dtype=torch.int64)
        return tokens, tokens

    from parallel3d.models import causal_lm_loss

    halves = decoder(config, units="half")
    return PlannedModel("small", decoder(config), causal_lm_loss, sample, seq, DEFAULTS, halves)


_TRACED: dict[int, Planner] = {}  # by the id of the model, which the planner keeps


def traced(model: PlannedModel) -> Planner:
    """A planner of the model, whose traces others use again."""
    if id(model) not in _TRACED:
        _TRACED[id(model)] = Planner(model, load_cluster(hosts(1)), 4)
    return _TRACED[id(model)]


def planner_of(model: PlannedModel, cluster: Cluster, batch: int, **more: Any) -> Planner:
    return Planner(model, cluster, batch, **more, like=traced(model))


def of_blocks(planner: Planner) -> Space:
    """The planner's space without layouts of half blocks."""
    return planner.space.where(planner.space.halves == 0)


def every_prediction(planner: Planner) -> dict[str, tuple[float, bool]]:
    """(seconds, fits) of each layout of whole blocks."""
    predictor, space, found = planner.predictor, of_blocks(planner), {}
    for k in range(len(space)):
        one = evaluate(predictor, space.layout(k))
        found[one.layout.text] = (one.seconds, one.fits)
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Without --full only where memory binds: more is ruled out by bounds then.

    With 1.38 GB "none" fits only with an uneven split, which takes longer than policies by layer.
    """
    if metafunc.function is test_the_search_finds_the_shortest_of_all_layouts_that_fit:
        cases = [("1.38 GB", 6), *([("1.4 GB", 8), (None, 4)] if metafunc.config.getoption("full") else [])]
        metafunc.parametrize(("memory", "batch"), cases)


def test_the_search_finds_the_shortest_of_all_layouts_that_fit(memory: str | None, batch: int) -> None:
    planner = planner_of(small_model(), load_cluster(hosts(1, memory)), batch)
    search = BranchAndBound(planner.predictor, of_blocks(planner))
    found = search.run()
    everything = every_prediction(planner)
    fitting = [seconds for seconds, fits in everything.values() if fits]
    assert found[0].seconds == pytest.approx(min(fitting), rel=1e-9)
    assert len(search.candidates) < len(everything) / 3
    if memory is not None:
        assert 0 < len(fitting) < len(everything), "memory doesn't bind: the case is too easy"


def test_what_bounds_rule_out_is_not_the_best() -> None:
    """Few micro-batches for many stages, so that a micro-batch's way is longer than a stage's work."""
    planner = planner_of(small_model(seq=2048, layers=14), load_cluster(hosts(4)), 8)
    searches = [BranchAndBound(planner.predictor, of_blocks(planner), num_best=2) for _ in range(2)]
    searches[0].bounds.seconds *= 0.5
    every, few = (search.run()[0].layout.text for search in searches)
    assert few == every
    assert len(searches[1].candidates) < len(searches[0].candidates)


def test_layers_are_split_within_the_devices_memory() -> None:
    """The vocabulary makes one end heavy in bytes but not in time."""

    def found(memory: str | None) -> StepPrediction:
        model = small_model(vocab=40_000)
        planner = planner_of(model, load_cluster(hosts(1, memory)), 16, fixed=parse_layout("pp4,1f1b,m16,mb1"))
        layout = next(found for k in range(len(planner.space)) if (found := planner.space.layout(k)).recompute == 0)
        return evaluate(planner.predictor, layout)

    free = found(None)
    *_, second, most = sorted(stage.reserved for stage in free.memory)
    assert most > 1.02 * second
    bound = found(f"{(most + second) // 2} B")
    assert bound.fits
    assert bound.split.bounds != free.split.bounds
    assert bound.seconds >= free.seconds


def test_several_layers_are_recomputed_together_where_that_alone_fits() -> None:
    """Four stages of 24 blocks hold up to four micro-batches' inputs of each, or of every other one."""
    fixed = parse_layout("pp4,1f1b,m8,mb1")

    def planner(memory: str | None) -> Planner:
        made = planner_of(small_model(16_384, 64, 96), load_cluster(hosts(1, memory)), 8, fixed=fixed)
        made.space = made.space.where(made.space.policy == 0)
        return made

    free = planner(None)
    fullest = {
        layout.recompute: max(stage.reserved for stage in evaluate(free.predictor, layout).memory)
        for layout in map(free.space.layout, range(len(free.space)))
    }
    assert fullest[2] < 0.9 * fullest[1]
    assert free.answer().config["pipeline"]["activation_checkpoint_interval"] == 0
    told = planner(f"{(fullest[1] + fullest[2]) // 2} B").answer()
    assert told.config["pipeline"]["activation_checkpoint_interval"] > 1


@pytest.mark.parametrize(
    ("gpus", "tensor_ranks"), [(8, [1, 2, 4, 8]), (6, [1, 2, 3, 4, 6]), (9, [1, 2, 3, 4, 8, 9]), (1, [1])]
)
def test_tensor_ranks_are_powers_of_two_or_fill_a_host(gpus: int, tensor_ranks: list[int]) -> None:
    assert possible_tensor_ranks(gpus) == tensor_ranks


def test_what_is_refused_is_what_predictions_say_not_to_fit() -> None:
    """By bytes scaled from those of one sample, without a program."""
    planner = planner_of(small_model(), load_cluster(hosts(1, "1.55 GB")), 16)
    refused = 0
    space = of_blocks(planner)
    for k in range(0, len(space), 3):
        layout = space.layout(k)
        if out_of_memory(NearBounds(planner.predictor), layout, least=0.0) is not None:
            refused += 1
            assert not evaluate(planner.predictor, layout).fits
    assert refused


@pytest.mark.parametrize("ranks", [3, 8])
def test_some_stage_holds_and_defers_as_many_micro_batches_as_the_bounds_say(ranks: int) -> None:
    space = enumerate_space(ranks, 32, 32, 0, [1])
    space = space.where(~space.whole_backwards & (space.zero + space.recompute == 0) & (space.micro_batch > 1))
    assert len(space)
    for k in range(len(space)):
        layout = space.layout(k)
        program = build(layout.schedule, layout.stages, layout.micro_batches, layout.chunks, layout.placement)
        for bound, one in (
            (space.in_flight, ChunkBytes(saved=1, deferred=1)),
            (space.deferred, ChunkBytes(deferred=1)),
        ):
            chunks = dict.fromkeys(range(len(program.placement)), one)
            most = max(max(bytes_in_flight(instructions, chunks)) for instructions in program.instructions)
            assert min(bound[k], layout.micro_batches) * layout.chunks <= most, layout.text


@pytest.mark.parametrize("idle", [0.0, 0.6])
def test_no_prediction_is_below_its_bounds(idle: float) -> None:
    calibration = Calibration(idle=Factor(value=idle, low=idle, high=idle))
    planner = planner_of(small_model(), load_cluster(hosts(2)), 16, calibration=calibration)
    search = BranchAndBound(planner.predictor, of_blocks(planner))
    for k in range(0, len(search.space), 19):
        outlook = planner.predictor.predict(search.space.layout(k))
        assert outlook.seconds >= search.bounds.seconds[k]
        assert outlook.seconds >= 0.99 * NearBounds(planner.predictor).seconds(search.space.layout(k))
        memory = outlook.memory
        assert max(stage.allocated for stage in memory) >= search.bounds.bytes[k]


def test_a_tied_weight_is_held_once_where_one_stage_has_both_ends() -> None:
    planner = planner_of(small_model(seq=8, vocab=100_000, layers=1, tied=True), load_cluster(hosts(1)), 16)
    blocks = of_blocks(planner)
    one_stage = blocks.where(blocks.stages == 1)
    bounds = BranchAndBound(planner.predictor, one_stage).bounds
    for k in range(0, len(one_stage), 7):
        memory = planner.predictor.predict(one_stage.layout(k)).memory
        assert max(stage.allocated for stage in memory) >= bounds.bytes[k]


@pytest.mark.parametrize("layout", ["pp1,1f1b,m8,mb1", "pp4,1f1b,m8,mb1", "pp2,zb-h1,m8,mb1"])
def test_a_step_is_no_shorter_than_a_host_needs_to_call_it(layout: str) -> None:
    each = 1e-3
    cluster = load_cluster(
        {
            "name": "slow host",
            "devices": {"slow": {"base": "H200", "host_seconds": each}},
            "hosts": [{"gpus": [{"device": "slow", "count": 4}], "nvlink": {"bandwidth": "400 GB/s"}}],
        }
    )
    planner = planner_of(small_model(), cluster, 8)
    given = parse_layout(layout)
    outlook = planner.predictor.predict(given)
    splits = "zb" in layout
    operators = [
        layer.forward.operators
        + (layer.input_gradient.operators + layer.weight_gradient.operators if splits else layer.backward.operators)
        for layer in planner.predictor.layers(given)
    ]
    busiest = max(sum(operators[a:b]) for a, b in pairwise(outlook.split.bounds))
    assert outlook.makespan == pytest.approx(8 * each * busiest, rel=0.05)
    quick = planner_of(small_model(), with_quick_hosts(cluster), 8).predictor.predict(given)
    assert outlook.hosts == pytest.approx(outlook.makespan - quick.makespan, rel=1e-6)
    assert outlook.breakdown()["host"] == outlook.hosts > 0.9 * outlook.makespan


def test_what_idles_computes_faster_where_runs_say_so() -> None:
    def predicted(layout: str, idle: float) -> StepPrediction:
        calibration = Calibration(idle=Factor(value=idle, low=idle, high=idle))
        cluster = with_quick_hosts(load_cluster(hosts(1)))
        planner = planner_of(small_model(), cluster, 8, calibration=calibration)
        given = parse_layout(layout)
        return planner.predictor.predict(given)

    before, after = (predicted("pp4,1f1b,m8,mb1", idle) for idle in (0.0, 0.4))
    assert before.bubble > 0.25
    assert after.makespan == pytest.approx(before.makespan * (1 - 0.4 * before.bubble), rel=0.02)
    assert after.timeline.makespan == pytest.approx(after.makespan)
    busy, still_busy = (predicted("pp1,1f1b,m8,mb1", idle) for idle in (0.0, 0.4))
    assert still_busy.seconds == pytest.approx(busy.seconds, rel=1e-3)


def answer(cluster: Any, batch: int = 16, **more: Any) -> PlanResult:
    return planner_of(small_model(), load_cluster(cluster), batch, **more).answer()


def test_the_same_input_gives_the_same_bytes_in_any_order_of_hosts() -> None:
    cluster = hosts(2)
    slow = cluster["hosts"][1]
    cluster["hosts"][1] = {**slow, "nics": [{"bandwidth": "12 GB/s", "count": 4}]}
    one = answer(cluster, 8).model_dump_json()
    assert Planner(small_model(), load_cluster(cluster), 8).answer().model_dump_json() == one
    assert answer({**cluster, "hosts": cluster["hosts"][::-1]}, 8).model_dump_json() == one


def test_what_is_written_can_be_run() -> None:
    result = answer(hosts(2))
    winner = result.best[0]
    config = load(json.loads(json.dumps(result.config)))
    assert config.pipeline.stages == winner.stages
    assert list(config.pipeline.partition or ()) == list(winner.bounds)
    ranks = winner.stages * winner.replicas * winner.tensor_ranks
    assert ranks == result.num_devices == len({(place.host, place.gpu) for place in result.map})
    assert winner.micro_batch * winner.micro_batches * winner.replicas == result.global_batch
    assert winner.low < winner.seconds < winner.high
    assert sum(winner.breakdown.values()) == pytest.approx(winner.seconds)
    assert max(span.end for span in result.timeline) <= winner.seconds
    peaks = [peak for peak, _, _ in result.trade_off]
    times = [seconds for _, seconds, _ in result.trade_off]
    assert peaks == sorted(peaks)
    assert times == sorted(times, reverse=True)


def test_a_part_of_a_layout_that_the_user_has_decided_is_kept() -> None:
    result = answer(hosts(1), fixed=parse_layout("pp2,zb-h1"))
    assert {(p.stages, p.schedule) for p in result.best} == {(2, "zb-h1")}


def test_gpipe_is_planned_where_it_is_asked_for_and_holds_what_its_program_does() -> None:
    """No shorter than 1F1B, with all micro-batches on the first stage instead of two."""
    model = small_model(2048)

    def best(words: str) -> Prediction:
        return planner_of(model, load_cluster(hosts(1)), 64, fixed=parse_layout(words)).answer().best[0]

    gpipe, plain = best("pp2,dp2,zero0,gpipe,m32,mb1,ckpt0"), best("pp2,dp2,zero0,1f1b,m32,mb1,ckpt0")
    assert gpipe.schedule == "gpipe"
    # Where stages differ, one holds up all forwards, and another one all backwards.
    assert plain.seconds <= gpipe.seconds <= 1.15 * plain.seconds
    held = [prediction.memory[0].parts["activations"] for prediction in (gpipe, plain)]
    assert held[0] == pytest.approx(16 * held[1], rel=0.1)
    everything = planner_of(model, load_cluster(hosts(1)), 64).space
    assert set(everything.zero[everything.in_flight == float("inf")]) == {3}


@pytest.mark.parametrize("words", ["pp2,interleaved,chunks5", "pp2,mb24,m2", "pp2,ckpt3", "pp2,zb-looped,chunks5"])
def test_what_is_not_looked_at_otherwise_is_planned_where_it_is_asked_for(words: str) -> None:
    model, cluster, fixed = small_model(layers=12), load_cluster(hosts(1)), parse_layout(words)
    best = planner_of(model, cluster, 96, fixed=fixed).answer().best[0]
    assert set(words.split(",")) <= set(best.layout.split(","))
    usual = planner_of(model, cluster, 96).space
    assert not {(5, "interleaved"), (5, "zb-looped")} & {
        (VARIANTS[k].chunks, VARIANTS[k].schedule) for k in usual.variant
    }
    assert set(usual.micro_batch.tolist()) == {1, 2, 4, 8, 16, 32}
    assert 3 not in usual.recompute


def test_layers_of_half_blocks_are_recomputed_together_up_to_four_blocks() -> None:
    space = planner_of(small_model(layers=20), load_cluster(hosts(1)), 8).space
    assert [sorted(set(space.recompute[space.halves == k].tolist())) for k in (0, 1)] == [[0, 1, 2, 4], [0, 1, 2, 4, 8]]


def test_what_cannot_fit_is_told_with_what_would() -> None:
    result = answer(hosts(1, "400 MB"), 4)
    assert not result.best
    assert result.remedy is not None
    assert "GPUs" in result.remedy
    needed = int(result.remedy.split("GPUs with ")[1].split(" GiB")[0].split("than ")[-1])
    enough = answer(hosts(1, f"{needed} GiB"), 4)
    assert enough.best, "the memory that was asked for doesn't suffice"


def test_what_fits_but_roughly_is_not_called_fitting(monkeypatch: pytest.MonkeyPatch) -> None:
    predict = Predictor.predict

    def fuller(self: Predictor, *given: Any, **named: Any) -> StepPrediction:
        step = predict(self, *given, **named)
        return replace(step, memory=tuple(stage.model_copy(update={"reserved": 1 << 50}) for stage in step.memory))

    monkeypatch.setattr(Predictor, "predict", fuller)
    result = answer(hosts(1), 2, fixed=parse_layout("tp1,zero1"))  # else it would predict all layouts
    assert not result.best
    assert result.remedy is not None
    assert f"needs {1 << 20:.1f} GiB" in result.remedy


@pytest.mark.parametrize(
    ("count", "batch", "fixed", "message"),
    [
        (16, 1, None, "no layout of 64 GPUs makes up a global batch of 1"),
        (1, 0, None, "the samples of a step, 1 to "),
        (1, 16, "pp3", "leave some of it open"),
    ],
)
def test_impossible_questions_get_an_error(count: int, batch: int, fixed: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        answer(hosts(count), batch, fixed=PartialLayout() if fixed is None else parse_layout(fixed))


@pytest.mark.parametrize(("name", "moments"), [("Adafactor", 0), ("Muon", 1)])
def test_optimizers_of_whole_tensors_are_planned_without_shards(name: str, moments: int) -> None:
    """As the engine refuses shards for them; and with the state that they keep, not Adam's."""
    config = {"optimizer": {"type": name, "params": {"lr": 1e-3}}}
    size = 64
    layers = [LayerSpec(nn.Linear, size, size, bias=False) for _ in range(4)]

    def samples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(count, size), torch.zeros(count, size)

    model = PlannedModel("matrices", layers, squared, samples, 1, {**DEFAULTS, **config})
    planner = Planner(model, load_cluster("4xH100"), 16)
    assert not planner.space.zero.any()
    assert (planner.space.tensor_ranks == 1).all()
    (memory,) = planner.predictor.predict(Layout(replicas=4, micro_batches=4)).memory
    assert memory.parts.get("optimizer", 0) == moments * memory.parts["masters"]
    offloaded = {**config, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    sharded: list[dict[str, Any]] = [
        {"fixed": parse_layout("zero2")},
        {"fixed": parse_layout("tp2")},
        {"model": replace(model, config={**DEFAULTS, **offloaded})},
    ]
    for changes in sharded:
        with pytest.raises(ConfigError, match=f"{name} works on whole tensors"):
            replace(planner, **changes)


def test_muon_is_refused_for_parameters_that_are_no_matrices() -> None:
    """As the engine refuses it."""
    model = load_model("gpt2", 128, {"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}})
    with pytest.raises(ConfigError, match=r"'Muon' updates matrices alone, but there is a parameter of shape \[768\]"):
        Planner(model, load_cluster("4xH100"), 16)


def test_fp8_is_refused_for_devices_without_it() -> None:
    """As training refuses it; on CPUs it is emulated."""
    model = load_model("gpt2", 128, {"fp8": {"enabled": True}})
    for cluster in ("4xH100", "4xcpu"):
        assert Planner(model, load_cluster(cluster), 16).space
    with pytest.raises(ConfigError, match=r"fp8\.enabled: A100 can't compute in fp8"):
        Planner(model, load_cluster("4xA100"), 16)


class FrozenLinear(nn.Linear):
    def __init__(self, size: int) -> None:
        super().__init__(size, size, bias=False)
        self.requires_grad_(False)


def test_a_frozen_weight_has_no_gradient_that_counts_for_the_mfu() -> None:
    """As in the MFU that a training measures: of six products of two linears, the gradient of one weight isn't computed."""
    size, samples = 64, 4
    layers = [LayerSpec(nn.Linear, size, size, bias=False), LayerSpec(FrozenLinear, size)]
    model = PlannedModel("frozen", layers, squared, lambda n: (torch.zeros(n, size), torch.zeros(n, size)), 1, DEFAULTS)
    best = Planner(model, load_cluster("1xH100"), samples).answer().best[0]
    assert best.mfu * best.seconds * 989.4e12 == pytest.approx(5 * 2 * samples * size**2)


def squared(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs.float() - labels).pow(2).mean()


def test_unknown_models_are_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match="llama3-8b"):
        load_model("llama-8b")
    with pytest.raises(ConfigError, match="positions"):
        load_model("gpt2", seq=5000)


@pytest.mark.parametrize("name", list(MODELS))
def test_presets_have_the_sizes_of_their_names(name: str) -> None:
    """Parameters in billions, by the formula of arXiv:2104.04473 for GPT, counted by hand for the others."""
    wanted = {
        "gpt2": 0.124,
        "gpt2-xl": 1.56,
        "1b": 1.35,
        "3b": 2.70,
        "7b": 6.74,
        "llama2-13b": 13.0,
        "llama2-70b": 69.0,
        "llama3-8b": 8.03,
        "llama3-70b": 70.6,
        "llama3-405b": 405.9,
        "gpt3-22b": 22.1,
        "gpt3-175b": 174.6,
        "megatron-530b": 529.6,
        "megatron-1t": 1008.0,
    }
    c = MODELS[name]
    heads = c.hidden_size + 2 * c.kv_heads * c.dim_of_head
    block = c.hidden_size * (heads + c.hidden_size) + (3 if c.gated else 2) * c.hidden_size * c.ffn_size
    total = c.num_layers * block + (1 if c.tied else 2) * c.vocab_size * c.hidden_size
    assert total / 1e9 == pytest.approx(wanted[name], rel=0.02)


def test_sharded_weights_are_planned_where_they_are_asked_for() -> None:
    model = small_model(layers=12)
    model = replace(model, config={**model.config, "zero_optimization": {"stage3_max_live_parameters": 10_000_000}})

    def best(words: str) -> Prediction:
        return planner_of(model, load_cluster(hosts(1)), 4, fixed=parse_layout(words)).answer().best[0]

    two, three = best("dp4,mb1,ckpt1,zero2"), best("dp4,mb1,ckpt1,zero3")
    assert "zero3" in three.layout
    needed = [p.memory[0].reserved for p in (two, three)]
    assert needed[1] < needed[0]
    assert 0 < three.memory[0].parts["gathered"] <= 2 * 10_000_000
    assert three.seconds > two.seconds
    assert "zero3" not in best("dp4,mb1,ckpt1").layout


@pytest.mark.parametrize(("name", "moments"), [("SGD", 0), ("Adagrad", 1), ("Adam", 2)])
def test_an_update_is_timed_by_the_state_that_the_optimizer_keeps(name: str, moments: int) -> None:
    """By hand, for each element: the fp32 gradient three times, master and moments twice, the bf16 weight once."""

    def seconds(optimizer: str) -> float:
        config = {**DEFAULTS, "optimizer": {"type": optimizer, "params": {"lr": 1e-3}}}
        model = replace(small_model(), config=config)
        planner = Planner(model, load_cluster("4xH100"), 16)
        return planner.predictor.split(Layout(replicas=4, micro_batches=4)).update_seconds(0)

    expected = (3 * 4 + 2 * (1 + moments) * 4 + 2) / (3 * 4 + 2 * 3 * 4 + 2)
    assert seconds(name) / seconds("AdamW") == pytest.approx(expected, rel=1e-6)
