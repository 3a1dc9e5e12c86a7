"""The loss scale moves as DeepSpeed's documentation has it; sections of a configuration become dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.config import Fp16Config, load
from parallel3d.errors import PrecisionError
from parallel3d.optim.precision import LossScaler, make_precision


def scales(settings: dict[str, Any], overflows: str) -> list[float]:
    """The scale after each step. overflows: a letter a step, x for an overflow."""
    scaler = LossScaler(Fp16Config(enabled=True, **settings))
    found = []
    for step in overflows:
        scaler.update(step == "x")
        found.append(scaler.cur_scale)
    return found


SEQUENCES = [
    # Starts at 2^initial_scale_power; each overflow halves with one life.
    ({"initial_scale_power": 4, "hysteresis": 1}, ".xx.x", [16, 8, 4, 4, 2]),
    # The first overflow of two lives halves nothing; the life is not restored by steps that are fine.
    ({"initial_scale_power": 4, "hysteresis": 2}, "x.x.x", [16, 16, 8, 8, 4]),
    # Unless hysteresis is consecutive: only overflows in a row count.
    ({"initial_scale_power": 4, "hysteresis": 2, "consecutive_hysteresis": True}, "x.x.xx", [16, 16, 16, 16, 16, 8]),
    # In the step after loss_scale_window ones without an overflow, and after as many more, the scale doubles and lives are
    # restored.
    ({"initial_scale_power": 4, "loss_scale_window": 3}, ".......", [16, 16, 16, 32, 32, 32, 64]),
    ({"initial_scale_power": 4, "loss_scale_window": 3}, "x....xx", [16, 16, 16, 16, 32, 32, 16]),
    # Not below the minimum.
    ({"initial_scale_power": 3, "hysteresis": 1, "min_loss_scale": 3}, "xx", [4, 3]),
    # A static scale never moves.
    ({"loss_scale": 128, "hysteresis": 1}, "xx..", [128] * 4),
]


@pytest.mark.parametrize(("settings", "overflows", "expected"), SEQUENCES)
def test_the_scale_after_each_step(settings: dict[str, Any], overflows: str, expected: list[float]):
    assert scales(settings, overflows) == expected


def test_the_defaults_are_deepspeeds():
    scaler = LossScaler(Fp16Config(enabled=True))
    assert scaler.cur_scale == 2**16
    for _ in range(1000):
        scaler.update(False)
    assert scaler.cur_scale == 2**16
    scaler.update(False)
    assert scaler.cur_scale == 2**17


def test_an_overflow_at_the_minimum_is_an_error_that_changes_nothing():
    scaler = LossScaler(Fp16Config(enabled=True, initial_scale_power=1, hysteresis=1, min_loss_scale=1))
    scaler.update(True)
    state = scaler.state_dict()
    with pytest.raises(PrecisionError, match=r"fp16\.min_loss_scale = 1"):
        scaler.update(True)
    assert scaler.state_dict() == state


@given(st.text("x....", max_size=60), st.integers(0, 60), st.integers(1, 3), st.integers(1, 9), st.booleans())
def test_a_saved_scaler_goes_on_as_it_would_have(overflows, cut, hysteresis, window, consecutive):
    settings = Fp16Config(
        enabled=True,
        hysteresis=hysteresis,
        loss_scale_window=window,
        consecutive_hysteresis=consecutive,
        min_loss_scale=2.0**-80,
    )
    whole, first, second = LossScaler(settings), LossScaler(settings), LossScaler(settings)
    for step in overflows:
        whole.update(step == "x")
    for step in overflows[:cut]:
        first.update(step == "x")
    second.load_state_dict(first.state_dict())
    for step in overflows[cut:]:
        second.update(step == "x")
    assert second.state_dict() == whole.state_dict()
    doublings = whole.cur_scale / 2.0**16
    assert doublings == 2.0 ** round(torch.tensor(doublings).log2().item())


def test_a_scale_that_is_configured_is_not_replaced_by_a_checkpoints():
    fixed, adapting = LossScaler(Fp16Config(loss_scale=128.0)), LossScaler(Fp16Config())
    fixed.load_state_dict(adapting.state_dict())
    assert fixed.cur_scale == 128.0
    adapting.load_state_dict(fixed.state_dict())
    assert adapting.cur_scale == 128.0


@pytest.mark.parametrize(
    ("config", "weights", "autocast", "scales", "checks"),
    [
        ({}, None, None, False, False),
        ({"bf16": {"enabled": True}}, torch.bfloat16, None, False, False),
        ({"bf16": {"enabled": True, "check_grad_overflow": True}}, torch.bfloat16, None, False, True),
        ({"fp16": {"enabled": True}}, torch.float16, None, True, True),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, None, torch.bfloat16, False, False),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, None, torch.float16, True, True),
        (
            {"bf16": {"enabled": True}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
            torch.bfloat16,
            torch.bfloat16,
            False,
            False,
        ),
        ({"amp": {"enabled": True, "opt_level": "O0"}}, None, None, False, False),
        ({"amp": {"enabled": True}}, None, torch.float16, True, True),
        ({"amp": {"enabled": True, "opt_level": "O2"}}, torch.float16, torch.float16, True, True),
        ({"amp": {"enabled": True, "opt_level": "O3"}}, torch.float16, None, True, True),
    ],
    ids=str,
)
def test_sections_become_dtypes(config: dict[str, Any], weights: Any, autocast: Any, scales: bool, checks: bool):
    found = make_precision(load(config))
    assert (found.weights, found.autocast) == (weights, autocast)
    assert (found.scaling is not None, found.checks_overflow) == (scales, checks)


def test_inputs_are_cast_to_the_weights_dtype():
    tree = {
        "x": torch.ones(2),
        "ids": torch.ones(2, dtype=torch.int64),
        "more": [torch.ones(1, dtype=torch.float64), None, 3],
    }
    cast = make_precision(load({"fp16": {"enabled": True}})).cast(tree)
    assert (cast["x"].dtype, cast["ids"].dtype, cast["more"][0].dtype) == (torch.float16, torch.int64, torch.float16)
    assert cast["more"][1:] == [None, 3]
    assert make_precision(load({})).cast(tree) is tree
