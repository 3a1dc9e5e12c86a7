"""Replicas reduce by a kernel where they have one; what is asked for and can't be had, torch and the backend do."""

from __future__ import annotations

import copy
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kernel_stand_ins import GatheredReductions
from torch import Tensor, nn

import parallel3d
from parallel3d import utils
from parallel3d.comm.collectives import DONE, Awaited, Group, Work
from parallel3d.monitor.steps import StepMonitor
from parallel3d.pipe import PipelineModule
from parallel3d.schedule.instructions import Instruction

STEPS, MICRO_BATCHES, SAMPLES = 4, 3, 2
# Of norms and losses: bf16 on the way, or fp32 throughout.
TOLERANCE = {"bf16": 2e-2, "fp32": 1e-5}


class StandIn(GatheredReductions):
    """The kernel's place taken by its reference, which also works on the CPU; counts its calls."""

    def __init__(self, group: Group):
        super().__init__(group)
        self.calls: list[tuple[bool, bool]] = []

    def takes(self, whole: Tensor, output: Tensor, wire: torch.dtype) -> bool:
        return whole.dtype in (torch.float32, wire)

    def squares_size(self, numel: int, wire: torch.dtype) -> int:
        return 5

    def start(self, output: Tensor, whole: Tensor, wire: torch.dtype, accumulate: bool, squares: Tensor | None) -> Work:
        self.calls.append((accumulate, squares is not None))
        self.reduce_into(output, whole, wire, accumulate, squares)
        return DONE


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))


def data(replica: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 + replica)
    return [
        (torch.randn(SAMPLES, 6, generator=generator), torch.randn(SAMPLES, 2, generator=generator))
        for _ in range(STEPS * MICRO_BATCHES)
    ]


def reference(replicas: int) -> tuple[list[float], list[float]]:
    """Plain PyTorch's losses and norms of gradients, of whole batches."""
    plain = net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    own = [data(replica) for replica in range(replicas)]
    losses, norms = [], []
    for step in range(STEPS):
        parts = [part for batches in own for part in batches[step * MICRO_BATCHES : (step + 1) * MICRO_BATCHES]]
        loss = torch.stack([nn.functional.mse_loss(plain(x), y) for x, y in parts]).mean()
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(plain.parameters(), 0.5)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def train(stage: int, communication: str, kernels: dict[str, bool], stand_in: bool) -> Any:
    """(losses, norms, calls of the stand-in, warnings)."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "reduce_per_micro_batch": stage == 2},
        "communication_data_type": communication,
        "kernels": kernels,
        "steps_per_print": None,
    }
    model = PipelineModule(list(copy.deepcopy(net())), num_stages=1, loss_fn=nn.functional.mse_loss)

    def check_launched(monitor: StepMonitor, instruction: Instruction, work: Work) -> None:
        assert isinstance(work, Awaited), "timelines and measurements would lack it"

    with warnings.catch_warnings(record=True) as caught, mock.patch.object(StepMonitor, "launched", check_launched):
        warnings.simplefilter("always")
        engine, *_ = parallel3d.initialize(model=model, config=config)
    calls: list[tuple[bool, bool]] = []
    if stand_in:
        group = engine.process_groups.data
        standing_in = StandIn(group)
        group.use_reduce_scatter(standing_in)
        calls = standing_in.calls
    batches = iter(data(dist.get_rank()))
    losses, norms = [], []
    for _ in range(STEPS):
        losses.append(engine.train_batch(batches).item())
        norms.append(float(engine.get_global_grad_norm()))
    return losses, norms, calls, [str(w.message) for w in caught if str(w.message).startswith("kernels.")]


def write_gradients() -> float:
    """The norm of gradients that the script writes, between the reductions and the step: 3 and 4, and zeros."""
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = parallel3d.initialize(model=net(), config=config)
    engine.process_groups.data.use_reduce_scatter(StandIn(engine.process_groups.data))
    x, y = data(dist.get_rank())[0]
    engine.backward(nn.functional.mse_loss(engine(x), y))
    for parameter in engine.module.parameters():
        written = torch.zeros(parameter.shape)
        written.view(-1)[:2] = torch.tensor([3.0, 4.0]) if parameter is engine.module[0].weight else 0.0
        utils.safe_set_full_grad(parameter, written)
    engine.step()
    return float(engine.get_global_grad_norm())


def test_the_norm_is_of_gradients_that_the_script_has_written(run_ranks) -> None:
    assert run_ranks(2, write_gradients) == [pytest.approx(5.0)] * 2


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("communication", ["fp32", "bf16"])
def test_a_kernel_reduces_and_finds_the_norm_on_its_way(run_ranks, stage: int, communication: str) -> None:
    expected = reference(2)
    for losses, norms, calls, _ in run_ranks(2, train, stage, communication, {}, True):
        assert losses == pytest.approx(expected[0], rel=TOLERANCE[communication])
        assert norms == pytest.approx(expected[1], rel=TOLERANCE[communication])
        assert calls == [(stage == 2, True)] * len(calls)
        assert len(calls) == (STEPS * MICRO_BATCHES if stage == 2 else STEPS)


def test_what_can_not_be_had_is_told_once_and_done_by_torch_and_the_backend(run_ranks) -> None:
    asked = {"reduce_scatter": True, "optimizer_step": True}
    (plain, *_), (first, *others) = (
        run_ranks(2, train, 1, "fp32", {}, False),
        run_ranks(2, train, 1, "fp32", asked, False),
    )
    assert first[:2] == plain[:2]
    assert plain[3] == []
    reduction, step = first[3]
    assert reduction.startswith("kernels.reduce_scatter: ")
    assert reduction.endswith("gloo reduces gradients instead")
    assert step.startswith("kernels.optimizer_step: ")
    assert step.endswith("torch updates weights instead")
    assert all(other[3] == [] for other in others)


def test_where_nothing_is_partitioned_kernels_of_shards_are_told_and_not_opened(run_ranks) -> None:
    asked = {"reduce_scatter": True}
    (*_, told), (*_, others) = run_ranks(2, train, 0, "fp32", asked, False)
    why = "nothing is partitioned; set zero_optimization.stage to 1 or 2; "
    assert told == [f"kernels.reduce_scatter: {why}gloo reduces gradients instead"]
    assert others == []
