"""The state of one parameter, read and written while the training goes on: nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parallel3d
from parallel3d import utils
from parallel3d.errors import ExecutionError
from parallel3d.pipe import LayerSpec, PipelineModule
from parallel3d.tensor_parallel import sum_gradients_over

SIZES = {"train_micro_batch_size_per_gpu": 1, "steps_per_print": None}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}}


class Part(nn.Module):
    """A copied weight, of whose gradient (3, 3) the first of two tensor-parallel ranks computes a third, and the second two."""

    def __init__(self, context: Any = None) -> None:
        super().__init__()
        self.weight, self.factor = nn.Parameter(torch.zeros(2)), context.groups.model.index + 1
        sum_gradients_over([self.weight], context.groups.model)

    def forward(self, x: Tensor) -> Tensor:
        return (self.factor * self.weight * x).sum()


def read_partial_gradients(stage: int, written: float | None) -> tuple[list[Tensor], Tensor, float]:
    config = {**SIZES, **SGD, "tensor_parallel": {"size": 2}, "gradient_accumulation_steps": 2}
    module = PipelineModule([LayerSpec(Part)], num_stages=1, loss_fn=lambda output, _: output, config=config)
    engine, *_ = parallel3d.initialize(model=module, config={**config, "zero_optimization": {"stage": stage}})
    (weight,) = module.parameters()
    read = []
    for _ in range(2):
        engine.backward(engine(torch.ones(2)))
        read = [utils.safe_get_full_grad(weight), utils.safe_get_local_grad(weight)]
        if written is not None and engine.is_gradient_accumulation_boundary():
            utils.safe_set_full_grad(weight, torch.full((2,), written))
        engine.step()
    return [*read, utils.safe_get_full_grad(weight)], weight.detach(), engine.get_global_grad_norm().item()


@pytest.mark.parametrize("written", [None, 5.0])
@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_of_which_ranks_have_parts_can_be_read_and_written(run_ranks, stage: int, written: float | None):
    wanted = torch.full((2,), 3.0)
    used = wanted if written is None else torch.full((2,), written)
    for read, weight, norm in run_ranks(2, read_partial_gradients, stage, written):
        assert all(torch.equal(found, expected) for found, expected in zip(read, (wanted, wanted, used), strict=True))
        assert torch.equal(weight, -used)
        assert norm == pytest.approx(used.norm().item())


def read_between_micro_batches(stage: int, half: dict[str, Any]) -> tuple[str | None, list[float]]:
    config: dict[str, Any] = {**SIZES, **SGD, "gradient_accumulation_steps": 2, **half}
    config["zero_optimization"] = {"stage": stage, "reduce_per_micro_batch": stage == 2}
    engine, *_ = parallel3d.initialize(model=nn.Linear(2, 1), config=config)
    weight, x, refused, read = engine.module.weight, torch.ones(1, 2) + engine.global_rank, None, []
    for _ in range(2):
        engine.backward(engine(x).mean())
        try:
            read.append(utils.safe_get_full_grad(weight)[0, 0].item())
            utils.safe_set_full_grad(weight, utils.safe_get_full_grad(weight))
        except ExecutionError as error:
            refused = str(error)
        engine.step()
    return refused, [*read, utils.safe_get_full_grad(weight)[0, 0].item(), engine.get_global_grad_norm().item()]


@pytest.mark.parametrize(("stage", "half"), [(1, {}), (2, {}), (2, {"fp16": {"enabled": True, "loss_scale": 64}})])
def test_gradients_are_read_and_written_once_they_are_summed(run_ranks, stage: int, half: dict[str, Any]):
    for refused, read in run_ranks(2, read_between_micro_batches, stage, half):
        if stage == 1:
            assert "not yet summed over the 2 replicas" in refused
            assert "at engine.is_gradient_accumulation_boundary()" in refused
        assert read == pytest.approx([*[0.75] * (stage == 2), 1.5, 1.5, (1.5**2 * 2 + 1) ** 0.5])


def read_before_and_after_a_step(zero: dict[str, Any], clipping: float) -> list[Tensor]:
    """Return the gradient before a step, with fp16's loss scale, and after it, as the optimizer's kernel has divided it."""
    module = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    fp16 = {"enabled": True, "initial_scale_power": 8}
    config = {**SIZES, "fp16": fp16, "zero_optimization": zero, "gradient_clipping": clipping}
    engine, *_ = parallel3d.initialize(model=module, optimizer=optimizer, config=config)
    engine.backward(engine(torch.ones(1, 4)).float().sum())
    read = [utils.safe_get_full_grad(module.weight)]
    engine.step()
    return [*read, utils.safe_get_full_grad(module.weight)]


@pytest.mark.parametrize("clipping", [0.0, 0.5])
@pytest.mark.parametrize("offload", [{}, {"offload_optimizer": {"device": "cpu"}}], ids=["resident", "offloaded"])
def test_gradients_that_a_kernel_has_divided_are_not_divided_again(run_ranks, offload, clipping: float):
    [(before, after)] = run_ranks(1, read_before_and_after_a_step, {"stage": 1, **offload}, clipping)
    norm = 10**0.5  # of ten ones: eight of the weight, two of the bias
    torch.testing.assert_close(before, torch.ones(2, 4))
    torch.testing.assert_close(after, torch.full((2, 4), clipping / norm if clipping else 1.0))


def use_parked(zero: dict[str, Any]) -> dict[str, str | None]:
    model = nn.Linear(4, 4)
    config = {**SIZES, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}, "zero_optimization": zero}
    engine, *_ = parallel3d.initialize(model=model, config=config)

    def evaluate() -> Tensor:
        engine.eval()
        return engine(torch.ones(4))

    def evaluate_in_training() -> Tensor:
        engine.train()
        with torch.no_grad():
            return engine(torch.ones(4))

    calls = {
        "evaluate": evaluate,
        "evaluate in training": evaluate_in_training,
        "master": lambda: utils.safe_get_full_fp32_param(model.weight),
        "local master": lambda: utils.safe_get_local_fp32_param(model.weight),
        "written master": lambda: utils.safe_set_full_fp32_param(model.weight, torch.ones(4, 4)),
        "gradient": lambda: utils.safe_get_full_grad(model.weight),
        "moment": lambda: utils.safe_get_full_optimizer_state(model.weight, "exp_avg"),
        "masters": engine.update.master_weights,
        "state_dict": engine.module_state_dict,
        "whole state_dict": engine._consolidated_16bit_state_dict,
    }
    if zero["stage"] == 3:
        calls["gather"] = parallel3d.zero.GatheredParameters(model.weight).__enter__
    engine.backward(engine(torch.ones(4)).sum())
    engine.step()
    engine.offload_states(include=["optim_states"])
    utils.safe_get_full_fp32_param(model.weight)  # is not among these
    engine.offload_states()
    found: dict[str, str | None] = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = None
        except ExecutionError as error:
            found[name] = str(error).split(" to the host")[0].split()[0]
    return found


@pytest.mark.parametrize("zero", [{"stage": 1}, {"stage": 3, "stage3_param_persistence_threshold": 0}], ids=["1", "3"])
def test_state_on_the_host_is_not_used(run_ranks, zero: dict[str, Any]):
    for found in run_ranks(2, use_parked, zero):
        assert set(found.values()) == {"offload_states"}, found


def park_frozen(zero: dict[str, Any]) -> tuple[int, int, bool]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].requires_grad_(False)
    engine, *_ = parallel3d.initialize(model=model, config={**SIZES, **SGD, "zero_optimization": zero})
    before = engine(torch.ones(4)).detach()
    weights = [getattr(p, "ds_tensor", p) for p in model.parameters()]

    def held() -> int:
        return sum(weight.untyped_storage().nbytes() for weight in weights)

    whole = held()
    engine.offload_states(include=["lp_params"])
    left = held()
    engine.reload_states()
    return whole, left, torch.equal(engine(torch.ones(4)), before)


@pytest.mark.parametrize("zero", [{"stage": 1}, {"stage": 3, "stage3_param_persistence_threshold": 0}], ids=["1", "3"])
def test_frozen_weights_go_to_the_host_with_the_others(run_ranks, zero: dict[str, Any]):
    for whole, left, is_same in run_ranks(2, park_frozen, zero):
        assert whole > left == 0
        assert is_same
