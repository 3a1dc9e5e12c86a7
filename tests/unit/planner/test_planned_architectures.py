"""Plans for Hugging Face directories that keep their own layers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hf_models import make_model

from parallel3d.config.layout import parse_layout
from parallel3d.planner.cluster.file import load_cluster
from parallel3d.planner.search.model import load_model
from parallel3d.planner.search.plan import Planner


def save_config(name: str, directory: Path) -> None:
    model = make_model(name)
    model.config.save_pretrained(directory)
    file = directory / "config.json"
    named = f'"architectures": ["{type(model).__name__}"], "dtype"'
    file.write_text(file.read_text().replace('"dtype"', named))


@pytest.mark.parametrize("name", ["opt", "mixtral"])
def test_a_directory_without_weights_is_planned(tmp_path: Path, name: str):
    """With its experts, and with a plan by usual names, over tensor-parallel ranks; its equal layers are traced once."""
    save_config(name, tmp_path)
    planned = load_model(str(tmp_path), seq=8)
    assert planned.seq == 8
    assert planned.layers[1].costs_like(planned.layers[2])
    planner = Planner(planned, load_cluster("4xH100"), 4, fixed=parse_layout("pp2,tp2,m4,1f1b"))
    assert planner.answer().best[0].layout == "pp2,tp2,1f1b,m4,mb1"
    traced = planner.predictor.layers(planner.space.layout(0))[1]
    whole = sum(p.numel() for p in planned.layers[1].build().parameters())
    assert sum(p.numel() for _, p in traced.parameters) < 0.6 * whole


def test_experts_that_are_too_small_to_be_split_are_refused_by_their_size(tmp_path: Path):
    """16 features over 4 ranks are 8 bytes in bf16, which torch's operator for all experts refuses."""
    save_config("deepseek3", tmp_path)
    planner = Planner(load_model(str(tmp_path), seq=8), load_cluster("4xH100"), 4, fixed=parse_layout("tp4,m4"))
    result = planner.answer()
    assert not result.best
    assert "experts of 16 features can't be split over 4 ranks: in torch.bfloat16 torch's grouped_mm takes" in str(
        result.remedy
    )
