"""Compiled layers compute what plain PyTorch does, in any schedule and with tensor slices."""

from __future__ import annotations

import gc
import sys
import weakref
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import layouts3d
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import toy
from layouts import CLIPPING, SHARDED, Run, check, make_engine, own_iterator, reference_run, run_steps
from ranks import RankError
from torch import Tensor, nn

import parallel3d
from parallel3d.cli import main
from parallel3d.models import DecoderConfig, causal_lm_loss, decoder
from parallel3d.models.loss import CausalLMLoss
from parallel3d.pipe import LayerSpec, PipelineModule

# Traces forward and backward as inductor does, without the minute that making kernels takes.
COMPILE = {"enabled": True, "backend": "aot_eager"}
ACCUMULATION, STEPS = 4, 3


def train(stages: int, schedule: str, checkpointing: int | str, stage: int) -> tuple[Run, bool, str, int]:
    """Also the number of graphs that were compiled after the second step."""
    out, whole = StringIO(), isinstance(checkpointing, int)
    with redirect_stdout(out):
        engine = make_engine(
            toy.model(tied=True),
            accumulation=ACCUMULATION,
            clipping=CLIPPING,
            pipeline={
                "stages": stages,
                "schedule": schedule,
                "activation_checkpoint_interval": checkpointing if whole else None,
            },
            activation_checkpointing={"policy": None if whole else checkpointing},
            zero_optimization={"stage": stage, "reduce_bucket_size": 1500, **SHARDED},
            compile=COMPILE,
        )
        replicas = engine.grid.get_data_parallel_world_size()
        data = [toy.micro_batch(g) for g in range(STEPS * ACCUMULATION * replicas)]
        own = own_iterator(engine, data)
        first, compiled = run_steps(engine, own, 2), _graphs()
        rest = run_steps(engine, own, STEPS - 2)
    run = first[0] + rest[0], first[1] + rest[1], rest[2]
    return run, engine.is_compiled, out.getvalue(), _graphs() - compiled


def _graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_compiled_layers_train_like_one_plain_process(
    run_ranks, dp: int, stages: int, schedule: str, checkpointing: int | str, stage: int
):
    results = run_ranks(dp * stages, train, stages, schedule, checkpointing, stage)
    wanted = reference_run(STEPS, dp * ACCUMULATION, True, "tensor", True, "SGD", 0.0)
    check([run for run, *_ in results], wanted, dp)
    assert all(compiled for _, compiled, *_ in results)
    assert all(later == 0 for *_, later in results), "compiled again after the second step"
    printed = results[0][2]
    assert "compiled" in printed
    assert "layers of rank 0" in printed
    assert "a graph broke" not in printed


def train_slices(layout: layouts3d.Layout) -> Run:
    # What other tests have compiled counts for the compiler's limits, and one rank may have run more of them: if layers were
    # compiled on the other alone, each would wait in a collective of its own.
    torch.compiler.reset()
    return layouts3d.train(layout, False, {"compile": COMPILE})


def test_compiled_slices_train_like_one_plain_process(run_ranks):
    layout = layouts3d.Layout(1, 2, 1, "1", True, "zb-h1", True, True, "SGD", "attention")
    ranks = run_ranks(2, train_slices, layout)
    layouts3d.check(ranks, layouts3d.wanted(1, True, True, "SGD"))


