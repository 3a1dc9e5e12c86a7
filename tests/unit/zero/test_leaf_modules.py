"""Modules that ZeRO-3 gathers whole, chosen by the configuration."""

from __future__ import annotations

from typing import Any

import pytest
from parallel3d.utils import (
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
)
from torch import nn

from parallel3d.config import load
from parallel3d.errors import ConfigError
from parallel3d.pipe.blocks import units_of
from parallel3d.zero.external import get_z3_leaf_modules, set_configured_leaf_modules


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(8))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.big = nn.Linear(40, 40, bias=False)
        self.experts = Experts()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(40)


def leaves(zero: dict[str, Any]) -> tuple[list[str], int]:
    """Return the names of the leaf modules, and the number of units."""
    model = Model()
    config = load({"zero_optimization": {"stage": 3, **zero}})
    set_configured_leaf_modules(model, config.zero_optimization)
    names = {module: name for name, module in model.named_modules()}
    return [names[module] for module in get_z3_leaf_modules(model)], len(set(units_of(model).values()))


EXPERTS = ["layers.0.experts", "layers.1.experts"]


@pytest.mark.parametrize(
    ("zero", "wanted"),
    [
        ({"leaf_module": {"classes": "Experts"}}, EXPERTS),
        ({"leaf_module": {"classes": [f"{__name__}.Experts"]}}, EXPERTS),
        ({"leaf_module": {"names": ["layers.1.experts"]}}, EXPERTS[1:]),
        ({"leaf_module": {"name_suffixes": ["experts"]}}, EXPERTS),
        # The experts have 32 parameters in 9 modules, a layer 1632 in 11, the model 3344 in 24.
        ({"stage3_module_granularity_threshold": 2}, []),
        ({"stage3_module_granularity_threshold": 3}, EXPERTS),
        ({"stage3_module_granularity_threshold": 138}, EXPERTS),
        ({"stage3_module_granularity_threshold": 139}, [""]),
    ],
)
def test_leaf_modules_of_the_configuration(zero: dict[str, Any], wanted: list[str]):
    found, units = leaves(zero)
    assert found == wanted
    if wanted == EXPERTS:
        assert units == 5, "big and experts of two layers, and the norm"


@pytest.mark.parametrize("leaf", [{"classes": ["Expert"]}, {"names": ["layers.2.experts"]}, {"name_suffixes": ["mlp"]}])
def test_a_leaf_module_that_the_model_lacks_is_an_error(leaf: dict[str, Any]):
    with pytest.raises(ConfigError, match="no module"):
        leaves({"leaf_module": leaf})


def test_leaf_modules_by_name_and_by_suffix():
    model = Model()
    names = {module: name for name, module in model.named_modules()}
    found, missing = set_z3_leaf_modules_by_name(model, ["norm", "experts"], raise_if_not_found=False)
    assert ([names[module] for module in found], missing) == (["norm"], ["experts"])
    found, missing = set_z3_leaf_modules_by_suffix(model, ["experts", "0.experts"])
    assert ([names[module] for module in found], missing) == (EXPERTS, [])
    assert [names[module] for module in get_z3_leaf_modules(model)] == [*EXPERTS, "norm"]
    set_z3_leaf_modules_by_suffix(model, ["0.experts"], flag=False)
    assert [names[module] for module in get_z3_leaf_modules(model)] == [EXPERTS[1], "norm"]
    set_z3_leaf_module(model.norm, False)
    assert [names[module] for module in get_z3_leaf_modules(model)] == [EXPERTS[1]]
    assert set_z3_leaf_modules(model, ["Expert"], raise_if_not_found=False) == []
    with pytest.raises(ConfigError, match=r"suffix 'norms'. Did you mean 'norm'"):
        set_z3_leaf_modules_by_name(model, ["norms"])


def test_auto_means_the_default_where_the_caller_gives_nothing():
    keys = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    given = {"zero_optimization": {"stage": 3, **dict.fromkeys(keys, "auto")}}
    assert load(given) == load({"zero_optimization": {"stage": 3}})
    hidden = 64
    values = dict(zip(keys, (hidden * hidden, int(0.9 * hidden * hidden), 10 * hidden), strict=True))
    filled = load(given, auto={f"zero_optimization.{key}": value for key, value in values.items()})
    assert {key: getattr(filled.zero_optimization, key) for key in keys} == values
