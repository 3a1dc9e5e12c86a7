"""The configuration of a planned layout, with the user's own keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel3d.config import load
from parallel3d.config.layout import Layout, configuration
from parallel3d.models import DecoderConfig, causal_lm_loss, decoder
from parallel3d.planner.cluster.file import load_cluster
from parallel3d.planner.search.model import DEFAULTS, PlannedModel
from parallel3d.planner.search.plan import profile_of


def layout_of(zero: int) -> Layout:
    return Layout(replicas=2, zero=zero, micro_batch=1, micro_batches=4, chunks=1, schedule="1f1b", placement="loop")


@pytest.mark.parametrize("asked", [None, False, True, "auto"])
@pytest.mark.parametrize("planned_with", [0, 1, 2])
def test_stage_2_is_predicted_as_it_is_configured(asked: Any, planned_with: int):
    """A plan's profile is made under one layout's configuration, for all of them: stage 2 runs as that one predicts it."""
    section = {} if asked is None else {"zero_optimization": {"stage": 2, "reduce_per_micro_batch": asked}}
    size = DecoderConfig(vocab_size=64, hidden_size=32, ffn_size=64, num_layers=1, num_heads=2, max_positions=16)
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    base = {**DEFAULTS, **section}
    model = PlannedModel("small", decoder(size), causal_lm_loss, lambda count: (tokens, tokens), 16, base)
    profile = profile_of(model, load_cluster("2xH200"), load(configuration(layout_of(planned_with), base)))
    configured = load(configuration(layout_of(2), base)).zero_optimization.reduce_per_micro_batch
    assert configured is (asked is not False)
    assert profile.policy(2).reduce_per_micro_batch is configured
    for zero in (0, 1):
        assert load(configuration(layout_of(zero), base)).zero_optimization.stage == zero
