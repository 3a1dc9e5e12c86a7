"""A row layer, the residual and the norm behind it in one kernel: the numbers of plain torch, and when it is left alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kernel_stand_ins import NormsStandIn
from torch import Tensor, nn

from parallel3d.autograd.sink import GradientSink
from parallel3d.autograd.split_backward import make_splittable
from parallel3d.comm.collectives import Group
from parallel3d.kernels.all_reduce_kernel import GatheredSums
from parallel3d.models import DecoderConfig
from parallel3d.models.blocks import Block
from parallel3d.models.tables import Tables
from parallel3d.parameters import slicing_of
from parallel3d.specs import BuildContext
from parallel3d.tensor_parallel import RowParallelLinear, regions
from parallel3d.tensor_parallel.linear import from_linear
from parallel3d.tensor_parallel.row_norm import has_row_norm, row_rms_norm

IN, OUT, EPS = 12, 10, 1e-5
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def world() -> Group:
    return Group(tuple(range(dist.get_world_size())), dist.group.WORLD)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@contextmanager
def halving() -> Iterator[None]:
    """Products as small as these are communicated in halves."""
    with mock.patch.object(regions, "HALVES_FROM", 0):
        yield


def whole_tensors(dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    """Weight, gain, input and residual, the same on every rank; the gradients of norm and hidden."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((OUT, IN), (OUT,), (2, 5, IN), (2, 5, OUT), (2, 5, OUT), (2, 5, OUT))
    *tensors, first, second = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
    return [*tensors], first, second


def in_double(dtype: torch.dtype, used: Sequence[int]) -> list[Tensor]:
    """Norm, hidden and the gradients of all tensors, by plain torch."""
    tensors, *given = whole_tensors(dtype)
    weight, gain, x, residual = (t.double().requires_grad_() for t in tensors)
    hidden = residual + x @ weight.t()
    normed = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + EPS) * gain
    torch.autograd.backward([(normed, hidden)[k] for k in used], [given[k].double() for k in used])
    return [normed.detach(), hidden.detach(), *(t.grad for t in (weight, gain, x, residual) if t.grad is not None)]


