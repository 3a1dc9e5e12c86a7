"""The tensor-parallel layer of docs/tensor_parallelism.md, run as printed there, trains as the plain layer does."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parallel3d
from parallel3d import DeepSpeedEngine as Engine
from parallel3d.pipe import LayerSpec, PipelineModule
from parallel3d.tensor_parallel import gather_sequence, scatter_sequence

GUIDE = Path(__file__).parents[2] / "docs" / "tensor_parallelism.md"
BASE_SEED, STEPS, RATE = 5, 3, 0.1
# A slice group of 2 divides neither the sequence nor the inner size.
SAMPLES, SEQ, HIDDEN, INNER = 2, 7, 16, 23


def documented() -> type[nn.Module]:
    (block,) = re.findall(r"```python\n(from parallel3d\.tensor_parallel .*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {"nn": nn, "F": F}
    exec(block, names)
    return names["MLP"]


class Enter(nn.Module):
    def __init__(self, context: Any):
        super().__init__()
        self.context = context

    def forward(self, x: Tensor) -> Tensor:
        return scatter_sequence(x, self.context.groups.model) if self.context.sequence_parallel else x


class Leave(Enter):
    def forward(self, x: Tensor) -> Tensor:
        return gather_sequence(x, self.context.groups.model, SEQ) if self.context.sequence_parallel else x


def micro_batches() -> list[tuple[Tensor, Tensor]]:
    shape = (STEPS, 2, SAMPLES, SEQ, HIDDEN)
    return [(x, y) for x, y in torch.randn(shape, generator=torch.Generator().manual_seed(0))]


def counted_loss(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return F.mse_loss(output, y, reduction="sum"), torch.tensor(y.numel())


def step_by_calls(engine: Engine, x: Tensor, y: Tensor, loss_fn: Callable[..., Any]) -> Tensor:
    loss = loss_fn(engine(x), y)
    engine.backward(loss)
    engine.step()
    return loss[0] / loss[1] if isinstance(loss, tuple) else loss


def train(size: int, sequence_parallel: bool, by_calls: Callable[..., Any] | None) -> tuple[list[float], list[float]]:
    """by_calls: the loss function of steps by calls; by train_batch for None."""
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "tensor_parallel": {"size": size, "sequence_parallel": sequence_parallel},
        "steps_per_print": None,
    }
    layers = [LayerSpec(Enter), LayerSpec(documented(), HIDDEN, INNER), LayerSpec(Leave)]
    model = PipelineModule(layers, 1, loss_fn=F.mse_loss, seed_layers=True, base_seed=BASE_SEED, config=config)
    engine, *_ = parallel3d.initialize(model=model, config=config)
    data, losses, norms = iter(micro_batches()), [], []
    for _ in range(STEPS):
        loss = engine.train_batch(data) if by_calls is None else step_by_calls(engine, *next(data), by_calls)
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm().item())
    return losses, norms


def train_plain() -> tuple[list[float], list[float]]:
    torch.manual_seed(BASE_SEED + 1)  # the layer's place in the list
    mlp = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, INNER), nn.GELU(), nn.Linear(INNER, HIDDEN))
    optimizer, losses, norms = torch.optim.SGD(mlp.parameters(), lr=RATE), [], []
    for x, y in micro_batches():
        loss = F.mse_loss(x + mlp(x), y)
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        norms.append(nn.utils.get_total_norm([p.grad for p in mlp.parameters() if p.grad is not None]).item())
        optimizer.step()
    return losses, norms


CASES = [(1, False, None), (2, False, None), (2, True, None), (2, False, F.mse_loss), (2, True, counted_loss)]


@pytest.mark.parametrize(("size", "sequence_parallel", "by_calls"), CASES)
def test_the_layer_of_the_guide_trains_as_the_plain_one(
    run_ranks, size: int, sequence_parallel: bool, by_calls: Callable[..., Any] | None
):
    losses, norms = train_plain()
    for own_losses, own_norms in run_ranks(size, train, size, sequence_parallel, by_calls):
        assert own_losses == pytest.approx(losses, rel=1e-5)
        assert own_norms == pytest.approx(norms, rel=1e-5)
