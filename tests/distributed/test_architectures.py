"""Hugging Face directories of many architectures: checked in layouts, compared with transformers, exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import load_model, save_model, token_ids

from parallel3d.config.layout import parse_layout
from parallel3d.models import from_hf, save_hf
from parallel3d.parity import Settings, check
from parallel3d.pipe import PipelineModule

LAYOUTS = ["pp2,tp2,m2", "pp2,dp2,zero2,m2"]
# Without a plan and with learned positions; experts that transformers converts; a router's buffers and shared experts.
ODD = ("opt", "mixtral", "deepseek3")
NAMED = ("qwen3", "phi3", "gemma", "gemma2", "gemma3", "olmo2", "granite", "neox", "smollm3", *ODD)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("name", NAMED if metafunc.config.getoption("full") else ODD)


@pytest.fixture
def in_pool(run_ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let checks run on the ranks that tests share."""

    def run(function: Any, size: int, uses_gpus: bool, *args: Any) -> list[Any]:
        return run_ranks(size, function, *args)

    monkeypatch.setitem(check.__globals__, "run_ranks", run)


def test_a_directory_passes_the_check(in_pool: None, tmp_path: Path, name: str):
    save_model(tmp_path, name)
    reports = list(check(str(tmp_path), [parse_layout(text) for text in LAYOUTS], Settings(steps=2)))
    assert [report.layout for report in reports if report.passed] == LAYOUTS, reports


def test_a_directory_computes_what_transformers_does_and_comes_back(tmp_path: Path, name: str):
    model, ids = save_model(tmp_path / "in", name), token_ids(2, 9)
    module = PipelineModule(from_hf(tmp_path / "in"), num_stages=1)
    with torch.no_grad():
        torch.testing.assert_close(module.eval()(ids), model(ids).logits, rtol=1e-5, atol=1e-5)
    save_hf(module, tmp_path / "out")
    wanted = model.state_dict()
    for key, tensor in load_model(tmp_path / "out").state_dict().items():
        assert torch.equal(tensor, wanted[key]), key
