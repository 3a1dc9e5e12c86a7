"""Checkpoints of ZeRO-3: trained and frozen weights go from any layout into any, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import SHARDED, make_engine, own_iterator
from reference import Item
from safetensors.torch import load_file
from test_checkpoint_layouts import check_same, whole_tensors
from torch import Tensor, nn

import parallel3d
from parallel3d import DeepSpeedEngine as Engine

WIDTH = 9  # odd, so that padding and shards' ends lie within parameters
TRAINED = {"layers.1.down.weight", "layers.1.up.weight", "layers.3.weight", "layers.3.bias", "layers.5.gain"}


class Frozen(nn.Linear):
    def __init__(self, width: int):
        super().__init__(width, width)
        self.requires_grad_(False)


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank update, and a running mean that differs between replicas."""

    def __init__(self, width: int):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0).to(self.mean.dtype), 0.5)
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Scale(nn.Module):
    """A parameter that not even a shard for each replica can be cut of, and a frozen scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([1.5]))
        self.offset = nn.Parameter(torch.tensor(0.25), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.offset


LINEAR = Item(nn.Linear, (WIDTH, WIDTH))
ITEMS = [Item(Frozen, (WIDTH,)), Item(Adapted, (WIDTH,)), Item(Frozen, (WIDTH,)), LINEAR, Item(torch.tanh), Item(Scale)]


def squares(output: Tensor, labels: Tensor) -> Tensor:
    return (output.float() - labels).square().mean()


def engine_of(stages: int, zero: int, precision: dict[str, Any]) -> Engine:
    return make_engine(
        ITEMS,
        squares,
        optimizer="AdamW",
        accumulation=2,
        pipeline={"stages": stages},
        zero_optimization={"stage": zero, "reduce_bucket_size": 100, **SHARDED},
        **precision,
    )


def train(engine: Engine, first: int) -> float:
    generator = torch.Generator().manual_seed(first)
    data = [tuple(torch.randn(2, 2, WIDTH, generator=generator)) for _ in range(2 * engine.dp_world_size)]
    return engine.train_batch(own_iterator(engine, data)).item()


def weights(engine: Engine) -> dict[str, Tensor]:
    """All parameters that this rank computes with. Collective."""
    module = engine.pipeline_module
    infos = [*module.parameter_infos(), *module.frozen_infos()]
    with parallel3d.zero.GatheredParameters(info.parameter for info in infos):
        return {info.name: info.parameter.detach().clone() for info in infos}


def save(directory: Path, stages: int, zero: int, precision: dict[str, Any]) -> dict[str, Tensor]:
    engine = engine_of(stages, zero, precision)
    train(engine, 0)
    train(engine, 1)
    engine.save_checkpoint(directory, tag="a")
    engine.save_checkpoint(directory, tag="without", exclude_frozen_parameters=True)
    engine.save_16bit_model(directory / "16bit")
    return weights(engine)


def load_and_save(
    source: Path, target: Path, stages: int, zero: int, precision: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    engine = engine_of(stages, zero, precision)
    before = train(engine, 5)  # from the same start, so only what is loaded counts
    module = engine.pipeline_module
    frozen = [info.parameter for info in module.frozen_infos()]
    with parallel3d.zero.GatheredParameters(frozen, modifier_rank=0), torch.no_grad():
        for parameter in frozen:
            parameter.fill_(7.0)
    engine.load_checkpoint(source, tag="without", strict=False)
    partly = {name: weight for name, weight in weights(engine).items() if name not in TRAINED}
    engine.load_checkpoint(source, tag="a")
    engine.save_checkpoint(target, tag="a")
    engine.save_16bit_model(target / "16bit")
    found = weights(engine)
    assert train(engine, 5) != before
    return found, partly


LAYOUTS = [(1, 1, 0), (1, 3, 3), (1, 2, 2), (2, 1, 3), (2, 2, 3)]


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_frozen_and_trained_weights_go_through_all_layouts(run_ranks, tmp_path: Path, precision: dict[str, Any]):
    first = tmp_path / "first"
    ranks = run_ranks(4, save, first, 2, 3, precision)
    wanted = whole_tensors(first / "a")
    assert {name.removeprefix("model/") for name in wanted if "mean" not in name and name.startswith("model/")} == {
        name for own in ranks for name in own
    }
    check_weights(ranks, wanted)
    kept = whole_tensors(first / "without").keys()
    assert {name.removeprefix("model/") for name in kept if name.startswith("model/")} == {*TRAINED, "layers.1.mean"}
    check_file(first / "16bit", wanted)
    source = first
    for k, (stages, dp, zero) in enumerate(LAYOUTS):
        target = tmp_path / str(k)
        found = run_ranks(stages * dp, load_and_save, source, target, stages, zero, precision)
        check_weights([own for own, _ in found], wanted)
        assert all((weight == 7.0).all() for _, partly in found for weight in partly.values())
        check_same(wanted, whole_tensors(target / "a"))
        check_file(target / "16bit", wanted)


def check_weights(ranks: list[dict[str, Tensor]], wanted: dict[str, Tensor]) -> None:
    for own in ranks:
        for name, weight in own.items():
            assert torch.equal(weight, wanted[f"model/{name}"]), name


def check_file(directory: Path, wanted: dict[str, Tensor]) -> None:
    stored = load_file(directory / "model.safetensors")
    assert len(stored) == sum(name.startswith("model/") for name in wanted)
    for name, tensor in stored.items():
        assert torch.equal(tensor, wanted[f"model/{name}"]), name