# (schedule, chunks of a stage, placement)
SCHEDULES = [
    ("zbv", 2, "v"),
    ("1f1b", 1, "loop"),
    ("interleaved", 2, "loop"),
    ("gpipe", 1, "loop"),
    ("zb-h1", 1, "loop"),
    ("zb-looped", 2, "loop"),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    full = metafunc.config.getoption("full")
    if "checkpointing" in metafunc.fixturenames:
        layers = [(1, 2, "zb-h1", "cheap", 1), (2, 1, "zb-h1", "cheap", 3), (2, 1, "1f1b", 2, 3)]
        # The graph that keeps attention's results is compared in unit/models/test_compiled_blocks.py.
        layers += [(2, 1, "1f1b", "attention", 2)] if full else []
        metafunc.parametrize(("dp", "stages", "schedule", "checkpointing", "stage"), layers)
    if "schedule_of_decoder" in metafunc.fixturenames:
        cases = [(schedule, "aot_eager", "Block", 2) for schedule in (SCHEDULES if full else SCHEDULES[::2])]
        # Making inductor's kernels takes a second each. Zero-bubble's backward is split. Where inductor may use the buffers of
        # deferred gradients again, an attention has other numbers, a feed-forward doesn't.
        cases.append((SCHEDULES[4], "inductor", "Attention", 1))
        cases += [(schedule, "inductor", "Block", 2) for schedule in SCHEDULES if full]
        metafunc.parametrize(("schedule_of_decoder", "backend", "layer", "stages"), cases)


def train_decoder(
    schedule: tuple[str, int, str], layer: str, compiled: dict[str, Any], dtype: torch.dtype, fp8: bool
) -> list[Tensor]:
    """Losses, and this rank's weights after two steps. layer: whole blocks, or a half; fp8: in some linears."""
    torch.manual_seed(0)
    name, chunks, placement = schedule
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "steps_per_print": None,
        "pipeline": {"schedule": name},
        "compile": compiled,
        # PyTorch 2.11 can't compile the others in float64. Graphs don't know the backend: other tests would get "math", too.
        "attention": {"backend": "math" if dtype is torch.float64 else "auto"},
        "fp8": {"enabled": fp8, "filter": "query|key|value" if fp8 else None},
    }
    layers = decoder(replace(DECODER, num_layers=3), dtype=dtype, units="block" if layer == "Block" else "half")
    model = PipelineModule(
        layers,
        num_stages=dist.get_world_size(),
        num_chunks=chunks,
        placement=placement,
        loss_fn=causal_lm_loss,
        config=config,
    )
    engine, *_ = parallel3d.initialize(model=model, config=config)
    data = iter([batch(2 * k) for k in range(2 * ACCUMULATION)])
    losses = [engine.train_batch(data) for _ in range(2)]
    return [*losses, *(p.detach().clone() for p in model.parameters())]


def train_both(
    schedule: tuple[str, int, str], backend: str, layer: str
) -> tuple[list[Tensor], list[Tensor], dict[str, int]]:
    """Results compiled and plain, and the graph breaks."""
    torch._dynamo.utils.counters.clear()
    inductor = backend == "inductor"
    numbers = (torch.float64, True) if inductor else (torch.float32, False)
    # Not the loss, which has another formula where it is compiled.
    compiled = train_decoder(schedule, layer, {"enabled": True, "backend": backend, "layers": [layer]}, *numbers)
    return compiled, train_decoder(schedule, layer, {}, *numbers), dict(torch._dynamo.utils.counters["graph_break"])


def test_compiled_blocks_train_bitwise_as_plain_ones(
    run_ranks, schedule_of_decoder: tuple[str, int, str], backend: str, layer: str, stages: int
):
    """Up to the order of sums with inductor, in float64, with linears in fp8 and others."""
    tolerance = 0 if backend == "aot_eager" else 1e-12
    for compiled, plain, breaks in run_ranks(stages, train_both, schedule_of_decoder, backend, layer):
        assert not breaks
        for got, wanted in zip(compiled, plain, strict=True):
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def buffers_of_gradients(compiled: bool) -> tuple[int, int]:
    """Bytes that gradients pass through in a step, predicted and measured."""
    engine = make_engine(
        toy.model(tied=False),
        accumulation=ACCUMULATION,
        zero_optimization={"stage": 2, "reduce_per_micro_batch": True, "reduce_bucket_size": 100},
        compile=COMPILE if compiled else {},
    )
    engine.train_batch(own_iterator(engine, [toy.micro_batch(k) for k in range(2 * ACCUMULATION)]))
    return engine.reports.memory_report()[0]["transient"]


