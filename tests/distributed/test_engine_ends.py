"""Engines without an optimizer, the end of an engine, and what an optimizer tells of a skipped step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import parallel3d
from parallel3d.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from parallel3d.errors import ConfigError

SIZES = {"train_micro_batch_size_per_gpu": 2, "steps_per_print": float("inf")}
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh()).square().mean()


def evaluate(stage: int) -> tuple[bool, set[str], Any]:
    """Use a reference model, as in preference optimization."""
    x = torch.ones(2, 8)
    wanted = Loss()(x)
    config = {**SIZES, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    engine, optimizer, _, _ = parallel3d.initialize(model=Loss(), config=config)
    loss = engine(x)  # also without engine.eval() nothing is recorded for a backward
    errors = set()
    for train in (lambda: engine.backward(loss), engine.train_batch):
        with pytest.raises(ConfigError) as caught:
            train()
        errors.add(str(caught.value))
    return torch.equal(loss, wanted) and not loss.requires_grad, errors, optimizer


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_without_an_optimizer_evaluates_only(run_ranks, stage: int):
    for equal, errors, optimizer in run_ranks(2, evaluate, stage):
        assert equal
        assert errors == {"no optimizer: set optimizer.type in the configuration, or pass one to initialize"}
        assert optimizer is None


def end() -> tuple[list[int], bool, list[str]]:
    model = Loss()
    engine, optimizer, _, _ = parallel3d.initialize(
        model=model, config={**SIZES, **ADAM, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    )
    engine.backward(engine(torch.ones(2, 8)))
    engine.step()
    held = [t for state in optimizer.state.values() for t in state.values()]
    held += [t for b in engine.update.reducer.all_buckets() for t in (b.gradient_shard, b.master)]
    weights = [p.clone() for p in model.parameters()]
    engine.destroy()
    engine.destroy()
    errors = []
    for use in (lambda: engine.step(), lambda: engine.global_steps, lambda: engine.nowhere):
        with pytest.raises(AttributeError) as caught:
            use()
        errors.append(str(caught.value))
    kept = all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))
    return [t.untyped_storage().nbytes() for t in held], kept, errors


def test_a_destroyed_engine_holds_nothing_but_weights(run_ranks):
    for held, kept, errors in run_ranks(2, end):
        assert sum(held) == 0
        assert len(held) > 4
        assert kept
        assert all("after destroy() make a new engine" in error for error in errors)


def use_scripts_names(directory: Path) -> list[bool]:
    model = Loss()
    model.first.requires_grad_(False)
    # With stage 3, these weights are too small to be sharded.
    engine, *_ = parallel3d.initialize(model=model, config={**SIZES, **ADAM, "zero_optimization": {"stage": 3}})
    engine.set_lr(0.25)
    state = engine.module_state_dict()
    trained = engine.module_state_dict(exclude_frozen_parameters=True)
    engine.save_fp16_model(directory)
    return [
        engine.get_lr() == [0.25],
        state.keys() == model.state_dict().keys(),
        trained.keys() == {"last.weight", "last.bias"} and torch.equal(trained["last.weight"], model.last.weight),
        dist.get_world_size(engine.data_parallel_group) == 2,
        load_file(directory / "model.safetensors").keys() == state.keys(),
        all(p.ds_status is ZeroParamStatus.AVAILABLE and p.ds_numel == p.numel() for p in model.parameters()),
    ]


def test_scripts_find_deepspeeds_other_names(run_ranks, tmp_path: Path):
    for found in run_ranks(2, use_scripts_names, tmp_path):
        assert found == [True] * 6


def skip() -> list[tuple[bool, bool]]:
    engine, optimizer, _, _ = parallel3d.initialize(
        model=Loss(), config={**SIZES, **ADAM, "fp16": {"enabled": True, "initial_scale_power": 2}}
    )
    told = []
    for scale in (1.0, float("inf"), 1.0):
        with pytest.warns(UserWarning, match="skipped") if scale > 1 else torch.enable_grad():
            engine.backward(engine(torch.ones(2, 8)) * scale)
            engine.step()
        told.append((optimizer.overflow, engine.was_step_applied()))
    return told


def test_an_optimizer_tells_of_an_overflow(run_ranks):
    [told] = run_ranks(1, skip)
    assert told == [(False, True), (True, False), (False, True)]
