"""Models of the checkpoints next to this file, and their data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

STEPS = 2


class Net(nn.Module):
    """Odd sizes, two groups of parameters, a frozen parameter, a tied one, a buffer."""

    def __init__(self, frozen: bool = True) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 5).requires_grad_(not frozen)
        self.norm = nn.LayerNorm(5)
        self.first = nn.Linear(5, 5)
        self.tied = nn.Linear(5, 5, bias=False)
        self.tied.weight = self.first.weight
        self.last = nn.Linear(5, 3, bias=False)
        self.register_buffer("scale", torch.tensor([1.5, 2.0, 0.5]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.tied(self.first(self.norm(self.frozen(x))).tanh())
        return (self.last(hidden) * self.scale - y).square().mean()


class Halves(nn.Module):
    """A column-parallel and a row-parallel layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3)
        self.up = nn.Linear(3, 4)
        self.down = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.down(self.up(self.norm(x)).tanh()) - y).square().mean()


class Scale(nn.Module):
    """A layer without trained parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([1.5, 2.0, 0.5]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def transposed(module: nn.Linear, x: Tensor) -> Tensor:
    return x @ module.weight


def layers(tied: bool, LayerSpec: Any, TiedLayerSpec: Any) -> list[Any]:
    """Return the layers of a pipeline."""
    if not tied:
        return [nn.Linear(3, 5), torch.tanh, LayerSpec(nn.LayerNorm, 5), LayerSpec(nn.Linear, 5, 3), Scale()]
    first = TiedLayerSpec("io", nn.Linear, 3, 5, bias=False, tied_weight_attr=["weight"])
    last = TiedLayerSpec("io", nn.Linear, 3, 5, bias=False, forward_fn=transposed, tied_weight_attr=["weight"])
    return [first, torch.tanh, LayerSpec(nn.LayerNorm, 5), last, LayerSpec(nn.LayerNorm, 3), Scale()]


def samples(step: int, replica: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    return tuple(torch.randn(2, 3, generator=generator).to(dtype) for _ in range(2))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