def test_a_compiled_layers_buckets_fill_at_once(run_ranks):
    eager, compiled = (run_ranks(2, buffers_of_gradients, compiled) for compiled in (False, True))
    for predicted, measured in (*eager, *compiled):
        assert predicted == measured
    assert compiled[0] > eager[0]


class Breaking(nn.Module):
    """Asks the host for a number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x).relu()
        return y * y.sum().item()


class BreakingDropout(Breaking):
    """Its mask is drawn in place."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(self.inner(x), 0.5, self.training))


def gradients_with(policy: str) -> list[Tensor]:
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "compile": COMPILE,
        "activation_checkpointing": {"policy": policy},
    }
    layers = [LayerSpec(BreakingDropout), LayerSpec(BreakingDropout)]
    model = PipelineModule(layers, num_stages=1, loss_fn=nn.MSELoss())
    engine, *_ = parallel3d.initialize(model=model, config=config)
    before = [p.detach().clone() for p in model.parameters()]
    engine.train_batch(iter([(torch.ones(2, 4), torch.zeros(2, 4))]))
    return [p.detach() - old for p, old in zip(model.parameters(), before, strict=True)]


def test_a_region_of_a_graph_that_breaks_is_recomputed(run_ranks):
    runs = {policy: run_ranks(1, gradients_with, policy)[0] for policy in ("none", "cheap", "full")}
    assert any(change.any() for change in runs["none"])
    for policy in ("cheap", "full"):
        assert all(map(torch.equal, runs[policy], runs["none"])), policy


class Dropping(nn.Module):
    """A block with dropout in a list, as models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


def train_upon_frozen_blocks(policy: str) -> list[Tensor]:
    """Losses of a plain module whose first block is frozen, and of a decoder whose head alone is trained."""
    torch.compiler.reset()
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "compile": COMPILE,
        "activation_checkpointing": {"policy": policy},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    torch.manual_seed(0)
    model = Dropping()
    model.blocks[0].requires_grad_(False)
    engine, *_ = parallel3d.initialize(model=model, config=config)
    results = [engine.train_batch(iter([torch.ones(2, 4)])) for _ in range(2)]
    sizes = DecoderConfig(vocab_size=11, hidden_size=8, ffn_size=16, num_layers=1, num_heads=2)
    module = PipelineModule(decoder(sizes), num_stages=1, loss_fn=causal_lm_loss, base_seed=3, seed_layers=True)
    for place, layer in module.layers.items():
        layer.requires_grad_(place == "3")
    engine, *_ = parallel3d.initialize(model=module, config=config)
    ids = torch.arange(8).view(2, 4)
    return results + [engine.train_batch(iter([(ids, ids)])) for _ in range(2)]


def test_frozen_blocks_that_draw_random_numbers_have_graphs(run_ranks):
    """Nothing of them is recomputed, since they have no backward; PyTorch refused their graphs."""
    wanted, *others = (run_ranks(1, train_upon_frozen_blocks, policy)[0] for policy in ("none", "attention", "full"))
    assert not torch.equal(wanted[2], wanted[3])
    for got in others:
        assert all(map(torch.equal, got, wanted))


def compile_plainly(config: dict[str, Any]) -> str:
    out = StringIO()
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **config}
    with redirect_stdout(out):
        engine, *_ = parallel3d.initialize(model=Breaking(), config=config)
        if "compile" not in config:
            engine.compile(backend="aot_eager")
        loss = engine(torch.ones(2, 4)).sum()
        engine.backward(loss)
        engine.step()
    return out.getvalue()


def test_other_graph_breaks_are_named(run_ranks):
    (printed,) = run_ranks(1, compile_plainly, {})
    assert "compiled 1 layers of rank 0" in printed
    assert "1 x: " in printed
    assert "item" in printed
    assert "Developer debug context" not in printed


def frees_its_engine() -> tuple[bool, list[Any]]:
    """Whether it does so, and the errors on the way, also after torch has forgotten what it compiled."""
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "compile": COMPILE}
    engine, *_ = parallel3d.initialize(model=nn.Sequential(nn.Linear(4, 4), nn.ReLU()), config=config)
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    left = weakref.ref(engine.update)
    errors: list[Any] = []
    with mock.patch.object(sys, "unraisablehook", lambda ignored: errors.append(repr(ignored.exc_value))):
        torch.compiler.reset()
        del engine
        gc.collect()
    return left() is None, errors


def test_an_engine_of_compiled_layers_leaves_no_memory(run_ranks):
    assert run_ranks(1, frees_its_engine) == [(True, [])]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"enabled": True, "backend": "inducter"}, "torch.compile does not accept {'backend': 'inducter'}"),
        (
            {"enabled": True, "mode": "fastest"},
            "torch.compile does not accept {'backend': 'inductor', 'mode': 'fastest'}",
        ),
        ({"enabled": True, "options": {"cpp_wraper": True}}, "Unexpected optimization option cpp_wraper"),
        ({"enabled": True, "layers": ["Braking"]}, "Did you mean 'Breaking'?"),
    ],
)
def test_what_cannot_be_compiled_is_said(run_ranks, section: dict[str, Any], message: str):
    with pytest.raises(RankError) as caught:
        run_ranks(1, compile_plainly, {"compile": section})
    assert message in str(caught.value)


def whole_decoder(num_steps: int) -> tuple[list[float], bool]:
    """Losses of a decoder on one rank, compiled; whether its loss takes all positions at once, in its own way."""
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "steps_per_print": None,
        "compile": COMPILE,
    }
    model = PipelineModule(
        decoder(DECODER), num_stages=1, loss_fn=causal_lm_loss, base_seed=3, seed_layers=True, config=config
    )
    engine, *_ = parallel3d.initialize(model=model, config=config)
    losses = [engine.train_batch(iter([batch(k)])).item() for k in range(num_steps)]
    return losses, engine.pipeline_module.loss_fn != causal_lm_loss and isinstance(
        engine.pipeline_module.loss_fn, CausalLMLoss
    )


DECODER = DecoderConfig(vocab_size=37, hidden_size=16, ffn_size=24, num_layers=1, num_heads=2, max_positions=8)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels, a position fewer in the second step, so that lengths are dynamic from then on."""
    generator = torch.Generator().manual_seed(step)
    ids, labels = torch.randint(37, (2, 2, 8 - step % 2), generator=generator)
    return ids, labels


