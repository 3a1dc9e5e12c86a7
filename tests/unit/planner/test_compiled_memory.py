"""Tensors that a compiled layer saves for its backward, against torch's own partitioner."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.config import load
from parallel3d.config.layout import Layout
from parallel3d.pipe import LayerSpec
from parallel3d.planner.predict.profile import ModelProfile

SHAPE = (2, 8, 64)


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def chain(x: Tensor) -> Tensor:
    return torch.tanh(torch.sin(x) * torch.sigmoid(x)) + x


def in_place(x: Tensor) -> Tensor:
    return torch.sin(x).mul_(2.0) * torch.cos(x)


def mixed_dtypes(x: Tensor) -> Tensor:
    return (x.double().sin() * x).cos().float()


def keeps_its_result(x: Tensor) -> Tensor:
    return torch.exp(2 * x)


class Region(nn.Module):
    """Between two that keep nothing of it."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Begin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SHAPE[-1]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def partitioned(function: Callable[[Tensor], Tensor]) -> int:
    """Bytes that the compiled function saves, by the partitioner that inductor has."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(SHAPE, requires_grad=True)
    compiled = torch.compile(function, backend="aot_eager_decomp_partition", fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = compiled(x)
    assert result.grad_fn is not None
    return sum(saved.values())


def predicted(function: Callable[[Tensor], Tensor], compiled: bool) -> int:
    x = torch.zeros(SHAPE)
    specs = [LayerSpec(Begin), LayerSpec(Region, function)]
    settings = {"optimizer": {"type": "SGD"}, "compile": {"enabled": compiled}}
    profile = ModelProfile(specs, x, x, None, load({"train_micro_batch_size_per_gpu": 2, **settings}), "cuda")
    layer = profile.layers(Layout(micro_batch=SHAPE[0]))[1]
    held = layer.whole.saved
    outputs = [layer.outputs[k].storage for k in held.outputs]
    return held.own + sum(layer.inputs[k] for k in held.inputs) + sum(outputs)


@pytest.mark.parametrize("function", [swiglu, chain, in_place, mixed_dtypes, keeps_its_result])
def test_a_region_saves_what_the_partitioner_says(function: Callable[[Tensor], Tensor]):
    assert predicted(function, compiled=True) == partitioned(function)


def test_eager_layers_save_what_each_operator_does():
    eager = predicted(swiglu, compiled=False)
    assert eager == 4 * 2 * 8 * (64 + 32)  # the input, and silu(gate)
