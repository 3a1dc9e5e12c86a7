"""A small model with frozen layers, low-rank updates of frozen layers, and parameters smaller than a shard."""

from __future__ import annotations

import torch
from reference import Item
from torch import Tensor, nn

WIDTH = 9  # odd, so that padding and shards' ends lie within parameters


class Frozen(nn.Linear):
    def __init__(self, width: int):
        super().__init__(width, width)
        self.requires_grad_(False)


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank update, and a running mean that differs between replicas."""

    def __init__(self, width: int):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0).to(self.mean.dtype), 0.5)
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Scale(nn.Module):
    """A parameter that is too small for a part on each replica, and a frozen scalar. It fails where it is told to."""

    fails = has_failed = False

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([1.5]))
        self.offset = nn.Parameter(torch.tensor(0.25), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            self.has_failed = True
            raise ValueError("told to fail")
        return x * self.gain + self.offset


LINEAR = Item(nn.Linear, (WIDTH, WIDTH))
ITEMS = [Item(Frozen, (WIDTH,)), Item(Adapted, (WIDTH,)), Item(Frozen, (WIDTH,)), LINEAR, Item(torch.tanh), Item(Scale)]
TRAINED = {"layers.1.down.weight", "layers.1.up.weight", "layers.3.weight", "layers.3.bias", "layers.5.gain"}
# Room for the two largest layers, so that weights are released within a step.
LIMITS = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 480,
    "stage3_prefetch_bucket_size": 200,
}


def squares(output: Tensor, labels: Tensor) -> Tensor:
    return (output.float() - labels).square().mean()


def micro_batches(count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    pairs = (torch.randn(2, 2, WIDTH, generator=generator) for _ in range(count))
    return [(inputs, labels) for inputs, labels in pairs]
