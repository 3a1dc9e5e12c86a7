"""Gradients travel while the backward still runs, bucket by bucket, in one order on all ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import toy
from layouts import BASE_SEED, Run, check, make_engine, make_optimizer, own_iterator, run_reference, run_steps
from reference import Item, Reference
from torch import Tensor, nn
from toy import HIDDEN

from parallel3d.comm.collectives import Group, Work, all_reduce

# What this rank did, in order: ("backward", layer, calls of that layer's backward before) and ("launch", address).
EVENTS: list[tuple[str, int, int]] = []


class NoteBackward(torch.autograd.Function):
    """The identity, which notes when the gradient reaches a layer's output: its backward starts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: int) -> Tensor:
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        before = sum(event[:2] == ("backward", ctx.layer) for event in EVENTS)
        EVENTS.append(("backward", ctx.layer, before))
        return gradient, None


class Noted(nn.Module):
    def __init__(self, hidden: int, layer: int, unused: bool = False):
        super().__init__()
        self.layer = layer
        self.inner = nn.Linear(hidden, hidden)
        if unused:
            self.unused = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return NoteBackward.apply(x + torch.tanh(self.inner(x)), self.layer)


class Fickle(Noted):
    """Has a part that some micro-batches use and others don't: replicas reach their parameters in different orders."""

    def __init__(self, hidden: int, layer: int):
        super().__init__(hidden, layer)
        self.part = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.part(x) / 4 if x.sum() > 0 else x


def squares(output: Tensor, labels: Tensor) -> Tensor:
    return (output - labels).square().mean()


def note_all_reduce(tensor: Tensor, group: Group) -> Work:
    EVENTS.append(("launch", tensor.data_ptr(), tensor.numel()))
    return all_reduce(tensor, group)


LAYERS, ACCUMULATION, DP = 12, 3, 2
ITEMS = [Item(Noted, (HIDDEN, k)) for k in range(LAYERS)]
WITH_UNUSED = [Item(Noted, (HIDDEN, k, k % 3 == 1)) for k in range(LAYERS)]
FICKLE = [Item(Fickle, (HIDDEN, k)) for k in range(LAYERS)]
BATCHES = [
    tuple(torch.randn(2, 4, HIDDEN, generator=torch.Generator().manual_seed(2 * g + k)) for k in range(2))
    for g in range(2 * ACCUMULATION * DP)
]
# Elements of a layer's weight and bias, as buckets pad them.
LAYER_SIZE = HIDDEN * HIDDEN + 2 * HIDDEN


def train(items: list[Item], pipeline: dict[str, Any], bucket_size: int) -> tuple[Run, list[Any], dict[int, list[int]]]:
    """On one rank: the numbers of two steps, the second step's events, and each bucket's layers by its address."""
    zero = {"reduce_bucket_size": bucket_size}
    engine = make_engine(items, squares, accumulation=ACCUMULATION, pipeline=pipeline, zero_optimization=zero)
    layers_of = {
        bucket.gradients.data_ptr(): sorted({int(info.name.split(".")[1]) for info in bucket.infos})
        for buckets in engine.update.reducer.buckets.values()
        for bucket in buckets
    }
    iterator = own_iterator(engine, BATCHES)
    first = run_steps(engine, iterator, 1)
    EVENTS.clear()
    with mock.patch("parallel3d.zero.reducer.all_reduce", note_all_reduce):
        second = run_steps(engine, iterator, 1)
    return (first[0] + second[0], first[1] + second[1], second[2]), list(EVENTS), layers_of


PIPELINES = [
    {"stages": 1},
    {"stages": 1, "activation_checkpoint_interval": 2},
    {"stages": 2, "schedule": "gpipe"},
    {"stages": 2, "schedule": "interleaved", "num_chunks": 2},
    {"stages": 2, "schedule": "gpipe", "num_chunks": 2, "placement": "v"},
    {"stages": 4},
]


def check_numbers(items: list[Item], ranks: list[Run]) -> None:
    reference = Reference(items, squares, make_optimizer("SGD"), base_seed=BASE_SEED)
    check(ranks, run_reference(reference, BATCHES, ACCUMULATION * DP), DP)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("bucket_size", [1, LAYER_SIZE, 2 * LAYER_SIZE])  # a parameter, a layer, two layers each
@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
def test_a_bucket_is_launched_before_the_backward_of_the_layers_below(
    run_ranks, pipeline: dict[str, Any], bucket_size: int
):
    ranks = run_ranks(pipeline["stages"] * DP, train, ITEMS, pipeline, bucket_size)
    chunks = pipeline["stages"] * pipeline.get("num_chunks", 1)
    for _, events, layers_of in ranks:
        assert {k for layers in layers_of.values() for k in layers} == {
            k for what, k, _ in events if what == "backward"
        }
        launches = [k for k, (what, address, _) in enumerate(events) if what == "launch" and address in layers_of]
        assert len(launches) == len(layers_of), "each bucket is launched once a step"
        for k in launches:
            lowest = min(layers_of[events[k][1]])
            # The layers below it in its chunk: their last backward is still to come, and this layer's last has started.
            below = range(lowest // (LAYERS // chunks) * (LAYERS // chunks), lowest)
            assert ("backward", lowest, ACCUMULATION - 1) in events[:k]
            for layer in below:
                assert ("backward", layer, ACCUMULATION - 1) in events[k + 1 :], f"layer {layer} before {events[k]}"
    check_numbers(ITEMS, [run for run, _, _ in ranks])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("items", [WITH_UNUSED, FICKLE], ids=["some unused", "some used on one replica"])
@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
def test_replicas_launch_the_same_buckets_in_the_same_order(run_ranks, pipeline: dict[str, Any], items: list[Item]):
    """Even with parameters that get no gradient, or get it on one replica alone: those behind them in the list wait."""
    ranks = run_ranks(pipeline["stages"] * DP, train, items, pipeline, LAYER_SIZE)
    orders = [
        [layers_of[address] for what, address, _ in events if what == "launch" and address in layers_of]
        for _, events, layers_of in ranks
    ]
    for first, second in zip(orders[::DP], orders[1::DP], strict=True):
        assert first == second
    check_numbers(items, [run for run, _, _ in ranks])


def train_tied() -> tuple[Run, list[Any], list[int]]:
    """The numbers of two steps, the second's launches, and the replica buckets, by address."""
    engine = make_engine(toy.model(tied=True), accumulation=ACCUMULATION, pipeline={"stages": 2})
    batches = own_iterator(engine, [toy.micro_batch(g) for g in range(2 * ACCUMULATION * DP)])
    run_steps(engine, batches, 1)
    EVENTS.clear()
    with mock.patch("parallel3d.zero.reducer.all_reduce", note_all_reduce):
        run = run_steps(engine, batches, 1)
    replicas = [
        b.gradients.data_ptr()
        for owners, buckets in engine.update.reducer.buckets.items()
        if len(owners) > 1
        for b in buckets
    ]
    return run, [address for _, address, _ in EVENTS], replicas


def test_tied_buckets_are_reduced_last_over_replicas_and_then_over_owners(run_ranks):
    for _, launched, replicas in run_ranks(2 * DP, train_tied):
        assert replicas
        # Each twice in a row, after all others.
        assert launched[-2 * len(replicas) :] == [address for address in replicas for _ in range(2)]
        assert not set(launched[: -2 * len(replicas)]) & set(replicas)