def plain_decoder(num_steps: int) -> list[float]:
    layers = []
    for k, spec in enumerate(decoder(DECODER)):
        torch.manual_seed(3 + k)
        layers.append(spec.build(None))
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.5)
    losses = []
    for k in range(num_steps):
        ids, labels = batch(k)
        loss = F.cross_entropy(nn.Sequential(*layers)(ids).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_loss_that_says_how_is_compiled_its_own_way_without_slices_too(run_ranks):
    ((losses, own_way),) = run_ranks(1, whole_decoder, 3)
    assert own_way
    assert losses == pytest.approx(plain_decoder(3), rel=1e-5)


def train_on_changed_shapes(compiled: bool, directory: str) -> tuple[list[Tensor], int]:
    """Losses and weights of steps of which some have a shorter micro-batch; graphs compiled after the first step."""
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "steps_per_print": None,
        "pipeline": {"schedule": "zb-h1"},
        "compile": {**COMPILE, "enabled": compiled, "layers": ["Block"]},
        "run_record": {"directory": directory, "after_steps": 100},
    }
    model = PipelineModule(decoder(DECODER), num_stages=1, loss_fn=causal_lm_loss, config=config)
    engine, *_ = parallel3d.initialize(model=model, config=config)
    shapes = [(8, 8), (8, 7), (8, 8), (6, 5), (4, 8)]
    losses, before = [], 0
    for step, lengths in enumerate(shapes):
        data = [(ids[:, :n], labels[:, :n]) for n in lengths for ids, labels in [batch(2 * step)]]
        losses.append(engine.train_batch(iter(data)))
        before = before or _graphs()
    return [*losses, *(p.detach().clone() for p in model.parameters())], _graphs() - before


