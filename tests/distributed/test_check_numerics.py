"""check_numerics reports where the first inf or NaN appeared; each is planted at a known place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fault_ranks import FaultRanks
from torch import Tensor, nn

import parallel3d
from parallel3d.errors import ExecutionError, NumericsError
from parallel3d.pipe import LayerSpec, PipelineModule


class Planted(nn.Module):
    """A linear inside a layer. plant: what goes wrong in the forward numbered `at`, counted from 0."""

    def __init__(self, plant: str = "", at: int = 5):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.plant, self.at, self.forwards = plant, at, 0

    def forward(self, x: Tensor) -> Tensor:
        wrong = self.forwards == self.at
        self.forwards += 1
        if wrong and self.plant == "input":
            x = x * float("nan")
        y = self.inner(x)
        if wrong and self.plant == "output":
            y = y * float("inf")
        if wrong and self.plant == "gradient":
            y = InfiniteGradient.apply(y)
        if wrong and self.plant == "weight":  # 1e25 * 1e-15, whose gradient by the weight is 1e25 * 1e15
            y = self.inner(x * 0 + 1e25) * 1e-20
            y = Louder.apply(y)
        return y


class InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float("inf")


class Louder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, 1e35)


def mean_square(y: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.mse_loss(y.float(), labels)  # PyTorch 2.11's can't take two dtypes


def bad_loss(y: Tensor, labels: Tensor) -> Tensor:
    bad_loss.calls += 1
    loss = mean_square(y, labels)
    return loss / 0 if bad_loss.calls == 6 else loss


def config_of(schedule: str, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "pipeline": {"schedule": schedule},
        "steps_per_print": None,
        "check_numerics": True,
        **more,
    }


def batches() -> list[tuple[Tensor, Tensor]]:
    return [(torch.ones(2, 4), torch.zeros(2, 4)) for _ in range(4)]


def make_engine(num_stages: int, plant: str, schedule: str, **more: Any) -> Any:
    layers = [LayerSpec(Planted, plant if k == 2 else "") for k in range(4)]
    bad_loss.calls = 0
    loss = bad_loss if plant == "loss" else mean_square
    module = PipelineModule(layers, num_stages=num_stages, partition_method="uniform", loss_fn=loss)
    return parallel3d.initialize(model=module, config=config_of(schedule, **more))[0]


def what_is_said(plant: str, schedule: str) -> str:
    engine = make_engine(1, plant, schedule)
    engine.train_batch(iter(batches()))
    with pytest.raises(NumericsError) as caught:
        engine.train_batch(iter(batches()))
    assert isinstance(caught.value, ExecutionError)
    return str(caught.value)


def compiled_layers_say() -> str:
    layers = [LayerSpec(nn.Sequential, nn.Linear(4, 4)) for _ in range(2)]
    module = PipelineModule(layers, num_stages=1, loss_fn=mean_square)
    compiling = {"enabled": True, "backend": "eager"}
    engine = parallel3d.initialize(model=module, config=config_of("1f1b", compile=compiling))[0]
    engine.train_batch(iter(batches()))
    with torch.no_grad():
        module.layers["1"][0].weight[0, 0] = float("nan")
    with pytest.raises(NumericsError) as caught:
        engine.train_batch(iter(batches()))
    return str(caught.value)


def test_values_of_compiled_layers_are_checked(run_ranks):
    (said,) = run_ranks(1, compiled_layers_say)
    assert "F0@0: NumericsError: NaN in the output of layers.1.0 (Linear) (2 of 8 values, the first at [0, 0])" in said


# Micro-batch 1 of the second step is each layer's forward number 5.
PLACES = {
    "input": "F1@0: NumericsError: NaN in the output of layers.2.inner (Linear) (8 of 8 values, the first at [0, 0])",
    "output": "F1@0: NumericsError: inf in the output of layers.2 (Planted) (",
    "loss": "F1@0: NumericsError: inf in the loss (1 of 1 values, the first at [])",
    "gradient": "B1@0: NumericsError: inf in the gradient of the output of layers.2.inner (Linear) (",
    "weight": "B1@0: NumericsError: inf in the gradient of layers.2.inner.weight (",
}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("plant", PLACES)
def test_the_first_place_is_named(run_ranks: Any, plant: str, schedule: str):
    [said] = run_ranks(1, what_is_said, plant, schedule)
    place = PLACES[plant]
    if schedule == "zb-h1":
        place = place.replace("B1@0", "W1@0" if plant == "weight" else "I1@0")
    assert said.startswith(f"rank 0, stage 0, micro-batch 1, instruction {place}"), said


def by_calls(plant: str) -> str:
    """Checks the second micro-batch."""
    net = nn.Sequential(Planted(), Planted(plant, at=1))
    engine, *_ = parallel3d.initialize(model=net, config=config_of("1f1b"))

    def micro_step() -> None:
        loss = engine(torch.ones(2, 4)).square().mean()
        engine.backward(loss * float("nan") if plant == "loss" and engine.micro_steps == 1 else loss)
        engine.step()

    micro_step()
    with pytest.raises(NumericsError) as caught:
        micro_step()
    return str(caught.value)


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        ("input", "NaN in the output of 1.inner (Linear)"),
        ("gradient", "inf in the gradient of the output of 1.inner (Linear)"),
        ("loss", "NaN in the loss"),
    ],
)
def test_calls_name_it_too(run_ranks: Any, plant: str, said: str):
    assert run_ranks(1, by_calls, plant)[0].startswith(f"rank 0, stage 0, micro-batch 1: {said}")


def overflow() -> tuple[int, float]:
    engine = make_engine(1, "gradient", "1f1b", fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
    for _ in range(3):
        engine.train_batch(iter(batches()))
    return engine.skipped_steps, engine.loss_scale()


def test_an_overflow_is_the_loss_scalers_affair(run_ranks: Any):
    assert run_ranks(1, overflow) == [(1, 8.0)]


def unchecked() -> tuple[int, bool]:
    engine = make_engine(1, "input", "1f1b", check_numerics=False)
    hooks = sum(len(module._forward_hooks) for module in engine.module.modules())
    for _ in range(2):
        loss = engine.train_batch(iter(batches()))
    return hooks, bool(loss.isnan())


def test_nothing_is_looked_at_by_default(run_ranks: Any):
    assert run_ranks(1, unchecked) == [(0, True)]


def train(plant: str) -> None:
    engine = make_engine(2, plant, "1f1b", failures={"timeout_s": 30})
    for _ in range(2):
        engine.train_batch(iter(batches()))


def test_all_ranks_say_it(tmp_path: Path):
    ended = FaultRanks().run(2, tmp_path, train, "gradient")
    assert all(ended.codes), ended.outputs
    lines = {account["verdict"]["line"] for account in ended.accounts.values()}
    assert len(ended.accounts) == 2
    [line] = lines
    assert line.startswith("rank 1 (stage 1, host ")
    assert "failed in B1@1: NumericsError: inf in the gradient of the output of layers.2.inner (Linear)" in line
