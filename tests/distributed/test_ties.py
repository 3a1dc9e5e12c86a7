"""Tied layers: one parameter for the reference, copies that stay bitwise equal for the pipeline."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import toy
from layouts import (
    BASE_SEED,
    Run,
    check,
    copies,
    make_engine,
    make_optimizer,
    own_iterator,
    run_reference,
    run_steps,
)
from ranks import RankError
from reference import Item, Reference, distance
from torch import Tensor, nn
from toy import HIDDEN, MLP, VOCABULARY, Embed, Norm, TiedEmbed

from parallel3d.errors import PartitionError
from parallel3d.pipe import LayerSpec, PipelineModule, TiedLayerSpec

STEPS, ACCUMULATION, DP = {"SGD": 4, "AdamW": 8}, 2, 2  # AdamW's move the weights less


class Projection(nn.Module):
    """Logits from a weight with another name than the embedding's, and a bias of its own."""

    def __init__(self, hidden: int, vocabulary: int):
        super().__init__()
        self.inner = nn.ModuleDict({"out": nn.Linear(hidden, vocabulary)})

    def forward(self, x: Tensor) -> Tensor:
        return self.inner["out"](x)


class Recall(nn.Module):
    """Attention over the vocabulary's embeddings."""

    def __init__(self, hidden: int, vocabulary: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(vocabulary, hidden))
        self.bias = nn.Parameter(torch.zeros(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.weight).softmax(-1) @ self.weight + self.bias


class Mix(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(hidden, hidden) / hidden)
        self.bias = nn.Parameter(torch.zeros(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(F.linear(x, self.weight, self.bias))


class MixBack(Mix):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(F.linear(x, self.weight.t(), self.bias))


class Twin(nn.Module):
    """One weight with two names; the second is the tied one."""

    def __init__(self, hidden: int):
        super().__init__()
        self.first = nn.Linear(hidden, hidden, bias=False)
        self.second = nn.Linear(hidden, hidden, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


def mix_back(module: nn.Module, x: Tensor) -> Tensor:
    return MixBack.forward(module, x)


BODY = [Item(cls, (HIDDEN,)) for _ in range(4) for cls in (MLP, Norm)]
EMBED = Item(Embed, (VOCABULARY, HIDDEN), tie="embed")
PROJECTION = Item(Projection, (HIDDEN, VOCABULARY), tie="embed", attributes=("inner.out.weight",))
WHOLE = Item(TiedEmbed, (VOCABULARY, HIDDEN), tie="embed")

MODELS = {
    # The whole module, with a bias that only the last place uses.
    "whole module": [WHOLE, *BODY, Item(TiedEmbed, (VOCABULARY, HIDDEN), tie="embed", call=toy.logits)],
    "attributes of other names": [EMBED, *BODY, PROJECTION],
    "three owners": [EMBED, *BODY[:5], Item(Recall, (HIDDEN, VOCABULARY), tie="embed"), *BODY[5:], PROJECTION],
    "five owners of two classes": [
        EMBED,
        *BODY[:2],
        Item(Recall, (HIDDEN, VOCABULARY), tie="embed"),
        *BODY[2:4],
        Item(Recall, (HIDDEN, VOCABULARY), tie="embed"),
        *BODY[4:],
        Item(Recall, (HIDDEN, VOCABULARY), tie="embed"),
        PROJECTION,
    ],
    # The keys' owners lie around each other, in another order at each end, and their weights have one shape.
    "several keys": [
        EMBED,
        Item(Mix, (HIDDEN,), tie="a"),
        Item(Mix, (HIDDEN,), tie="b"),
        *BODY[:6],
        Item(MixBack, (HIDDEN,), tie="b"),
        Item(MixBack, (HIDDEN,), tie="a"),
        PROJECTION,
    ],
    "overlapping keys": [
        EMBED,
        Item(Mix, (HIDDEN,), tie="a"),
        *BODY[:2],
        Item(MixBack, (HIDDEN,), tie="b"),
        *BODY[2:4],
        Item(MixBack, (HIDDEN,), tie="a"),
        *BODY[4:6],
        Item(Mix, (HIDDEN,), tie="b"),
        Item(Mix, (HIDDEN,), tie="a", call=mix_back),
        PROJECTION,
    ],
    "all parameters of a submodule": [
        EMBED,
        Item(nn.Linear, (HIDDEN, VOCABULARY), tie="out", attributes=("weight", "bias")),
        Item(nn.Linear, (VOCABULARY, HIDDEN)),
        *BODY[:6],
        Item(Projection, (HIDDEN, VOCABULARY), tie="out", attributes=("inner.out.weight", "inner.out.bias")),
    ],
    "a weight with two names": [
        EMBED,
        Item(Twin, (HIDDEN,), tie="a", attributes=("second.weight",)),
        *BODY[:7],
        Item(Mix, (HIDDEN,), tie="a"),
        Item(nn.Linear, (HIDDEN, VOCABULARY)),
    ],
}
# (pp, schedule, chunks, placement, optimizer): owners on stages apart, on one rank in several chunks, and both.
LAYOUTS = [
    (4, "1f1b", 1, "loop", "AdamW"),
    (2, "interleaved", 2, "loop", "SGD"),
    (2, "gpipe", 2, "v", "SGD"),
]


def micro_batches(optimizer: str) -> list[toy.MicroBatch]:
    return [toy.micro_batch(g) for g in range(STEPS[optimizer] * ACCUMULATION * DP)]


def train(model: str, pp: int, schedule: str, chunks: int, placement: str, optimizer: str) -> Run:
    pipeline = {"stages": pp, "schedule": schedule, "num_chunks": chunks, "placement": placement}
    engine = make_engine(
        MODELS[model], accumulation=ACCUMULATION, optimizer=optimizer, pipeline={**pipeline, "partition": "uniform"}
    )
    shared = [info for info in engine.module.parameter_infos() if info.shared]
    assert len({info.name for info in shared}) == len(shared), "a rank holds a shared parameter once"
    return run_steps(engine, own_iterator(engine, micro_batches(optimizer)), STEPS[optimizer])


@cache
def reference_run(model: str, optimizer: str) -> Run:
    reference = Reference(MODELS[model], toy.cross_entropy, make_optimizer(optimizer), base_seed=BASE_SEED)
    untrained = reference.weights()
    run = run_reference(reference, micro_batches(optimizer), ACCUMULATION * DP)
    moved = [name for name in untrained if distance(run[2][name], untrained[name]) > 1e-3]
    assert len(moved) > 0.9 * len(untrained), "training must move the weights for their agreement to mean something"
    return run


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("pp", "schedule", "chunks", "placement", "optimizer"), LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_copies_stay_bitwise_equal_and_agree_with_one_process(
    run_ranks, model: str, pp: int, schedule: str, chunks: int, placement: str, optimizer: str
):
    ranks = run_ranks(pp * DP, train, model, pp, schedule, chunks, placement, optimizer)
    check(ranks, reference_run(model, optimizer), DP)


def train_under_zero_2(config: dict[str, Any]) -> Run:
    engine = make_engine(
        MODELS["whole module"],
        pipeline={"stages": 2, "partition": "uniform"},
        zero_optimization={"stage": 2, "reduce_bucket_size": 1500},
        **config,
    )
    return run_steps(engine, own_iterator(engine, [toy.micro_batch(g) for g in range(20 * DP)]), 20)


@pytest.mark.parametrize(("config", "tolerance"), [({}, 1e-5), ({"bf16": {"enabled": True}}, 2e-2)])
def test_both_copies_of_a_tied_module_are_equal_after_20_steps_of_zero_2(run_ranks, config: Any, tolerance: float):
    ranks = run_ranks(4, train_under_zero_2, config)
    for _, _, weights in ranks:
        assert {"layers.0.weight", "layers.0.bias"} < weights.keys()
    reference = Reference(MODELS["whole module"], toy.cross_entropy, make_optimizer("SGD"), base_seed=BASE_SEED)
    batches = [toy.micro_batch(g) for g in range(20 * DP)]
    check(ranks, run_reference(reference, batches, DP), DP, tolerance)


# Errors


class Bare(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.other = nn.Parameter(torch.zeros(size, size))


class Frozen(Mix):
    def __init__(self, hidden: int):
        super().__init__(hidden)
        self.weight.requires_grad_(False)


def refused(layers: list, num_stages: int) -> str:
    """Return the message of the PartitionError that a module of these layers raises."""
    with pytest.raises(PartitionError) as error:
        PipelineModule(layers, num_stages=num_stages, partition_method="uniform")
    return str(error.value)


def middle() -> list[LayerSpec]:
    return [LayerSpec(nn.Linear, 4, 4) for _ in range(2)]


def shapes_differ(num_stages: int) -> str:
    return refused([TiedLayerSpec("key", Mix, 4), *middle(), TiedLayerSpec("key", MixBack, 6)], num_stages)


def one_is_frozen(num_stages: int) -> str:
    return refused([TiedLayerSpec("key", Mix, 4), *middle(), TiedLayerSpec("key", Frozen, 4)], num_stages)


def attribute_is_missing(first: bool) -> str:
    layers = [TiedLayerSpec("key", Mix, 4), *middle(), TiedLayerSpec("key", Bare, 4)]
    return refused(layers[::-1] if first else layers, 1)


def attribute_is_missing_elsewhere() -> None:
    PipelineModule([TiedLayerSpec("key", Bare, 4), *middle(), TiedLayerSpec("key", Mix, 4)], num_stages=2)


def attributes_are_not_equally_many() -> str:
    one, two = (
        TiedLayerSpec("key", c, 4, tied_weight_attr=a) for c, a in ((Mix, "weight"), (MixBack, ("weight", "bias")))
    )
    return refused([one, *middle(), two], 1)


class Part(nn.Module):
    """A layer around a module that a script's own model has."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def modules_share(num_stages: int, kind: type[LayerSpec] | None) -> str | None:
    modules = [nn.Linear(4, 4) for _ in range(4)]
    modules[3].weight = modules[0].weight
    layers: list = modules
    if kind is LayerSpec:
        layers = [LayerSpec(Part, module) for module in modules]
    elif kind is TiedLayerSpec:
        ends = [TiedLayerSpec("key", Part, modules[k], tied_weight_attr="inner.weight") for k in (0, 3)]
        layers = [ends[0], *modules[1:3], ends[1]]
    if num_stages > 1 and kind is not TiedLayerSpec:
        return refused(layers, num_stages)
    PipelineModule(layers, num_stages=num_stages)
    return None


@pytest.mark.parametrize("pp", [1, 2])
def test_copies_of_other_shapes_are_refused_on_all_ranks(run_ranks, pp: int):
    for message in run_ranks(pp, shapes_differ, pp):
        assert "[4, 4]" in message
        assert "[6, 6]" in message


def test_a_copy_that_is_frozen_is_refused_on_all_ranks(run_ranks):
    for message in run_ranks(2, one_is_frozen, 2):
        assert "layers.0.weight" in message
        assert "requires_grad=False on stage 1" in message


@pytest.mark.parametrize("first", [False, True])
def test_a_missing_attribute_is_refused_with_those_that_are_there(run_ranks, first: bool):
    [message] = run_ranks(1, attribute_is_missing, first)
    assert "'weight' is not a parameter of Bare; it has ['other']" in message


def test_a_missing_attribute_on_one_rank_does_not_pass(run_ranks):
    with pytest.raises(RankError, match="'weight' is not a parameter of Bare"):
        run_ranks(2, attribute_is_missing_elsewhere, patience=0.5)  # the other waits for it


def test_ties_of_unequally_many_attributes_are_refused(run_ranks):
    [message] = run_ranks(1, attributes_are_not_equally_many)
    assert "layers 0 and 3 of tie 'key'" in message


@pytest.mark.parametrize("kind", [None, LayerSpec])
def test_sharing_without_a_tie_is_refused_across_stages_alone(run_ranks, kind: type[LayerSpec] | None):
    assert run_ranks(1, modules_share, 1, kind) == [None]
    assert run_ranks(2, modules_share, 2, TiedLayerSpec) == [None, None]
    for message in run_ranks(2, modules_share, 2, kind):
        assert "layers 0 and 3 share a parameter" in message
        assert "TiedLayerSpec" in message


def same_module_twice() -> dict[str, Tensor]:
    torch.manual_seed(3)
    block = Mix(HIDDEN)
    engine = make_engine([EMBED, *BODY[:2], PROJECTION])  # only to have a world; the module below is what counts
    module = PipelineModule([block, *middle(), block], num_stages=2, partition_method="uniform")
    assert engine.global_steps == 0
    return copies(module)


def test_one_module_at_two_places_is_a_tie(run_ranks):
    first, last = run_ranks(2, same_module_twice)
    assert torch.equal(first["layers.0.weight"], last["layers.0.weight"])