def test_other_shapes_than_the_first_run_eager_and_the_doctor_names_them(
    run_ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    ((compiled, later),) = run_ranks(1, train_on_changed_shapes, True, str(tmp_path / "compiled"))
    ((plain, _),) = run_ranks(1, train_on_changed_shapes, False, str(tmp_path / "plain"))
    assert later == 0, "compiled again for another shape"
    for got, wanted in zip(compiled, plain, strict=True):
        assert torch.equal(got, wanted)
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text('{"train_batch_size": 2, "run_record": {"directory": "compiled"}}')
    main(["doctor", "--config", "config.json"])
    told = capsys.readouterr().out
    assert "  1 calls of Block with [2, 7, 16]" in told
    assert "compiled for [2, 8, 16]" in told
    assert all(f"1 calls of Block with [2, {n}, 16]" in told for n in (6, 5, 4))


class Failing(nn.Module):
    """Fails while it is traced ("trace"), when it runs ("forward"), or in its backward."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.inner, self.where = nn.Linear(4, 4), where

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.where == "trace":
            return x @ torch.ones(3, 3)
        return x[x.long() + 9] if self.where == "forward" else FailingBackward.apply(x)


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient[torch.full((2,), 9)]


def train_failing(where: str) -> None:
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "compile": COMPILE}
    model = PipelineModule([nn.Linear(4, 4), Failing(where)], num_stages=1, loss_fn=F.mse_loss, config=config)
    engine, *_ = parallel3d.initialize(model=model, config=config)
    engine.train_batch(iter([(torch.ones(2, 4), torch.zeros(2, 4))]))


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("trace", r"F0@0: RuntimeError: mat1 and mat2 shapes cannot be multiplied.*, in layer 1 \(Failing\)"),
        ("forward", r"F0@0: IndexError: index .* is out of bounds .*, in layer 1 \(Failing\)"),
        ("backward", r"B0@0: IndexError: index .* is out of bounds"),
    ],
)
def test_a_failure_in_a_compiled_layer_names_instruction_and_layer(run_ranks, where: str, message: str):
    with pytest.raises(RankError, match=message):
        run_ranks(1, train_failing, where)


def replace_a_weight() -> None:
    config: dict[str, Any] = {
        "train_batch_size": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "pipeline": {"schedule": "zb-h1"},
        "compile": COMPILE,
    }
    model = PipelineModule([nn.Sequential(nn.Linear(4, 4))], num_stages=1, loss_fn=F.mse_loss, config=config)
    engine, *_ = parallel3d.initialize(model=model, config=config)
    micro_batch = torch.ones(2, 4), torch.zeros(2, 4)
    engine.train_batch(iter([micro_batch]))
    model.layers["0"][0].weight = nn.Parameter(torch.ones(4, 4))
    engine.train_batch(iter([micro_batch]))


def test_a_weight_replaced_after_it_was_compiled_is_refused(run_ranks):
    with pytest.raises(RankError, match=r"of layer 'layers.0.0' is another object.*weight.copy_"):
        run_ranks(1, replace_a_weight)


class Flagged:
    """A loss with an attribute of that name for purposes of its own."""

    compiled = False

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return F.mse_loss(outputs, labels)


def flagged() -> list[float]:
    torch.manual_seed(0)
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "steps_per_print": None,
        "compile": COMPILE,
    }
    model = PipelineModule([nn.Linear(4, 4)], num_stages=1, loss_fn=Flagged(), config=config)
    engine, *_ = parallel3d.initialize(model=model, config=config)
    return [engine.train_batch(iter([(torch.ones(2, 4), torch.zeros(2, 4))])).item() for _ in range(2)]


def test_a_loss_with_a_flag_of_that_name_is_compiled_as_any_other(run_ranks):
    ((first, second),) = run_ranks(1, flagged)
    assert 0 < second < first
