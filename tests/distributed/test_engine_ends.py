"""Engines without an optimizer, the end of an engine, and what an optimizer tells of a skipped step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import SequentialSampler, TensorDataset

import parallel3d
from parallel3d.deepspeed.runtime import PipeDataParallelTopology, PipelineParallelGrid, ZeroParamStatus
from parallel3d.errors import ConfigError
from parallel3d.pipe import PipelineModule

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
    model.other_name = model.first  # frozen by either name
    trained = engine.module_state_dict(exclude_frozen_parameters=True)
    named = engine.module_state_dict({}, "own.", exclude_frozen_parameters=True)
    del model.other_name
    engine.save_fp16_model(directory)
    return [
        engine.get_lr() == [0.25],
        state.keys() == model.state_dict().keys(),
        [f"own.{name}" for name in trained] == list(named),
        trained.keys() == {"last.weight", "last.bias"} and torch.equal(trained["last.weight"], model.last.weight),
        dist.get_world_size(engine.data_parallel_group) == 2,
        load_file(directory / "model.safetensors").keys() == state.keys(),
        all(p.ds_status is ZeroParamStatus.AVAILABLE and p.ds_numel == p.numel() for p in model.parameters()),
    ]


def test_scripts_find_deepspeeds_other_names(run_ranks, tmp_path: Path):
    for found in run_ranks(2, use_scripts_names, tmp_path):
        assert found == [True] * 7


def sum_gradients(stage: int, clipping: float) -> list[Tensor]:
    """Return a gradient, its norm and an updated weight of replicas whose mean gradient is (1.5, 3)."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    config = {
        **SIZES,
        "gradient_allreduce_op": "SUM",
        "zero_optimization": {"stage": stage},
        "gradient_clipping": clipping,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = parallel3d.initialize(model=model, config=config, optimizer=optimizer)
    engine.backward(engine(torch.tensor([1.0, 2.0]) * (dist.get_rank() + 1)).sum())
    gradient = parallel3d.utils.safe_get_full_grad(model.weight)
    engine.step()
    return [gradient, engine.get_global_grad_norm(), model.weight.detach()]


@pytest.mark.parametrize(("stage", "clipping"), [(0, 0.0), (2, 1.0)])
def test_gradients_can_be_summed_over_replicas(run_ranks, stage: int, clipping: float):
    wanted = torch.tensor([[3.0, 6.0]])
    for gradient, norm, weight in run_ranks(2, sum_gradients, stage, clipping):
        assert torch.equal(gradient, wanted)
        torch.testing.assert_close(norm.item(), wanted.norm().item())
        torch.testing.assert_close(weight, -wanted / (wanted.norm() if clipping else 1.0), rtol=1e-5, atol=1e-6)


def choose_scheduler() -> tuple[str, list[str]]:
    config = {**SIZES, **ADAM, "scheduler": {"type": "WarmupLR"}}
    told = []
    with pytest.warns(UserWarning, match="lr_scheduler= is used, and the configuration's scheduler WarmupLR is not"):
        *_, used = parallel3d.initialize(
            model=Loss(), config=config, lr_scheduler=lambda o: torch.optim.lr_scheduler.ConstantLR(o)
        )
    other = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(Loss().parameters(), lr=1.0))
    for wrong in ({"lr_scheduler": other}, {"mesh_param": (1, 2)}, {"lr_scheduler": "cosine"}, {"optimizer": "AdamW"}):
        with pytest.raises(ConfigError) as caught:
            parallel3d.initialize(model=Loss(), config={**SIZES, **ADAM}, **wrong)
        told.append(str(caught.value))
    return type(used).__name__, told


def test_the_callers_scheduler_is_used_unless_it_is_anothers(run_ranks):
    [(used, (other, mesh, schedule, optimizer))] = run_ranks(1, choose_scheduler)
    assert used == "ConstantLR"
    assert "is a ConstantLR of another optimizer than the engine's AdamW" in other
    assert "2 ranks share a sequence" in mesh
    assert "lr_scheduler= is a str; give a schedule, which has step()" in schedule
    assert "optimizer= is a str; give an optimizer" in optimizer


def use_a_pipelines_names() -> list[Any]:
    """Recompute layers as initialize's configuration says, of a module that was built without one."""
    module = PipelineModule([nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)], num_stages=2, loss_fn=nn.MSELoss())
    config = {
        **SIZES,
        **ADAM,
        "pipeline": {"activation_checkpoint_interval": 1, "seed_layers": True, "use_reentrant": True},
    }
    engine, *_ = parallel3d.initialize(model=module, config=config)
    ran = []
    for layer in module.layers.values():
        layer.register_forward_pre_hook(lambda *_: ran.append(1))
    engine.set_train_micro_batch_size(4)
    data = TensorDataset(torch.randn(8, 8), torch.randn(8, 1))
    with pytest.warns(UserWarning, match="num_local_io_workers=2 is not used"):
        loader = engine.deepspeed_io(data, num_local_io_workers=2)
    sampled = engine.deepspeed_io(data, route="eval", batch_size=8, data_sampler=SequentialSampler(data))
    engine.train_batch(iter(loader))
    grid = PipelineParallelGrid(topology=PipeDataParallelTopology(2, 1))
    return [
        len(ran) == 2 * len(module.layers),
        (len(loader), len(sampled), engine.get_batch_info()) == (2, 1, (4, 4, 1)),
        isinstance(engine, parallel3d.PipelineEngine),
        (grid.pp_group, grid.dp_group, grid.is_first_stage) == ([0, 1], [dist.get_rank()], dist.get_rank() == 0),
    ]


def test_a_pipelines_scripts_find_deepspeeds_names(run_ranks):
    for found in run_ranks(2, use_a_pipelines_names):
        assert found == [True] * 4


def skip() -> list[tuple[bool, bool]]:
    engine, optimizer, _, _ = parallel3d.initialize(
        model=Loss(), config={**SIZES, **ADAM, "fp16": {"enabled": True, "initial_scale_power": 2}}
    )
    assert optimizer.loss_scaler.loss_scale == optimizer.loss_scale_config.cur_scale == engine.loss_scale() == 4.0
    assert optimizer.dynamic_loss_scale
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
