"""A script's own optimizer with groups of its own, over fp16 weights, whatever gradients are summed and sent in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import parallel3d
from parallel3d.zero import optimizer as sharded

STEPS, ACCUMULATION, DP, SAMPLES, WIDTH, SCALE = 4, 2, 2, 3, 12, 2.0**10
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# data_types.grad_accum_dtype, communication_data_type, and what they come to.
CHOICES = [(None, None, "fp32", "fp32"), ("fp32", "fp16", "fp32", "fp16"), ("bf16", "fp32", "bf16", "fp32")]
ZERO: list[dict[str, Any]] = [
    {"stage": 1},
    {"stage": 2, "reduce_per_micro_batch": False},
    {"stage": 2, "reduce_per_micro_batch": True},
]


class Model(nn.Module):
    """Without biases, whose gradients are summed over samples in fp32 at once, more exactly than PyTorch does."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)]
        self.layers = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return (self.layers(x).float() - labels.float()).square().mean()


def model() -> Model:
    torch.manual_seed(5)
    return Model()


def micro_batch(g: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(g)
    return torch.randn(SAMPLES, WIDTH, generator=draw).half(), torch.randn(SAMPLES, WIDTH, generator=draw).half()


def groups_of(parameters: Sequence[Tensor]) -> list[dict[str, Any]]:
    return [
        {"params": list(parameters[:1])},
        {"params": list(parameters[1:]), "lr": 0.3, "weight_decay": 0.0},
    ]


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.5, weight_decay=0.1)


def train(own: str, accumulators: str | None, sent: str | None, zero: dict[str, Any]) -> Any:
    """On one rank. own: an "object" with a hook, or a "callable" with the groups as model_parameters."""
    module, calls = model(), []
    groups = groups_of(list(module.parameters()))
    by_object = {"optimizer": sgd(groups)}
    by_callable = {"optimizer": sgd, "model_parameters": groups}
    engine, *_ = parallel3d.initialize(
        model=module,
        config={
            "train_micro_batch_size_per_gpu": SAMPLES,
            "gradient_accumulation_steps": ACCUMULATION,
            "fp16": {"enabled": True, "loss_scale": SCALE},
            "data_types": {"grad_accum_dtype": accumulators},
            "communication_data_type": sent,
            "zero_optimization": {"reduce_bucket_size": 150, **zero},
            "steps_per_print": None,
        },
        **(by_object if own == "object" else by_callable),
    )
    if own == "object":
        by_object["optimizer"].register_step_post_hook(lambda *_: calls.append(1))
    else:
        engine.optimizer.step = lambda step=engine.optimizer.step: calls.append(1) or step()
    data = iter([micro_batch(g) for g in range(engine.global_rank, STEPS * ACCUMULATION * DP, DP)])
    losses, norms = [], []
    for _ in range(STEPS):
        with mock.patch.object(sharded, "COPIED_NUMEL", 100):  # of 216 in a shard
            losses.append(engine.train_batch(data).item())
        norms.append(engine.get_global_grad_norm().item())
    return losses, norms, [p.detach().clone() for p in module.parameters()], engine.get_lr(), len(calls)


def expected(accumulators: torch.dtype, sent: torch.dtype, per_micro_batch: bool) -> Any:
    """Plain PyTorch on one process, which rounds where two replicas do."""
    module = model()
    masters = [p.detach().clone() for p in module.parameters()]
    optimizer = sgd(groups_of(masters))
    module.half()
    weights = list(module.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        gradients = torch.zeros(ACCUMULATION, DP, len(weights)).tolist()
        total = 0.0
        for m in range(ACCUMULATION):
            for replica in range(DP):
                loss = module(*micro_batch((step * ACCUMULATION + m) * DP + replica))
                gradients[m][replica] = torch.autograd.grad(loss * (SCALE / ACCUMULATION / DP), weights)
                total += loss.item() / ACCUMULATION / DP
        for k, master in enumerate(masters):
            each = [[gradients[m][r][k] for r in range(DP)] for m in range(ACCUMULATION)]
            if per_micro_batch:
                parts = [summed([g.to(accumulators).to(sent) for g in replicas], sent) for replicas in each]
                reduced = summed(parts, accumulators)
            else:
                own = [summed([replicas[r] for replicas in each], accumulators).to(sent) for r in range(DP)]
                reduced = summed(own, sent).to(accumulators)
            master.grad = reduced.float() / SCALE
        norms.append(torch.stack([master.grad.double().norm() for master in masters]).norm().item())
        optimizer.step()
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master)
        losses.append(total)
    return losses, norms, [w.detach() for w in weights]


def summed(terms: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """One after another, rounded each time."""
    total = terms[0].to(dtype)
    for term in terms[1:]:
        total = (total.double() + term.double()).to(dtype)
    return total


@pytest.mark.parametrize("own", ["object", "callable"])
@pytest.mark.parametrize("zero", ZERO, ids=str)
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_an_own_optimizer_trains_as_torch_does(run_ranks, own: str, zero: dict[str, Any], choice: tuple[Any, ...]):
    accumulators, sent, *dtypes = choice
    per_micro_batch = zero.get("reduce_per_micro_batch", False)
    losses, norms, weights = expected(*(DTYPES[name] for name in dtypes), per_micro_batch)
    _, exact, _ = expected(torch.float32, torch.float32, per_micro_batch)
    assert dtypes == ["fp32", "fp32"] or abs(exact[0] / norms[0] - 1) > 5e-6, "rounding must be seen to be tested"
    in_parts = (
        own == "callable" and accumulators == "bf16"
    )  # copies of gradients, and no hook that would see half a step
    for *found, rates, steps in run_ranks(DP, train, own, accumulators, sent, zero):
        found_losses, found_norms, found_weights = found
        assert rates == [0.1, 0.3]
        assert (steps > STEPS) if in_parts else (steps == STEPS)
        assert found_losses == pytest.approx(losses, rel=1e-6)
        assert found_norms == pytest.approx(norms, rel=1e-6)
        assert all(torch.equal(found, weight) for found, weight in zip(found_weights, weights, strict=True))


def way_of_linear(accumulators: str, **config: Any) -> str:
    """The name of the function of autograd by which an engine computes a bf16 linear in training."""
    module = nn.Sequential(nn.Linear(4, 4))
    engine, *_ = parallel3d.initialize(
        model=module,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD"},
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": accumulators},
            "steps_per_print": None,
            **config,
        },
    )
    return str(engine(torch.ones(1, 4)).grad_fn.name())


def test_what_autograd_can_add_is_left_to_it(run_ranks):
    (own,) = run_ranks(1, way_of_linear, "bf16")
    (wider,) = run_ranks(1, way_of_linear, "fp32")
    assert own.startswith("AddmmBackward")
    assert wider.startswith("SplitLinear")
