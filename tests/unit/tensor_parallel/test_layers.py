"""Sliced layers without other ranks: what they hold, how they are built and copied, what they refuse."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.autograd.sink import GradientSink
from parallel3d.autograd.split_backward import make_splittable
from parallel3d.comm.collectives import Group
from parallel3d.comm.differentiable import scatter_to_region
from parallel3d.errors import CommunicationError, PartitionError
from parallel3d.parameters import Slicing, slicing_of
from parallel3d.specs import BuildContext, LayerSpec, blueprint
from parallel3d.tensor_parallel import (
    AttentionHeads,
    Column,
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    column_outputs,
    parallelize,
    vocab_parallel_cross_entropy,
)
from parallel3d.tensor_parallel.linear import from_linear

# What this process sees of three ranks, being the first; nothing communicates in these tests.
THREE = Group((0, 1, 2), None)


def size_of(layer: Any, context: Any) -> int:
    return sum(parameter.numel() for parameter in blueprint(layer, context).parameters())


def test_a_spec_gets_its_group_from_the_context_and_counts_its_slice() -> None:
    context: Any = BuildContext(groups=SimpleNamespace(model=THREE), device=torch.device("cpu"))
    spec = LayerSpec(ColumnParallelLinear, 4, 7, segments=(3, 4))
    layer = spec.build(context)
    assert size_of(spec, context) == sum(p.numel() for p in layer.parameters()) == 3 * 4 + 3
    assert slicing_of(layer.weight) == slicing_of(layer.bias) == Slicing(0, 7, ((0, 1), (3, 5)))
    assert size_of(LayerSpec(RowParallelLinear, 7, 4), context) == 3 * 4 + 4
    assert size_of(LayerSpec(VocabParallelEmbedding, 257, 4), context) == 86 * 4
    assert LayerSpec(ColumnParallelLinear, 4, 7).build(None).weight.shape == (7, 4)


def test_what_a_parameter_says_of_itself_outlasts_a_move() -> None:
    shared = [AttentionHeads(3, 1, 2).key_value]
    with torch.device("meta"):
        model = nn.Sequential(
            ColumnParallelLinear(4, 7, group=THREE), ColumnParallelLinear(4, 2, segments=shared, group=THREE)
        )
    model.to_empty(device="cpu").double().to(torch.bfloat16)
    assert [slicing_of(p) for p in model[0].parameters()] == [Slicing(0, 7, ((0, 3),))] * 2
    assert [p.partial_over for p in model[1].parameters()] == [THREE] * 2
    assert [slicing_of(p) for p in model[1].parameters()] == [None] * 2


def test_a_copy_of_a_layer_has_a_sink_of_its_own() -> None:
    layer, sink = ColumnParallelLinear(4, 6).double(), GradientSink()
    accumulator = torch.zeros(6, 4, dtype=torch.float64)
    sink.attach(layer.weight, accumulator)
    make_splittable(layer, sink)
    sink.open()
    other = copy.deepcopy(layer)
    with sink.fusing():
        other(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    assert torch.equal(other.weight.grad, torch.full((6, 4), 2.0, dtype=torch.float64))
    assert not accumulator.any()
    assert other.group is layer.group


def test_frozen_layers_stay_frozen_and_train_the_rest() -> None:
    whole = nn.Linear(4, 6).requires_grad_(False)
    model = parallelize(nn.Sequential(whole, nn.Linear(6, 2)), {"0": "column"}, Group((0,), None))
    assert not any(p.requires_grad for p in model[0].parameters())
    model(torch.ones(3, 4)).sum().backward()
    assert model[0].weight.grad is None
    assert model[1].weight.grad is not None


def test_what_can_not_be_sliced_is_refused() -> None:
    heads = AttentionHeads(4, 2, 8)
    fused = (heads.query, heads.key_value, heads.key_value)
    with pytest.raises(PartitionError, match="use separate query, key and value layers"):
        ColumnParallelLinear(4, 64, segments=fused, group=THREE)
    with pytest.raises(PartitionError, match="shard it as the query heads"):
        RowParallelLinear(16, 4, segments=[heads.key_value], group=THREE)
    with pytest.raises(PartitionError, match="a vocabulary of 2 can't be split over 3 ranks"):
        VocabParallelEmbedding(2, 4, group=THREE)
    with pytest.raises(PartitionError, match="a vocabulary of 2 can't be split over 3 ranks"):
        vocab_parallel_cross_entropy(torch.zeros(5, 1), torch.zeros(5, dtype=torch.long), THREE, 2)
    with pytest.raises(PartitionError, match=r"rank 0 of 3 has 4 of 10 words, so \[5, 4\] is expected"):
        vocab_parallel_cross_entropy(torch.zeros(5, 10), torch.zeros(5, dtype=torch.long), THREE, 10)
    with pytest.raises(CommunicationError, match="build the layer with sequence_parallel=True"):
        ColumnParallelLinear(4, 6)(torch.zeros(2, 4), length=2)
    with pytest.raises(CommunicationError, match=r"add up to 2 places, not 5"):
        ColumnParallelLinear(4, 6, sequence_parallel=True)(torch.zeros(2, 4), length=5)
    with pytest.raises(CommunicationError, match=r"needs \[..., sequence, hidden\], not \[4\]"):
        RowParallelLinear(4, 6, sequence_parallel=True)(torch.zeros(4))
    with pytest.raises(CommunicationError, match=r"dim 1 of \[2, 4\] can't be cut into 3 equal parts"):
        scatter_to_region(torch.zeros(2, 4), THREE, -1)
    torchs: Any = torch.distributed.group
    for make in (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding):
        with pytest.raises(PartitionError, match=r"group is a _WorldMeta; .* context.groups.model"):
            make(4, 6, group=torchs)
    with pytest.raises(RuntimeError, match=r"an index is not in \[0, 9\)"):
        VocabParallelEmbedding(9, 2)(torch.tensor([9]))


def projections(kv_bias: bool, frozen: str) -> tuple[list[ColumnParallelLinear], list[nn.Linear]]:
    """Three layers of one input, and plain ones with the same weights; frozen: names of parameters."""
    plain = [nn.Linear(5, out, bias).double() for out, bias in ((6, True), (4, kv_bias), (4, kv_bias))]
    layers = [from_linear(ColumnParallelLinear, copy.deepcopy(layer)) for layer in plain]
    for name, p in [*nn.ModuleList(plain).named_parameters(), *nn.ModuleList(layers).named_parameters()]:
        p.requires_grad_(name not in frozen.split())
    return layers, plain


def plainly(plain: list[nn.Linear], x: Tensor) -> tuple[Tensor, ...]:
    return tuple(F.linear(x, layer.weight, layer.bias) for layer in plain)


FROZEN = ["", "0.weight 1.bias", "0.weight 1.weight 2.weight", "1.weight 1.bias", "x 0.weight"]


@pytest.mark.parametrize("used", [(0, 1, 2), (2,), (0, 2)])
@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("mode", ["autograd", "fused", "deferred"])
def test_layers_of_one_input_equal_plain_linears(mode: str, frozen: str, used: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layers, plain = projections(kv_bias=len(used) < 3, frozen=frozen)
    sink, model, names = GradientSink(), nn.ModuleList(layers), frozen.split()
    accumulators = {p: torch.zeros_like(p) for p in model.parameters() if p.requires_grad and mode != "autograd"}
    for p, accumulator in accumulators.items():
        sink.attach(p, accumulator)
    make_splittable(model, sink)
    sink.open()
    for shape in [(5,), (3, 5), (2, 0, 5), (2, 3, 5)]:
        x = torch.randn(shape, dtype=torch.float64)
        mine, theirs = (x.clone().requires_grad_("x" not in names) for _ in range(2))
        ys, expected = column_outputs(layers, mine), plainly(plain, theirs)
        torch.testing.assert_close(ys, expected)
        ys, expected = (tuple(y.mul_(2) for y in results) for results in (ys, expected))  # as scripts may change them
        dys = [torch.randn_like(y) if expected[k].requires_grad else None for k, y in enumerate(expected)]
        chosen = [k for k in used if dys[k] is not None]
        torch.autograd.backward([expected[k] for k in chosen], [dys[k] for k in chosen])
        with {"autograd": nullcontext, "fused": sink.fusing, "deferred": partial(sink.deferring, 0)}[mode]():
            torch.autograd.backward([ys[k] for k in chosen], [dys[k] for k in chosen])
        reached = {p for k in used for p in layers[k].parameters() if p.requires_grad}
        assert sink.pending(0) == (reached if mode == "deferred" else set())
        sink.run_deferred(0)
        torch.testing.assert_close(mine.grad, theirs.grad)
    for p, q in zip(model.parameters(), nn.ModuleList(plain).parameters(), strict=True):
        gradient = accumulators.get(p, p.grad)
        torch.testing.assert_close(gradient, torch.zeros_like(q) if q.grad is None and gradient is not None else q.grad)


def test_gradients_of_gradients_of_layers_of_one_input() -> None:
    layers, plain = projections(kv_bias=True, frozen="")
    inputs = [torch.arange(10.0, dtype=torch.float64).view(2, 5).requires_grad_() for _ in range(2)]
    models = nn.ModuleList(layers), nn.ModuleList(plain)
    for ys, x, model in zip(
        (column_outputs(layers, inputs[0]), plainly(plain, inputs[1])), inputs, models, strict=True
    ):
        loss = torch.stack([y.tanh().square().sum() for y in ys]).sum()
        gradients = torch.autograd.grad(loss, [x, *model.parameters()], create_graph=True)
        torch.stack([gradient.square().sum() for gradient in gradients]).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_layers_of_one_input_with_hooks_without_gradients_and_under_autocast() -> None:
    layers, plain = projections(kv_bias=True, frozen="")
    x = torch.randn(2, 5, dtype=torch.float64)
    with torch.no_grad():
        assert not any(y.requires_grad for y in column_outputs(layers, x))
    layers[1].register_forward_hook(lambda module, inputs, output: 2 * output)
    query, key, value = column_outputs(layers, x)
    torch.testing.assert_close((query, key / 2, value), plainly(plain, x))
    others, x = [layers[0].float(), layers[2].float()], x.float()
    with torch.autocast("cpu", torch.bfloat16):
        ys, expected = column_outputs(others, x), [layer.float()(x) for layer in (plain[0], plain[2])]
    torch.testing.assert_close(ys, tuple(expected))
    torch.stack([y.float().sum() for y in ys]).sum().backward()
    assert {p.grad.dtype for layer in others for p in layer.parameters()} == {torch.float32}


class Odd(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.odd = nn.Embedding(9, 4), nn.LayerNorm(4), Odd(4, 4)
        self.q_proj, self.head = nn.Linear(4, 6), nn.Linear(4, 9, bias=False)
        self.scaled = nn.Embedding(9, 4, max_norm=1.0)
        self.hooked, self.normed = nn.Linear(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.hooked.register_forward_hook(lambda module, inputs, output: output)
        self.head.weight = self.embed.weight


REFUSED = [
    ({"*.q_prj": "column"}, r"'\*.q_prj' matches no module of Model. Did you mean 'q_proj'\?"),
    ({"q_proj": "colum"}, r"'colum' is not a way to shard a layer. Did you mean 'column'\?"),
    ({"norm": "column"}, "norm can't be sharded as Column.*it is a LayerNorm"),
    ({"odd": "rowwise"}, "odd can't be sharded as Row.*it is a Odd"),
    ({"q_proj": "vocab"}, "q_proj can't be sharded as Vocabulary.*it is a linear layer"),
    ({"embed": "colwise"}, "embed can't be sharded as Column.*it is an embedding"),
    ({"scaled": "vocab"}, "scaled .*has sparse, max_norm or scale_grad_by_freq"),
    ({"hooked": "row"}, "hooked .* set them after parallelize"),
    ({"normed": "row"}, "normed .*has no weight of its own"),
    ({"*.q_proj": "column", "q_*": "row"}, "q_proj is Column.* and, by plan pattern 'q_\\*', Row.*; leave one pattern"),
    ({"head": "column"}, "embed.weight and head.weight are one parameter, .*an embedding as 'vocab'"),
    ({"embed": "vocab"}, "embed.weight and head.weight are one parameter"),
    ({"q_proj": Column(segments=[5])}, "segments of 5 = 5 rows don't make up 6"),
]


@pytest.mark.parametrize(("plan", "message"), REFUSED)
def test_a_plan_that_does_not_fit_changes_nothing(plan: dict[str, Any], message: str) -> None:
    model = Model()
    modules = dict(model.named_modules())
    with pytest.raises(PartitionError, match=message):
        parallelize(model, {"*.q_proj": "column", **plan} if "q_proj" not in str(plan) else plan, THREE)
    assert dict(model.named_modules()) == modules


def test_one_layer_at_two_places_is_replaced_at_both() -> None:
    first = nn.Linear(4, 4)
    model = parallelize(nn.ModuleList([first, first, nn.Linear(4, 4)]), {"0": "column"}, THREE)
    assert isinstance(model[0], ColumnParallelLinear)
    assert model[0] is model[1]
    assert type(model[2]) is nn.Linear
    lone = parallelize(nn.Linear(4, 6), {"*": "column"}, THREE)
    assert isinstance(lone, ColumnParallelLinear)
    assert lone.weight.shape == (2, 4)


def test_under_sequence_parallelism_what_is_not_sliced_is_partial() -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4), nn.LayerNorm(4))
    parallelize(model, {"1": "column", "2": "row", "0": "sequence_parallel"}, THREE, sequence_parallel=True)
    partials = {name for name, p in model.named_parameters() if getattr(p, "partial_over", None) is THREE}
    assert partials == {"0.weight", "0.bias", "2.bias", "3.weight", "3.bias"}


def test_what_is_sliced_inside_of_a_partial_module_says_for_itself() -> None:
    model = nn.ModuleDict({"q": nn.Linear(4, 6), "norm": nn.LayerNorm(6), "o": nn.Linear(6, 4)})
    parallelize(nn.ModuleDict({"attention": model}), {"attention": "partial", "*.q": "column", "*.o": "row"}, THREE)
    partial_names = {name for name, p in model.named_parameters() if hasattr(p, "partial_over")}
    assert partial_names == {"norm.weight", "norm.bias"}


def test_drawn_weights_do_not_depend_on_the_group() -> None:
    makes = [
        (partial(ColumnParallelLinear, 5, 7), partial(nn.Linear, 5, 7)),
        (partial(RowParallelLinear, 7, 5), partial(nn.Linear, 7, 5)),
        (partial(VocabParallelEmbedding, 7, 5, padding_idx=1), partial(nn.Embedding, 7, 5, padding_idx=1)),
    ]
    for make, plain in makes:
        torch.manual_seed(0)
        layer, after = make(group=THREE), torch.rand(())
        torch.manual_seed(0)
        whole = plain()
        assert torch.equal(after, torch.rand(())), "the layers that follow draw the same numbers, too"
        weight = whole.weight[:, :3] if isinstance(layer, RowParallelLinear) else whole.weight[:3]
        assert torch.equal(layer.weight, weight)


def test_a_projection_that_was_replaced_or_has_a_backward_hook_is_called() -> None:
    layers, plain = projections(kv_bias=True, frozen="")
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    seen: list[int] = []
    layers[0].register_full_backward_hook(lambda module, inputs, outputs: seen.append(1))

    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module):
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor, length: int | None = None) -> torch.Tensor:
            return 3 * self.inner(x, length)

    query, key, value = column_outputs((layers[0], Wrapper(layers[1]), layers[2]), x)
    torch.testing.assert_close((query, key / 3, value), plainly(plain, x))
    query.sum().backward()
    assert seen == [1]
