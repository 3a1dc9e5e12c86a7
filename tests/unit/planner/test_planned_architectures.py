"""Plans for Hugging Face directories that keep their own layers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hf_models import make_model

from parallel3d.config.layout import parse_layout
from parallel3d.planner.cluster.file import load_cluster
from parallel3d.planner.search.model import load_model
from parallel3d.planner.search.plan import Planner, Question


@pytest.mark.parametrize("name", ["opt", "mixtral"])
def test_a_directory_without_weights_is_planned(tmp_path: Path, name: str):
    """With its experts, and with a plan by usual names, over tensor-parallel ranks; its equal layers are traced once."""
    model = make_model(name)
    model.config.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        (tmp_path / "config.json")
        .read_text()
        .replace('"dtype"', f'"architectures": ["{type(model).__name__}"], "dtype"')
    )
    planned = load_model(str(tmp_path), seq=8)
    assert planned.seq == 8
    assert planned.layers[1].costs_like(planned.layers[2])
    planner = Planner(Question(planned, load_cluster("4xH100"), 4, fixed=parse_layout("pp2,tp2,m4,1f1b")))
    assert planner.answer().best[0].layout == "pp2,tp2,1f1b,m4,mb1"
    traced = planner.predictor.layers(planner.space.layout(0))[1]
    whole = sum(p.numel() for p in planned.layers[1].build().parameters())
    assert sum(p.numel() for _, p in traced.parameters) < 0.6 * whole
