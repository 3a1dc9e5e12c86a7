"""Layers are chosen by their names, a pattern or a function."""

from __future__ import annotations

from typing import Any

import pytest

from parallel3d.errors import ConfigError
from parallel3d.pipe.calls import choice_rule, policy_rule

NAMES = ["Embed", "Block", "MLPBlock", "Head"]


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        (None, [0, 1, 2, 3]),
        (["Block"], [1]),
        (("Head", "Embed"), [0, 3]),
        ("Block$", [1, 2]),
        ("^Block|H", [1, 3]),
        (lambda k, layer: k % 2 == 0 and layer == "layer", [0, 2]),
    ],
)
def test_layers_are_chosen_by_names_a_pattern_or_a_function(choice: Any, chosen: list[int]):
    rule = choice_rule(choice, NAMES, "compile.layers")
    assert [k for k in range(4) if rule(k, "layer")] == chosen


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (["Block", "Haed"], "compile.layers names 'Haed', which no layer has. Did you mean 'Head'\\?"),
        ("Transformer", "names 'Transformer', which no layer has. The layers are Embed, Block, MLPBlock, Head"),
        ("Block(", "is not a regular expression"),
    ],
)
def test_a_choice_that_no_layer_meets_is_an_error(choice: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        choice_rule(choice, NAMES, "compile.layers")


def test_policies_are_by_class_names_and_numbers():
    every = policy_rule(None, {"Block": "cheap", "default": "attention", "Head": "none"}, NAMES)
    assert [every(k, None) for k in range(4)] == ["attention", "cheap", "attention", "none"]
    some = policy_rule("Block", {"MLPBlock": "full"}, NAMES)
    assert [some(k, None) for k in range(4)] == ["none", "none", "full", "none"]
    with pytest.raises(ConfigError, match=r"activation_checkpointing.policy names 'Blok'.* Did you mean 'Block'"):
        policy_rule(None, {"Blok": "cheap", "default": "none"}, NAMES)
    numbered = policy_rule(None, {"Block": "cheap", "1": "full", "3": "attention"}, NAMES)
    assert [numbered(k, None) for k in range(4)] == ["none", "full", "none", "attention"]
    for other in ("4", "01"):
        with pytest.raises(ConfigError, match=f"names layer {other}, but the layers have the numbers 0 to 3"):
            policy_rule(None, {other: "cheap"}, NAMES)
