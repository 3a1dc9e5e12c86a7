"""Weights that a script writes itself, between steps: the next step goes on from them, in every precision and stage."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parallel3d
from parallel3d import DeepSpeedEngine as Engine
from parallel3d.pipe import LayerSpec, PipelineModule

SIZE, LR = 6, 0.5


class Weigh(nn.Module):
    """Its weight's gradient is its input, whatever the weight is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((SIZE,), 8.0))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum(-1, keepdim=True)


class Pass(nn.Module):
    """Hands x to the next layer through a sum with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def total(output: Tensor, _: Any) -> Tensor:
    return output.sum()


BF16 = {"bf16": {"enabled": True}}
X = torch.tensor([1.0, -2.0, 0.5, 4.0, -1.0, 0.25])


def make(stages: int, precision: dict[str, Any], zero: dict[str, Any]) -> Engine:
    specs = [LayerSpec(Pass), LayerSpec(Weigh)]
    model = PipelineModule(specs, num_stages=stages, loss_fn=total) if stages else Weigh()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": zero,
        "steps_per_print": None,
        **precision,
    }
    return parallel3d.initialize(model=model, config=config)[0]


def train_and_write(stages: int, precision: dict[str, Any], zero: dict[str, Any], how: str) -> list[float] | None:
    engine = make(stages, precision, zero)
    batch = (X, None) if stages else (X,)
    state = {k: torch.full_like(v, 2.0 if "weight" in k else 0.0) for k, v in engine.module.state_dict().items()}
    engine.train_batch(iter([batch]))
    if how == "load":
        engine.module.load_state_dict(state)  # maybe while the step's weights are on their way
    else:
        with torch.no_grad():
            for name, parameter in engine.module.named_parameters():
                if "weight" in name:
                    parameter.clamp_(max=2.0, min=2.0)
                else:
                    parameter.zero_()
    engine.train_batch(iter([batch]))
    found = [p for n, p in engine.module.named_parameters() if n.endswith("weight")]
    return found[0].float().tolist() if found else None


@pytest.mark.parametrize("how", ["load", "clamp"])
@pytest.mark.parametrize("zero", [{"stage": 0}, {"stage": 1}, {"stage": 2}], ids=str)
@pytest.mark.parametrize(
    "precision", [{}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "loss_scale": 8}}], ids=str
)
@pytest.mark.parametrize("stages", [0, 2])
def test_a_step_goes_on_from_what_was_written(
    run_ranks, stages: int, precision: dict[str, Any], zero: dict[str, Any], how: str
):
    ranks = [r for r in run_ranks(4 if stages else 2, train_and_write, stages, precision, zero, how) if r is not None]
    assert len(ranks) == 2
    assert ranks == [(2.0 - LR * X).tolist()] * 2  # all exact in half precision


def write_and_load(directory: str, zero: dict[str, Any]) -> list[list[float]]:
    engine, model = make(0, {"bf16": {"enabled": True}}, zero), Weigh()
    engine.train_batch(iter([(X / 1024,)]))  # of its masters, 8 - LR * X / 1024, the weights have 8 bits
    engine.save_checkpoint(directory)
    model.kept = nn.Parameter(torch.zeros(1))  # which the checkpoint doesn't have
    wider, *_ = parallel3d.initialize(model=model, config=engine.config)
    with torch.no_grad():
        for parameter in wider.module.parameters():
            parameter.fill_(3.0)
    wider.load_checkpoint(directory, strict=False)
    read = [parallel3d.utils.safe_get_full_fp32_param(p) for p in wider.module.parameters()]
    wider.train_batch(iter([(torch.zeros(SIZE),)]))
    read += [parallel3d.utils.safe_get_full_fp32_param(p) for p in wider.module.parameters()]
    return [each.tolist() for each in read]


@pytest.mark.parametrize("zero", [{"stage": 0}, {"stage": 1}], ids=str)
def test_a_checkpoint_replaces_what_was_written_and_leaves_the_rest(run_ranks, tmp_path: Path, zero: dict[str, Any]):
    loaded, kept = (8.0 - LR * X.bfloat16().float() / 1024).tolist(), [3.0]
    assert run_ranks(2, write_and_load, str(tmp_path), zero) == [[loaded, kept] * 2] * 2


def write_and_read(zero: dict[str, Any]) -> list[list[float]]:
    engine = make(0, {"bf16": {"enabled": True}}, zero)
    (weight,) = engine.module.parameters()
    with parallel3d.zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
        weight.fill_(2.0)
    first = parallel3d.utils.safe_get_full_fp32_param(weight)
    with parallel3d.zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
        weight.fill_(4.0)
    value = torch.full((SIZE,), 3.0 + 2.0**-20)
    parallel3d.utils.safe_set_full_fp32_param(weight, value)
    engine.train_batch(iter([(torch.zeros(SIZE),)]))
    return [first.tolist(), (parallel3d.utils.safe_get_full_fp32_param(weight) - value).tolist()]


@pytest.mark.parametrize(
    "zero", [{"stage": 0}, {"stage": 1}, {"stage": 3, "stage3_param_persistence_threshold": 0}], ids=str
)
def test_masters_that_are_read_or_written_are_those_of_the_weights(run_ranks, zero: dict[str, Any]):
    assert run_ranks(2, write_and_read, zero) == [[[2.0] * SIZE, [0.0] * SIZE]] * 2


def clamp_often(zero: dict[str, Any]) -> list[float]:
    engine = make(0, {"bf16": {"enabled": True}}, zero)
    (weight,) = engine.module.parameters()
    for _ in range(4):
        engine.train_batch(iter([(X / 4096,)]))  # less than the weights' precision
        with parallel3d.zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
            weight.clamp_(-8.0, 8.0)
    with parallel3d.zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
        weight[0] = 7.0
    return parallel3d.utils.safe_get_full_fp32_param(weight).tolist()


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 0},
        {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        {"stage": 3, "stage3_param_persistence_threshold": 0},
    ],
    ids=str,
)
def test_masters_of_what_a_write_leaves_keep_their_precision(run_ranks, zero: dict[str, Any]):
    wanted = 8.0 - 4 * LR * X.bfloat16().float() / 4096
    wanted[0] = 7.0
    assert run_ranks(2, clamp_often, zero) == [wanted.tolist()] * 2


def write_on_one_replica(threshold: int, frozen: bool) -> list[list[float]]:
    model = nn.ModuleList([Weigh(), Weigh()])
    model[0].requires_grad_(not frozen)
    model.forward = lambda x: model[0](x) + model[1](x)
    zero = {"stage": 3, "stage3_param_persistence_threshold": threshold}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": LR}}, **BF16}
    engine, *_ = parallel3d.initialize(model=model, config={**config, "zero_optimization": zero})
    with parallel3d.zero.GatheredParameters(model.parameters(), modifier_rank=1), torch.no_grad():
        if engine.global_rank == 1:
            for parameter in model.parameters():
                parameter.copy_(-X)
    copied = copy.deepcopy(model[0])  # a script may
    found = []
    for _ in range(2):
        with parallel3d.zero.GatheredParameters(model.parameters()):
            found += [parameter.float().tolist() for parameter in model.parameters()]
        engine.train_batch(iter([(X,)]))
    return [*found, [float(hasattr(copied.weight, "replicas"))]]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("threshold", [0, 100_000])
def test_what_one_replica_writes_is_what_all_have(run_ranks, threshold: int, frozen: bool):
    before, after = (-X).tolist(), (-X - LR * X).tolist()
    wanted = [before, before, before if frozen else after, after, [0.0]]
    assert run_ranks(2, write_on_one_replica, threshold, frozen) == [wanted] * 2


def move_away() -> str:
    engine = make(0, {"bf16": {"enabled": True}}, {"stage": 1})
    engine.module.double()
    try:
        engine.train_batch(iter([X]))
    except parallel3d.Parallel3DError as error:
        return str(error)
    return "no error"


def test_weights_in_memory_of_their_own_are_an_error(run_ranks):
    for message in run_ranks(2, move_away):
        assert message.startswith("parameter weight left the buffer that is trained")
