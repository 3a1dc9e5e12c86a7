"""Training with fp8 linears, in layouts, against one process in plain PyTorch, and beside bf16."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import toy
from fp8_reference import into_fp8
from layouts import BASE_SEED, Layout, Run, check, enter_layer, make_optimizer, run_reference, train
from reference import Reference, build, distance
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import parallel3d
from parallel3d.autograd.fp8 import Fp8
from parallel3d.autograd.recomputation import Checkpointer
from parallel3d.autograd.sink import GradientSink
from parallel3d.comm.collectives import Group
from parallel3d.config import Fp8Config
from parallel3d.engine.fp8 import linears_between, use_fp8
from parallel3d.parameters import slicing_of
from parallel3d.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, from_linear

LAYOUTS = [
    Layout(pp=2, accumulation=4, schedule="zb-h1", checkpointing=1),
    Layout(dp=2, accumulation=2, zero="1", optimizer="AdamW"),
    Layout(pp=2, dp=2, accumulation=2, chunks=2, schedule="zbv", placement="v", zero="2 per micro-batch"),
    Layout(pp=2, dp=2, accumulation=2, zero="3", checkpointing="cheap"),
    Layout(accumulation=4, schedule="split", dropout=0.2, checkpointing="attention"),
]


def alone(layout: Layout, recipe: str, weight_gradient: str) -> Run:
    reference = Reference(
        toy.model(False, layout.num_blocks, layout.dropout),
        toy.cross_entropy,
        make_optimizer(layout.optimizer),
        base_seed=BASE_SEED,
        prepare=lambda modules: into_fp8(modules[1:-1], recipe, weight_gradient),
        enter=enter_layer,
    )
    per_step = layout.dp * layout.accumulation
    return run_reference(reference, [toy.micro_batch(g) for g in range(layout.num_steps * per_step)], per_step)


@pytest.mark.parametrize(
    ("recipe", "weight_gradient", "layouts"),
    [("tensorwise", "fp8", LAYOUTS), ("rowwise", "fp8", LAYOUTS[::3]), ("tensorwise", "bf16", LAYOUTS[:1])],
    ids=["tensorwise", "rowwise", "bf16"],
)
def test_layouts_train_as_one_process(run_ranks, recipe: str, weight_gradient: str, layouts: list[Layout]):
    """In fp32: hardly an operand is rounded otherwise, and few numbers of fp8; other recipes are 0.05 to 0.4 away."""
    fp8 = {"enabled": True, "recipe": recipe, "weight_gradient": weight_gradient}
    for layout in layouts:
        ranks = run_ranks(layout.pp * layout.dp, partial(train, layout, fp8=fp8))
        check(ranks, alone(layout, recipe, weight_gradient), layout.dp, tolerance=1e-3)


class Whole(nn.Module):
    """The same layers as one plain module that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        items = toy.model(False, num_blocks=2)
        self.layers = nn.ModuleList([m if m is not None else nn.Identity() for m in build(items, BASE_SEED)])

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return toy.cross_entropy(inputs, labels)


def train_whole(steps: int, by_calls: bool, fp8: dict[str, Any]) -> list[float]:
    """Losses in bf16 of each step and of an evaluation after it, which must be of the new weights. Calls are compiled."""
    config = {
        "train_micro_batch_size_per_gpu": toy.SAMPLES,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-3}},
        "bf16": {"enabled": True},
        "check_numerics": not by_calls,  # each check breaks a graph
        "steps_per_print": None,
        "fp8": fp8,
        "compile": {"enabled": by_calls, "backend": "eager"},
    }
    engine, *_ = parallel3d.initialize(model=Whole(), config=config)
    losses = []
    for step in range(steps):
        batches = [toy.micro_batch((2 * step + k) % 8) for k in range(2)]
        if by_calls:
            total = 0.0
            for batch in batches:
                loss = engine(*batch)
                engine.backward(loss)
                engine.step()
                total += loss.item() / 2
            losses.append(total)
        else:
            losses.append(engine.train_batch(iter(batches)).item())
        with torch.no_grad():
            losses.append(engine.eval()(*batches[0]).item())
        engine.train()
    return losses


def test_the_loss_follows_that_of_bf16(run_ranks):
    """What is learnt by heart in 24 steps; and compiled steps by calls are those of train_batch."""
    on, off = ({"enabled": enabled} for enabled in (True, False))
    (wanted,), (got,) = run_ranks(1, train_whole, 24, False, off), run_ranks(1, train_whole, 24, False, on)
    assert got[0] == pytest.approx(wanted[0], rel=0.01)
    assert got != wanted
    assert sum(got[-20:]) == pytest.approx(sum(wanted[-20:]), rel=0.02)
    assert got[-1] < 0.7 * got[0]
    (calls,) = run_ranks(1, train_whole, 4, True, on)
    assert calls == pytest.approx(got[:8], rel=1e-6)


class Communication(TorchDispatchMode):
    """Counts the collectives of activations and their gradients, which scales are much smaller than."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sizes = [leaf.numel() for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        self.count += operator.namespace == "c10d" and max(sizes) > 100
        return operator(*args, **(kwargs or {}))


def slice_linears(recipe: str) -> list[float]:
    """How far a column and a row layer are from whole ones: output, gradient of the input, those of the weights.

    Both layers are one region whose element-wise results are recomputed.
    """
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 48))
    group = Group(tuple(range(dist.get_world_size())), dist.group.WORLD)
    column = from_linear(ColumnParallelLinear, copy.deepcopy(whole[0]), group=group)
    row = from_linear(RowParallelLinear, copy.deepcopy(whole[2]), group=group)
    layers = nn.Sequential(column, whole[1], row)
    linears = linears_between([(1, layers)], 3)
    use_fp8(linears, Fp8(Fp8Config(recipe=recipe)), GradientSink(), Group((0,), None))
    into_fp8([whole], recipe, "fp8")
    # Each rank's part has a magnitude of its own.
    x = (torch.randn(6, 32) * torch.logspace(-2, 2, 32)).requires_grad_()
    gradient = torch.randn(6, 48) * torch.logspace(-2, 2, 48)
    results = []
    for model in (partial(Checkpointer().under("cheap"), layers), whole):
        inputs = x.detach().clone().requires_grad_()
        y = model(inputs)
        with Communication() as communication:
            y.backward(gradient)
        assert communication.count == (model is not whole), "the gradient of the input alone is summed"
        results.append((y.detach(), inputs.grad))
    weights = [
        (own.weight.grad, slicing_of(own.weight).part_of(other.weight.grad))
        for own, other in ((column, whole[0]), (row, whole[2]))
    ]
    return [distance(got, wanted) for got, wanted in (*zip(*results, strict=True), *weights)]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_slices_have_the_scales_of_whole_tensors(run_ranks, recipe: str):
    """Scales of a rank's own part would move all by 1e-2 or more. The sum over ranks may round an operand otherwise."""
    for distances in run_ranks(2, slice_linears, recipe):
        assert max(distances) < 2e-3, distances
