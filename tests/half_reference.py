"""Training in half precision on one process in plain PyTorch: half weights, fp32 masters and sums, a scaled loss."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from reference import Item, MicroBatch, build
from torch import Tensor, nn


class HalfReference:
    """`step` trains on all micro-batches of the world. dtype: of the weights, None for fp32 under `autocast`'s dtype."""

    def __init__(
        self,
        items: Sequence[Item],
        loss_fn: Callable[[Any, Any], Tensor],
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        dtype: torch.dtype | None,
        clipping: float,
        base_seed: int,
        autocast: torch.dtype | None = None,
    ):
        self.items, self.loss_fn, self.clipping, self.autocast = items, loss_fn, clipping, autocast
        masters = nn.ModuleList([m if m is not None else nn.Identity() for m in build(items, base_seed)])
        self.layers = copy.deepcopy(masters).to(dtype) if dtype is not None else masters
        self.masters, self.weights = list(masters.parameters()), list(self.layers.parameters())
        self.names = [f"layers.{name}" for name, _ in masters.named_parameters()]
        self.optimizer = optimizer(self.masters)
        self.grad_norm = 0.0  # of the last step, before clipping

    def loss(self, inputs: Any, labels: Any) -> Tensor:
        x = inputs.to(self.weights[0].dtype) if inputs.is_floating_point() else inputs
        with torch.autocast("cpu", dtype=self.autocast) if self.autocast is not None else nullcontext():
            for item, layer in zip(self.items, self.layers, strict=True):
                x = item.make(x) if item.is_function else layer(x)
            return self.loss_fn(x, labels)

    def step(self, micro_batches: Sequence[MicroBatch], scale: float = 1.0, update: bool = True) -> float:
        """The mean loss. update: False leaves all as it was."""
        total = 0.0
        sums = [torch.zeros_like(master) for master in self.masters]
        for inputs, labels in micro_batches:
            loss = self.loss(inputs, labels)
            for weight in self.weights:
                weight.grad = None
            (loss * (scale / len(micro_batches))).backward()
            for total_gradient, weight in zip(sums, self.weights, strict=True):
                total_gradient += weight.grad.float()
            total += loss.item() / len(micro_batches)
        if update:
            for master, gradient in zip(self.masters, sums, strict=True):
                master.grad = gradient / scale
            self.grad_norm = float(nn.utils.clip_grad_norm_(self.masters, self.clipping or float("inf")))
            self.optimizer.step()
            with torch.no_grad():
                for weight, master in zip(self.weights, self.masters, strict=True):
                    weight.copy_(master)
        return total

    def named_weights(self) -> Mapping[str, Tensor]:
        return {name: weight.detach().clone() for name, weight in zip(self.names, self.weights, strict=True)}


def distance_of_models(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """‖got - wanted‖ / ‖wanted‖ over all weights together."""
    assert got.keys() == wanted.keys()
    difference = sum(float((got[name].double() - wanted[name].double()).square().sum()) for name in wanted)
    return (difference / sum(float(w.double().square().sum()) for w in wanted.values())) ** 0.5
