"""Settings of `p3d check`."""

from __future__ import annotations

from parallel3d.config.layout import parse_layout
from parallel3d.parity.settings import Settings, check_config


def test_small_models_are_checked_with_weights_that_are_sharded():
    zero = check_config(parse_layout("dp2,zero3"), {}, Settings())["zero_optimization"]
    assert zero["stage3_param_persistence_threshold"] == 0
    given = {"zero_optimization": {"stage3_param_persistence_threshold": 7}}
    assert check_config(parse_layout("dp2,zero3"), given, Settings())["zero_optimization"] == {
        "stage": 3,
        "stage3_param_persistence_threshold": 7,
    }
    assert "stage3_param_persistence_threshold" not in check_config(parse_layout("dp2,zero2"), {}, Settings()).get(
        "zero_optimization", {}
    )
