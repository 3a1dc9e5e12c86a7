"""The reference that every layout must equal: one process, plain PyTorch, nothing of parallel3d.

A model is a list of `Item`s, which says in no library's terms what `PipelineModule` is told by layer specs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

MicroBatch = tuple[Any, Any]
LossFn = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Item:
    """One place in a list of layers: a class and its arguments, or a plain function.

    tie: the key under which the parameters named by `attributes` are shared, the whole module where class and
    arguments are the same too; call(module, x) replaces module(x).
    """

    make: type[nn.Module] | Callable[[Any], Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    tie: str | None = None
    attributes: tuple[str, ...] = ("weight",)
    call: Callable[[nn.Module, Any], Any] | None = None

    @property
    def is_function(self) -> bool:
        return not isinstance(self.make, type)

    def build(self) -> nn.Module:
        return self.make(*self.args, **self.kwargs)


def build(items: Sequence[Item], base_seed: int) -> list[nn.Module | None]:
    """The module at each place, None at a function. Layer k is made under seed base_seed + k, ties as the first of them."""
    modules: list[nn.Module | None] = []
    for k, item in enumerate(items):
        tied = [j for j in range(k) if item.tie is not None and items[j].tie == item.tie]
        same = [
            j for j in tied if (items[j].make, items[j].args, items[j].kwargs) == (item.make, item.args, item.kwargs)
        ]
        if item.is_function:
            modules.append(None)
        elif same:
            modules.append(modules[same[0]])
        else:
            torch.manual_seed(base_seed + k)
            modules.append(item.build())
            if tied:
                for mine, first in zip(item.attributes, items[tied[0]].attributes, strict=True):
                    _replace(modules[k], mine, modules[tied[0]].get_parameter(first))
    return modules


def _replace(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(path), leaf, parameter)


class Reference:
    """Trains a list of items on one process: `step` on all micro-batches of the world, in their global order.

    enter(step, micro_batch, layer): called before each layer in training, to seed what it draws.
    """

    def __init__(
        self,
        items: Sequence[Item],
        loss_fn: LossFn,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        clipping: float = 0.0,
        base_seed: int = 1234,
        prepare: Callable[[Sequence[nn.Module | None]], None] = lambda modules: None,
        enter: Callable[[int, int, int], None] = lambda step, micro_batch, layer: None,
    ):
        self.enter, self.steps = enter, 0
        self.items, self.loss_fn, self.clipping = items, loss_fn, clipping
        self.modules = build(items, base_seed)
        prepare(self.modules)
        self.parameters: dict[str, nn.Parameter] = {}
        for k, (item, module) in enumerate(zip(items, self.modules, strict=True)):
            names = dict(module.named_parameters(remove_duplicate=False)) if module is not None else {}
            # A parameter with several names in its module goes by the one that is tied.
            for name in sorted(names, key=lambda name: item.tie is None or name not in item.attributes):
                if not any(names[name] is known for known in self.parameters.values()):
                    self.parameters[f"layers.{k}.{name}"] = names[name]
        self.trained = [p for p in self.parameters.values() if p.requires_grad]
        self.optimizer = optimizer(self.trained)

    def forward(self, x: Any, enter: Callable[[int], None] = lambda layer: None) -> Any:
        for layer, (item, module) in enumerate(zip(self.items, self.modules, strict=True)):
            enter(layer)
            if module is None:
                x = item.make(x)
            else:
                x = item.call(module, x) if item.call is not None else module(x)
        return x

    def step(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, float]:
        """One optimizer step; returns the mean loss and the gradient norm before clipping."""
        self.optimizer.zero_grad()
        total = 0.0
        for g, (inputs, labels) in enumerate(micro_batches):
            loss = self.loss_fn(self.forward(inputs, partial(self.enter, self.steps, g)), labels)
            (loss / len(micro_batches)).backward()
            total += loss.item() / len(micro_batches)
        squares = [p.grad.double().square().sum() for p in self.trained if p.grad is not None]
        norm = float(torch.stack(squares).sum().sqrt())
        if self.clipping:
            nn.utils.clip_grad_norm_(self.trained, self.clipping)
        self.optimizer.step()
        self.steps += 1
        return total, norm

    @torch.no_grad()
    def losses(self, micro_batches: Iterable[MicroBatch]) -> list[float]:
        return [self.loss_fn(self.forward(inputs), labels).item() for inputs, labels in micro_batches]

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters.items()}


def distance(got: Tensor, wanted: Tensor) -> float:
    """‖got - wanted‖ / ‖wanted‖."""
    return float((got.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))
