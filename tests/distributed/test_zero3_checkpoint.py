"""Checkpoints of ZeRO-3: trained and frozen weights go from any layout into any, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import adapted
import pytest
import torch
from adapted import ITEMS, LIMITS, TRAINED, micro_batches, squares
from layouts import make_engine, own_iterator
from safetensors.torch import load_file
from test_checkpoint_layouts import check_same, whole_tensors
from torch import Tensor, nn

import parallel3d
from parallel3d import DeepSpeedEngine as Engine

# Stage 3 with its shards in host memory.
ON_HOST = {"stage": 3, "offload_param": {"device": "cpu"}}


def engine_of(stages: int, zero: int | dict[str, Any], precision: dict[str, Any]) -> Engine:
    return make_engine(
        ITEMS,
        squares,
        optimizer="AdamW",
        accumulation=2,
        pipeline={"stages": stages},
        zero_optimization={
            **(zero if isinstance(zero, dict) else {"stage": zero}),
            "reduce_bucket_size": 100,
            **LIMITS,
        },
        **precision,
    )


def train(engine: Engine, first: int) -> float:
    return engine.train_batch(own_iterator(engine, micro_batches(2 * engine.dp_world_size, first))).item()


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
    source: Path, target: Path, stages: int, zero: int | dict[str, Any], precision: dict[str, Any]
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


LAYOUTS = [(1, 1, 0), (1, 3, 3), (1, 1, ON_HOST), (1, 2, 2), (2, 1, 3), (2, 2, ON_HOST)]


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


class Plain(nn.Module):
    """The same layers as one module, whose blocks are its units."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList([adapted.Adapted(adapted.WIDTH) for _ in range(3)])
        self.scale = adapted.Scale()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return squares(self.scale(x), labels)


def save_plain(source: Path | None, target: Path, stage: int) -> dict[str, Tensor]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, **LIMITS},
        "steps_per_print": None,
    }
    engine, *_ = parallel3d.initialize(model=Plain(), config=config)
    if source is None:
        engine.train_batch(iter(micro_batches(1, torch.distributed.get_rank())))
    else:
        engine.load_checkpoint(source, tag="a")
    engine.save_checkpoint(target, tag="a")
    return weights(engine)


def test_a_plain_module_goes_to_other_stages_and_back(run_ranks, tmp_path: Path):
    ranks = run_ranks(2, save_plain, None, tmp_path / "3", 3)
    wanted = whole_tensors(tmp_path / "3" / "a")
    check_weights(ranks, wanted)
    for source, target, ranks_there, stage in (("3", "0", 1, 0), ("0", "back", 3, 3)):
        check_weights(run_ranks(ranks_there, save_plain, tmp_path / source, tmp_path / target, stage), wanted)
        check_same(wanted, whole_tensors(tmp_path / target / "a"))
