"""Compiled blocks compute what plain ones do, without a graph that breaks where only what lies between linears fuses."""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

from parallel3d.autograd.sink import GradientSink
from parallel3d.autograd.split_backward import make_splittable
from parallel3d.models import DecoderConfig
from parallel3d.models.blocks import Block
from parallel3d.models.tables import Tables

SIZES = {"vocab_size": 8, "hidden_size": 16, "ffn_size": 24, "num_layers": 1, "num_heads": 4}
ONLY_BETWEEN_LINEARS = {
    "llama": {},
    "grouped queries, window": {"num_kv_heads": 2, "windows": (3,)},
    "gelu": {"activation": "gelu_tanh"},
    "ungated": {"activation": "relu", "gated": False},
}
BESIDES = {"layer norm": {"norm": "layer"}, "dropout": {"residual_dropout": 0.1}}


def make_block(options: dict[str, Any]) -> Block:
    torch.manual_seed(0)
    config = DecoderConfig(**SIZES, **options)
    return Block(config, 0, Tables(config))


def train(block: nn.Module) -> list[Tensor]:
    """The output of a forward and all gradients of its backward, those of weights deferred."""
    sink = GradientSink()
    make_splittable(block, sink)
    totals = {p: torch.zeros_like(p) for p in block.parameters()}
    for parameter, total in totals.items():
        sink.attach(parameter, total)
    sink.open()
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = block(x)
    with sink.deferring("here"):
        y.sin().sum().backward()
    sink.run_deferred("here")
    assert x.grad is not None
    return [y.detach(), x.grad, *totals.values()]


@pytest.mark.parametrize("options", ONLY_BETWEEN_LINEARS.values(), ids=ONLY_BETWEEN_LINEARS)
def test_a_compiled_block_breaks_no_graph_and_equals_a_plain_one(options: dict[str, Any]):
    torch.compiler.reset()
    plain, compiled = make_block(options), make_block(options)
    compiled.compile(backend="aot_eager", fullgraph=True)
    for got, wanted in zip(train(compiled), train(plain), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("options", BESIDES.values(), ids=BESIDES)
def test_what_fuses_with_the_residual_is_compiled_in_one_with_it(options: dict[str, Any]):
    torch.compiler.reset()
    block = make_block(options)
    block.compile(backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="compile without fullgraph"):
        train(block)


def test_a_copy_of_a_compiled_block_is_a_plain_one():
    torch.compiler.reset()
    block = make_block({})
    wanted = train(block)

    def refuse(*_: object) -> NoReturn:
        raise AssertionError("a copy is compiled")

    block.compile(backend=refuse)
    for got, value in zip(train(copy.deepcopy(block)), wanted, strict=True):
        torch.testing.assert_close(got, value, rtol=0, atol=0)