def by_kernel(dtype: torch.dtype, used: Sequence[int], halves: bool, deferred: bool) -> None:
    """On a rank, beside plain torch, and hidden bit by bit beside the sum's kernel and an addition."""
    group = world()
    group.kernels.all_reduce_norm = stand_in = NormsStandIn(group)
    tensors, *given = whole_tensors(dtype)
    layer = from_linear(RowParallelLinear, nn.Linear(IN, OUT, False), group=group)
    layer.take(nn.Parameter(tensors[0]))
    norm = nn.RMSNorm(OUT, EPS, dtype=dtype)
    norm.weight = nn.Parameter(tensors[1])
    part = slice(group.index * IN // group.size, (group.index + 1) * IN // group.size)
    x, residual = tensors[2][..., part].clone().requires_grad_(), tensors[3].clone().requires_grad_()
    assert has_row_norm(layer, norm)
    sink, total = GradientSink(), torch.zeros_like(layer.weight)
    if deferred:
        make_splittable(layer, sink)
        sink.attach(layer.weight, total)
        sink.open()
    with halving() if halves else mock.patch.object(regions, "HALVES_FROM", 2**40):
        results = row_rms_norm(layer, x, residual, norm)
    assert stand_in.calls == ([(5, "hidden"), (5, "beside")] if halves else [(10, "at once")])
    with sink.deferring("here"):
        torch.autograd.backward([results[k] for k in used], [given[k] for k in used])
    if deferred:
        assert not total.any(), "the weight's gradient is left for later"
        sink.run_deferred("here")
        layer.weight.grad = total
    found = [*results, layer.weight.grad, *([norm.weight.grad] if 0 in used else []), x.grad, residual.grad]
    wanted = in_double(dtype, used)
    weight_at, x_at = 2, 4 if 0 in used else 3
    wanted[weight_at], wanted[x_at] = wanted[weight_at][:, part], wanted[x_at][..., part]
    for number, (got, right) in enumerate(zip(found, wanted, strict=True)):
        assert distance(got.detach(), right) <= TOLERANCE[dtype], (number, distance(got.detach(), right))
    partial = torch.empty(2, 5, OUT, dtype=dtype)
    GatheredSums(group).sum_into(partial, x.detach() @ layer.weight.detach().t())
    assert torch.equal(results[1].detach(), residual.detach() + partial)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("halves", [False, True])
def test_values_and_gradients_are_plain_torchs(run_ranks, dtype: torch.dtype, halves: bool) -> None:
    run_ranks(2, by_kernel, dtype, (0, 1), halves, False)


@pytest.mark.parametrize("used", [(0,), (1,)], ids=["norm", "hidden"])
def test_one_of_the_two_results_may_go_unused(run_ranks, used: tuple[int, ...]) -> None:
    run_ranks(2, by_kernel, torch.float64, used, False, False)


def test_the_weights_gradient_can_be_deferred(run_ranks) -> None:
    run_ranks(2, by_kernel, torch.float64, (0, 1), False, True)


def asks_for_the_input_alone() -> None:
    group = world()
    group.kernels.all_reduce_norm = NormsStandIn(group)
    layer, norm = RowParallelLinear(IN, OUT, False, group=group), nn.RMSNorm(OUT, EPS)
    sink, total = GradientSink(), torch.zeros_like(layer.weight)
    make_splittable(layer, sink)
    sink.attach(layer.weight, total)
    sink.open()
    x = torch.randn(3, IN // group.size, requires_grad=True)
    normed, _ = row_rms_norm(layer, x, torch.randn(3, OUT), norm)
    with sink.deferring("here"):
        normed.sum().backward(inputs=[x])
    sink.run_deferred("here")
    assert x.grad is not None
    assert not total.any()


def test_a_backward_to_the_input_alone_gives_the_weight_no_gradient(run_ranks) -> None:
    run_ranks(2, asks_for_the_input_alone)


def what_it_leaves_alone() -> tuple[list[bool], int]:
    """Of layers built otherwise, whether it computes them; the calls under autocast, of tensors that are alike."""
    group, norm = world(), nn.RMSNorm(OUT, EPS)
    group.kernels.all_reduce_norm = stand_in = NormsStandIn(group)
    options: list[dict[str, Any]] = [{}, {"sequence_parallel": True}, {"input_is_parallel": False}, {"bias": True}]
    layers = [RowParallelLinear(IN, OUT, **{"bias": False, **given}, group=group) for given in options]
    found = [has_row_norm(layer, norm) for layer in layers]
    found += [has_row_norm(layers[0], other) for other in (nn.LayerNorm(OUT), nn.RMSNorm(OUT))]
    with torch.autocast("cpu", torch.bfloat16):
        row_rms_norm(layers[0], torch.randn(3, IN // group.size), torch.randn(3, OUT), norm)
    group.kernels.all_reduce_norm = None
    return [*found, has_row_norm(layers[0], norm)], len(stand_in.calls)


def test_other_layers_norms_and_autocast_are_left_alone(run_ranks) -> None:
    assert run_ranks(2, what_it_leaves_alone) == [([True] + [False] * 6, 0)] * 2


def frozen() -> list[tuple[bool, ...]]:
    """Of weight, norm, input and residual, which have a gradient, if only one of them needs one."""
    group = world()
    group.kernels.all_reduce_norm = NormsStandIn(group)
    found = []
    for needed in range(4):
        torch.manual_seed(1)
        layer = RowParallelLinear(IN, OUT, False, group=group).requires_grad_(needed == 0)
        norm = nn.RMSNorm(OUT, EPS).requires_grad_(needed == 1)
        x, residual = torch.randn(3, IN // group.size), torch.randn(3, OUT)
        tensors = (layer.weight, norm.weight, x.requires_grad_(needed == 2), residual.requires_grad_(needed == 3))
        normed, hidden = row_rms_norm(layer, x, residual, norm)
        (normed.sum() + hidden.square().sum()).backward()
        found.append(tuple(t.grad is not None for t in tensors))
    return found


def test_frozen_tensors_get_no_gradient(run_ranks) -> None:
    assert run_ranks(2, frozen) == [[tuple(k == n for k in range(4)) for n in range(4)]] * 2


SIZES = {"vocab_size": 8, "hidden_size": 16, "ffn_size": 24, "num_layers": 1, "num_heads": 4}


def make_block(group: Group, sequence_parallel: bool = False, **options: Any) -> Block:
    config = DecoderConfig(**SIZES, **options)
    groups: Any = SimpleNamespace(model=group)
    context = BuildContext(groups, torch.device("cpu"), sequence_parallel)
    torch.manual_seed(0)
    return Block(config, 0, Tables(config), context=context)


def train(block: nn.Module, parameters: Sequence[nn.Parameter], autocast: bool = False) -> list[Tensor]:
    """The output of a forward and all gradients of its backward."""
    x = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    torch.manual_seed(2)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = block(x)
    y.sin().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in parameters if p.grad is not None)]


def hooked(name: str) -> Any:
    def hook(block: Block) -> None:
        block.get_submodule(name).register_forward_hook(lambda module, given, result: None)

    return hook


def nothing(block: Block) -> None:
    """Of what is done to a block."""


# What keeps a block from the kernel: its options, what is done to it, whether under autocast.
KEEPS_OFF: dict[str, tuple[dict[str, Any], Any, bool]] = {
    "bias": ({"attention_out_bias": True}, nothing, False),
    "layer norm": ({"norm": "layer"}, nothing, False),
    "dropout": ({"residual_dropout": 0.3}, nothing, False),
    "sequence parallelism": ({"sequence_parallel": True}, nothing, False),
    "a hook on the row layer": ({}, hooked("attention_out"), False),
    "a hook on the norm": ({}, hooked("mlp_norm"), False),
    "a hook on the dropout": ({}, hooked("dropout"), False),
    "autocast": ({}, nothing, True),
}


def blocks_left_alone() -> None:
    """They compute the same bits as without the kernel."""
    for name, (options, change, autocast) in KEEPS_OFF.items():
        plain, block = (make_block(world(), **options) for _ in range(2))
        change(block)
        group = block.attention_out.group
        group.kernels.all_reduce_norm = stand_in = NormsStandIn(group)
        wanted = train(plain, list(plain.parameters()), autocast)
        found = train(block, list(block.parameters()), autocast)
        assert stand_in.calls == [], name
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), name


def test_blocks_that_the_kernel_can_not_have_compute_what_they_did(run_ranks) -> None:
    run_ranks(2, blocks_left_alone)


def a_whole_block(compiled: bool) -> None:
    """Beside a block that is not sliced; compiled: all of it, its graphs breaking where they must."""
    whole, block = make_block(Group((0,), None)), make_block(world())
    group = block.attention_out.group
    group.kernels.all_reduce_norm = stand_in = NormsStandIn(group)
    parameters = list(block.parameters())
    called = torch.compile(block, backend="aot_eager") if compiled else block
    found, wanted = train(called, parameters), train(whole, list(whole.parameters()))
    assert stand_in.calls == [(8, "at once")]
    for number, (got, right) in enumerate(zip(found, wanted, strict=True)):
        slicing = slicing_of(parameters[number - 2]) if number >= 2 else None
        part = right if slicing is None else slicing.part_of(right)
        assert distance(got, part) <= 1e-5, number


@pytest.mark.parametrize("compiled", [False, True])
def test_a_sliced_block_equals_a_whole_one(run_ranks, compiled: bool) -> None:
    run_ranks(2, a_whole_block, compiled)


def dropout_in_evaluation() -> int:
    group = world()
    group.kernels.all_reduce_norm = stand_in = NormsStandIn(group)
    block = make_block(group, residual_dropout=0.3).eval()
    with torch.no_grad():
        block(torch.randn(2, 4, 16))
    return len(stand_in.calls)


def test_dropout_that_drops_nothing_is_in_no_way(run_ranks) -> None:
    assert run_ranks(2, dropout_in_evaluation) == [1, 1]
