"""Selective recomputation: bitwise the gradients of plain autograd, nothing kept is computed twice, and what is held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from parallel3d.autograd.recomputation import Checkpointer
from parallel3d.autograd.sink import GradientSink
from parallel3d.autograd.split_backward import make_splittable
from parallel3d.config import ActivationCheckpointingConfig
from parallel3d.errors import ExecutionError
from parallel3d.models.blocks import Block
from parallel3d.models.config import DecoderConfig
from parallel3d.models.tables import Tables

HIDDEN, FFN, HEADS, SAMPLES, LENGTH = 32, 80, 4, 2, 64


class Operators(TorchDispatchMode):
    """Counts the products and attentions that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator.overloadpacket.__name__
        if name in ("mm", "addmm_", "addmm", "bmm") or "attention" in name:
            self.counts["attention" if "attention" in name else "products"] += "backward" not in name
        return operator(*args, **(kwargs or {}))


def decoder_block(**dropout: float) -> nn.Module:
    options: dict[str, Any] = {"hidden_size": HIDDEN, "ffn_size": FFN, "num_layers": 1, "num_heads": HEADS}
    config = DecoderConfig(vocab_size=16, **options, **dropout)
    return Block(config, 0, Tables(config)).double()


class Users(nn.Module):
    """A layer that knows nothing of this package: convolution, attention by hand, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Conv1d(LENGTH, LENGTH, 3, padding=1), nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x)).tanh()
        x = x + (x @ x.transpose(1, 2)).softmax(-1) @ x
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.1)


def checkpointer(policy: str) -> Checkpointer:
    return Checkpointer(ActivationCheckpointingConfig(policy=policy))


def held_by(run: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """The output, and the bytes that are allocated after the forward and were not before it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        y = run()
    return y, sum(event.self_cpu_memory_usage for event in profile.events())


def train(policy: str | None, make: Callable[[], nn.Module]) -> tuple[list[Tensor], Counter[str], float]:
    """All gradients, those of weights deferred, the operators of the backward, and the elements held for it a position."""
    torch.manual_seed(0)
    layer, sink = make().double(), GradientSink()
    make_splittable(layer, sink)
    totals = {p: torch.zeros_like(p) for p in layer.parameters()}
    for parameter, total in totals.items():
        sink.attach(parameter, total)
    sink.open()
    x = torch.randn(SAMPLES, LENGTH, HIDDEN, dtype=torch.float64).requires_grad_()
    layer(x)  # fills tables
    torch.manual_seed(1)
    y, held = held_by(lambda: layer(x) if policy is None else checkpointer(policy)(layer, x))
    torch.rand(3)  # moves the random state
    with Operators() as operators, sink.deferring("here"):
        y.square().sum().backward()
    sink.run_deferred("here")
    assert x.grad is not None
    state = 0 if policy is None else torch.get_rng_state().nbytes
    return [x.grad, *totals.values()], operators.counts, (held - y.nbytes - state) / (x.nbytes // HIDDEN)


LAYERS = {
    "block": decoder_block,
    "block with dropout": partial(decoder_block, attention_dropout=0.1, residual_dropout=0.1),
    "layer of the user's": Users,
}
# Queries, keys, values, output of the first half, gate and up; with the attention, its output and a logarithm for each head.
PRODUCTS = 4 * HIDDEN + 2 * FFN
BLOCK = {"cheap": PRODUCTS + HIDDEN + HEADS, "attention": PRODUCTS, "full": 0}


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_bitwise_those_of_plain_autograd(name: str):
    wanted, plain, most = train(None, LAYERS[name])
    for policy, elements in BLOCK.items():
        gradients, operators, held = train(policy, LAYERS[name])
        assert all(torch.equal(g, w) for g, w in zip(gradients, wanted, strict=True)), policy
        assert (operators["products"] > plain["products"]) == (policy == "full")
        assert operators["attention"] == (name == "block" and policy != "cheap")
        assert int(held) == elements if name == "block" else held < 0.7 * most


def test_a_kept_result_is_used_as_it_was():
    linear, x = nn.Linear(HIDDEN, HIDDEN), torch.randn(SAMPLES, HIDDEN, requires_grad=True)
    loss = checkpointer("cheap")(lambda x: linear(x).tanh(), x).sum()
    once, twice = (torch.autograd.grad(loss, linear.weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(once, twice)
    square = torch.randn(HIDDEN, HIDDEN, requires_grad=True)
    others = iter((lambda x: x.sin().cos().tanh(), lambda x: x @ x))
    loss = checkpointer("cheap")(lambda x: next(others)(x), square).sum()
    with pytest.raises(ExecutionError, match=r"computes .*mm.* in its recomputation alone"):
        loss.backward()
    loss = checkpointer("cheap")(lambda x: linear(x).mul_(2).sigmoid(), x).sum()
    with pytest.raises(ExecutionError, match=r"addmm.* was changed in place"):
        loss.backward()
    others = iter((linear, lambda x: x @ x))
    loss = checkpointer("cheap")(lambda x: next(others)(x).tanh(), square).sum()
    with pytest.raises(ExecutionError, match=r"addmm.* in its forward, but .*mm.* in its recomputation"):
        loss.backward()
