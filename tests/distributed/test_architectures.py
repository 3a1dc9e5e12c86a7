"""Hugging Face directories of many architectures: checked in layouts, compared with transformers, exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import VOCAB, load_model, save_model, token_ids

import parallel3d
from parallel3d.config.layout import parse_layout
from parallel3d.errors import DataError
from parallel3d.models import causal_lm_loss, from_hf, save_hf
from parallel3d.parity import Settings, check
from parallel3d.pipe import PipelineModule

LAYOUTS = ["pp2,tp2,m2", "pp2,dp2,zero2,m2"]
# Without a plan and with learned positions; experts that transformers converts; a router's buffers and shared experts.
ODD = ("opt", "mixtral", "deepseek3")
NAMED = ("qwen3", "phi3", "gemma", "gemma2", "gemma3", "olmo2", "granite", "neox", "smollm3", *ODD)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", NAMED if metafunc.config.getoption("full") else ODD)


@pytest.fixture
def in_pool(run_ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let checks run on the ranks that tests share."""

    def run(function: Any, size: int, uses_gpus: bool, *args: Any) -> list[Any]:
        return run_ranks(size, function, *args)

    monkeypatch.setitem(check.__globals__, "run_ranks", run)


def test_a_directory_passes_the_check(in_pool: None, tmp_path: Path, name: str, full: bool):
    """In both layouts; without --full in one, the next directory in the other."""
    save_model(tmp_path, name)
    layouts = LAYOUTS if full else [LAYOUTS[ODD.index(name) % 2]]
    reports = list(check(str(tmp_path), [parse_layout(text) for text in layouts], Settings(steps=2)))
    assert [report.layout for report in reports if report.passed] == layouts, reports


def test_a_directory_computes_what_transformers_does_and_comes_back(tmp_path: Path, name: str):
    model, ids = save_model(tmp_path / "in", name), token_ids(2, 9)
    module = PipelineModule(from_hf(tmp_path / "in"), num_stages=1)
    with torch.no_grad():
        torch.testing.assert_close(module.eval()(ids), model(ids).logits, rtol=1e-5, atol=1e-5)
    save_hf(module, tmp_path / "out")
    wanted = model.state_dict()
    for key, tensor in load_model(tmp_path / "out").state_dict().items():
        assert torch.equal(tensor, wanted[key]), key


def train_on_other_words(source: str) -> list[str]:
    """Train two steps, of which the second has a word that the model doesn't have. Returns what each raised, and the loss."""
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    module = PipelineModule(from_hf(source), num_stages=2, loss_fn=causal_lm_loss, config=config)
    engine = parallel3d.initialize(model=module, config=config)[0]
    told = []
    for word in (VOCAB - 1, VOCAB, -1):
        ids = token_ids(2, 9)
        ids[0, 0] = word
        try:
            told.append(f"loss {float(engine.train_batch(iter([(ids, token_ids(2, 9))]))):.3f}")
        except DataError as error:
            told.append(f"{engine.global_steps} {error}")
    return told


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_a_tokenizer_with_another_vocabulary_is_told_before_the_step(run_ranks, tmp_path: Path, kind: str):
    """By the rank that has the data; the other one learns that it failed."""
    save_model(tmp_path, kind)
    (trained, *first), (also_trained, *second) = run_ranks(2, train_on_other_words, str(tmp_path))
    assert trained == also_trained
    assert [text.split(";")[0] for text in first] == [
        f"1 there is a token id {word}, but the model has words 0 to {VOCAB - 1}" for word in (VOCAB, -1)
    ]
    assert all(text.startswith("1 ") for text in second)


def train_wrapped(source: str, policy: str, compiled: bool) -> tuple[list[torch.Tensor], int]:
    """Losses and weights after two steps with split backwards, and the number of layers that were compiled apart."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "steps_per_print": None,
        "pipeline": {"schedule": "zb-h1"},
        "activation_checkpointing": {"policy": policy},
        "compile": {"enabled": compiled, "backend": "aot_eager", "layers": ["Layer"]},
    }
    module = PipelineModule(from_hf(source), num_stages=1, loss_fn=causal_lm_loss, config=config)
    engine, *_ = parallel3d.initialize(model=module, config=config)
    ids = [token_ids(2, 9, seed) for seed in range(4)]
    losses = [engine.train_batch(iter([(i, i) for i in ids[k : k + 2]])) for k in (0, 2)]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return [*losses, *(p.detach().clone() for p in module.parameters())], graphs


@pytest.mark.parametrize("policy", ["none", "cheap"])
def test_compiled_layers_of_a_directory_share_a_graph_and_train_as_plain_ones(run_ranks, tmp_path: Path, policy: str):
    save_model(tmp_path, "phi-norms", num_hidden_layers=3)
    ((compiled, graphs),) = run_ranks(1, train_wrapped, str(tmp_path), policy, True)
    ((plain, _),) = run_ranks(1, train_wrapped, str(tmp_path), policy, False)
    assert graphs == 1
    for got, wanted in zip(compiled, plain, strict=True):
        assert torch.equal(got, wanted)
