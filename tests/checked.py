"""Subjects of `p3d check`: the small decoder of toy3d, right and with planted faults."""

from __future__ import annotations

from typing import Any

import toy3d
from layouts import specs
from torch import Tensor, nn

from parallel3d.parity import Subject
from parallel3d.pipe import LayerSpec


class Loss(nn.Module):
    """Mean, or sum and count, of the cross entropy: sliced where a context is given."""

    def __init__(self, per_token: bool = False, context: Any = None):
        super().__init__()
        self.per_token = per_token
        self.sliced = toy3d.SlicedLoss(per_token, context) if context is not None else None

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        if self.sliced is not None:
            return self.sliced(x, labels)
        loss = toy3d.plain_loss(x, labels)
        return (loss * labels.numel(), labels.numel()) if self.per_token else loss


class FaultyMLP(toy3d.MLP):
    """One rank of the tensor slices scales one gradient by 1.001."""

    def __init__(self, context: Any = None):
        super().__init__(context)
        if context is not None and context.groups.coordinate("model") == 1:
            self.gate_up.weight.register_hook(lambda gradient: gradient * 1.001)


CONFIG = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-6}},
    "gradient_clipping": 0.3,
    "zero_optimization": {"reduce_bucket_size": 1500},
}


def decoder() -> Subject:
    return Subject(specs(toy3d.model(tied=True, num_blocks=1)), toy3d.micro_batch, LayerSpec(Loss), CONFIG)


def by_tokens() -> dict[str, Any]:
    layers = specs(toy3d.model(tied=False, num_blocks=1))
    return {"layers": layers, "micro_batch": toy3d.micro_batch, "loss_fn": LayerSpec(Loss, True), "config": CONFIG}


def faulty() -> Subject:
    layers = specs(toy3d.model(tied=True, num_blocks=1))
    layers[2] = LayerSpec(FaultyMLP)
    return Subject(layers, toy3d.micro_batch, LayerSpec(Loss), CONFIG)


def two_layers() -> Subject:
    layers = [LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 4)]
    return Subject(layers, toy3d.micro_batch, nn.functional.mse_loss)


def not_a_subject() -> list[Any]:
    return []
