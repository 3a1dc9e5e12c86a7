"""Sliced layers against plain torch in float64: outputs, input gradients, gathered weight gradients, communication."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from collective_counts import Collectives
from shard_messages import ShardMessages
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from parallel3d.autograd.sink import GradientSink
from parallel3d.autograd.split_backward import make_splittable
from parallel3d.comm import collectives, differentiable
from parallel3d.comm.collectives import Group, Work
from parallel3d.comm.differentiable import reduce_from_region, reduce_from_region_
from parallel3d.parameters import Slicing, slicing_of
from parallel3d.pipe import LayerSpec, PipelineModule
from parallel3d.tensor_parallel import (
    AttentionHeads,
    Column,
    ColumnParallelLinear,
    Row,
    RowParallelLinear,
    SequenceDropout,
    SlicedDropout,
    VocabParallelEmbedding,
    column_outputs,
    enter_region,
    gather_sequence,
    parallelize,
    regions,
    scatter_sequence,
    sum_gradients_over,
    vocab_parallel_cross_entropy,
)
from parallel3d.tensor_parallel.slicing import cut
from parallel3d.tensor_parallel.vocabulary import EAGER, Passes

BATCH, SEQ, HIDDEN, HEAD_DIM, FFN, WORDS = 2, 7, 6, 4, 10, 23
EXACT: dict[str, float] = {"rtol": 1e-10, "atol": 1e-10}


def world() -> Group:
    size = dist.get_world_size()
    return Group(tuple(range(size)), dist.group.WORLD if size > 1 else None)


class Layers(NamedTuple):
    """How a model makes its layers: plain ones, or sliced over a group."""

    group: Group | None = None
    sequence_parallel: bool = False
    seq: int = SEQ

    @property
    def tp(self) -> int:
        return 1 if self.group is None else self.group.size

    def column(self, fan_in: int, fan_out: int, bias: bool = True, **options: Any) -> nn.Module:
        if self.group is None:
            return nn.Linear(fan_in, fan_out, bias)
        options["sequence_parallel"] = self.sequence_parallel
        return ColumnParallelLinear(fan_in, fan_out, bias, group=self.group, **options)

    def row(self, fan_in: int, fan_out: int, bias: bool = True, **options: Any) -> nn.Module:
        if self.group is None:
            return nn.Linear(fan_in, fan_out, bias)
        options["sequence_parallel"] = self.sequence_parallel
        return RowParallelLinear(fan_in, fan_out, bias, group=self.group, **options)

    def embedding(self, **options: Any) -> nn.Module:
        if self.group is None:
            return nn.Embedding(WORDS, HIDDEN, **options)
        options["sequence_parallel"] = self.sequence_parallel
        return VocabParallelEmbedding(WORDS, HIDDEN, group=self.group, **options)

    def norm(self) -> nn.Module:
        norm = nn.LayerNorm(HIDDEN)
        if self.group is not None and self.sequence_parallel:
            sum_gradients_over(norm.parameters(), self.group)
        return norm

    def whole_sequence(self) -> dict[str, int]:
        return {"length": self.seq} if self.sequence_parallel else {}


class Mlp(nn.Module):
    """Gate and up in one weight."""

    def __init__(self, layers: Layers):
        super().__init__()
        self.layers = layers
        self.gate_up = layers.column(HIDDEN, 2 * FFN, segments=(FFN, FFN))
        self.down = layers.row(FFN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x, **self.layers.whole_sequence()).chunk(2, -1)
        return self.down((gate.sigmoid() + 1) * up)


# How queries, keys and values are made: of one weight; of three at once; of three, one by one, in a region of their own.
How = Literal["fused", "at once", "one by one"]


class Attention(nn.Module):
    """Queries, keys and values from one weight, or from three that share the region's boundary."""

    def __init__(self, layers: Layers, heads: AttentionHeads, how: How):
        super().__init__()
        self.layers, self.heads, self.how = layers, heads, how
        parts = (heads.query, heads.key_value, heads.key_value)
        if how == "fused":
            self.qkv = layers.column(HIDDEN, sum(p.size for p in parts), segments=parts)
        else:
            options = [{"segments": [p], "in_region": how == "one by one"} for p in parts]
            self.q, self.k, self.v = (layers.column(HIDDEN, p.size, **o) for p, o in zip(parts, options, strict=True))
        self.o = layers.row(heads.query.size, HIDDEN, segments=[heads.query])

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.how == "at once" and self.layers.group is not None:
            return column_outputs((self.q, self.k, self.v), x, **self.layers.whole_sequence())
        if self.how != "fused":
            if self.layers.group is not None:
                x = enter_region(x, self.layers.group, self.layers.sequence_parallel, **self.layers.whole_sequence())
            return self.q(x), self.k(x), self.v(x)
        group = self.layers.group
        parts = (self.heads.query, self.heads.key_value, self.heads.key_value)
        ranges = [p.part(self.layers.tp, 0 if group is None else group.index) for p in parts]
        return self.qkv(x, **self.layers.whole_sequence()).split([stop - start for start, stop in ranges], -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for t in self.project(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, layers: Layers, heads: AttentionHeads, how: How):
        super().__init__()
        self.norms = nn.ModuleList(layers.norm() for _ in range(2))
        self.attention, self.mlp = Attention(layers, heads, how), Mlp(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Decoder(nn.Module):
    """Tied embeddings and a loss per token; of its two blocks the second is recomputed in the backward."""

    def __init__(self, layers: Layers, heads: AttentionHeads, fused: bool):
        super().__init__()
        self.layers = layers
        self.embed = layers.embedding()
        self.blocks = nn.ModuleList(Block(layers, heads, "fused" if fused and k == 0 else "at once") for k in range(2))
        self.norm = layers.norm()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(ids))
        x = self.norm(checkpoint(self.blocks[1], x, use_reentrant=False))
        if self.layers.group is None:
            logits = F.linear(x, self.embed.weight)
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        logits = self.embed.logits(x, **self.layers.whole_sequence())
        return vocab_parallel_cross_entropy(logits, labels, self.layers.group, WORDS)


# Of a parameter on one rank: its name, its slice, whether its gradient is partial, and the gradient.
Part = tuple[str, Slicing | None, bool, Tensor]


def parts(model: nn.Module, gradients: dict[nn.Parameter, Tensor]) -> list[Part]:
    return [
        (name, slicing_of(p), getattr(p, "partial_over", None) is not None, gradients.get(p, p.grad).clone())
        for name, p in model.named_parameters()
    ]


def check_gradients(mine: list[Part], reference: nn.Module, **tolerance: float) -> None:
    """Check on rank 0 that the gathered gradients are the reference's; `mine` may hold every parameter several times."""
    expected = dict(reference.named_parameters())
    everyone: list[Any] = [None] * world().size
    dist.gather_object(mine, everyone if world().index == 0 else None, group=world().handle)
    if world().index > 0:
        return
    for name, *ranks in ((of_ranks[0][0], *of_ranks) for of_ranks in zip(*everyone, strict=True)):
        whole = gathered([slicing for _, slicing, _, _ in ranks], [p for _, _, p, _ in ranks], [g for *_, g in ranks])
        torch.testing.assert_close(whole, expected.pop(name).grad, msg=name, **(tolerance or EXACT))
        expected = expected or dict(reference.named_parameters())
    assert list(expected) == [name for name, _ in reference.named_parameters()], "all parameters were there"


def gathered(slicings: list[Slicing | None], partials: list[bool], gradients: list[Tensor]) -> Tensor:
    """The gradient of the whole parameter from every rank's, each place once."""
    if slicings[0] is None:
        assert len(set(partials)) == 1
        if partials[0]:
            return torch.stack(gradients).sum(0)
        assert all(torch.equal(g, gradients[0]) for g in gradients), "copies with whole gradients have the same bits"
        return gradients[0]
    dim = slicings[0].dim
    pieces: dict[int, Tensor] = {}
    for slicing, g in zip(slicings, gradients, strict=True):
        rows = [i for start, stop in slicing.ranges for i in range(start, stop)]
        assert len(rows) == g.shape[dim], "no padding"
        pieces.update(zip(rows, g.unbind(dim), strict=True))
    assert sorted(pieces) == list(range(slicings[0].size))
    return torch.stack([pieces[i] for i in range(slicings[0].size)], dim)


@contextmanager
def backward_mode(model: nn.Module, mode: str) -> Iterator[dict[nn.Parameter, Tensor]]:
    """Inside, a backward goes through a sink as `mode` says; yields where the gradients are afterwards."""
    if mode == "autograd":
        yield {}
        return
    sink = GradientSink()
    gradients = {p: torch.zeros_like(p).detach() for p in model.parameters()}
    for p, gradient in gradients.items():
        sink.attach(p, partial(lambda g: g, gradient))
    make_splittable(model, sink)
    sink.open()
    with {"whole": nullcontext, "fused": sink.fusing, "deferred": partial(sink.deferring, 0)}[mode]():
        yield gradients
    sliced = {p for p in gradients if slicing_of(p) is not None}
    assert mode != "deferred" or sliced <= sink.pending(0), "sliced weights' gradients are left for later"
    sink.run_deferred(0)
    for p in gradients:
        sink.detach(p)


def compare(model: nn.Module, reference: nn.Module, run: Callable[[nn.Module, Tensor], Tensor], x: Tensor) -> None:
    """Output, input gradient and gathered parameter gradients of `model` are the reference's, however they are computed."""
    theirs = x.clone().requires_grad_(x.is_floating_point())
    expected = run(reference, theirs)
    dy = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(1))
    expected.backward(dy)
    mine: list[Part] = []
    for mode in ("autograd", "whole", "fused", "deferred"):
        own = x.clone().requires_grad_(x.is_floating_point())
        model.zero_grad()
        with backward_mode(model, mode) as gradients:
            y = run(model, own)
            torch.testing.assert_close(y, expected, **EXACT)
            y.backward(dy)
        if x.is_floating_point():
            torch.testing.assert_close(own.grad, theirs.grad, **EXACT)
        mine += parts(model, gradients)
    check_gradients(mine, reference)


def build(make: Callable[[Layers], nn.Module], layers: Layers) -> nn.Module:
    torch.manual_seed(0)
    return make(layers).double()


def run_whole(model: nn.Module, x: Tensor, layers: Layers) -> Tensor:
    """A module that takes and returns whole sequences, whatever it does inside."""
    sliced = isinstance(model, (ColumnParallelLinear, RowParallelLinear, Mlp, Attention, VocabParallelEmbedding))
    if layers.group is None or not layers.sequence_parallel or not sliced:
        return model(x)
    y = model(scatter_sequence(x, layers.group) if x.is_floating_point() else x)
    return gather_sequence(y, layers.group, layers.seq)


HEADS = [(4, 4), (4, 2), (4, 1), (6, 3)]
PARTS: dict[str, Callable[[Layers], nn.Module]] = {
    "mlp": Mlp,
    **{
        f"attention {h}:{kv}, {how}": partial(
            lambda h, kv, how, layers: Attention(layers, AttentionHeads(h, kv, HEAD_DIM), how), h, kv, how
        )
        for h, kv in HEADS
        for how in ("at once", "one by one")
    },
    "attention, fused": lambda layers: Attention(layers, AttentionHeads(8, 4, HEAD_DIM), "fused"),
    "embedding": lambda layers: layers.embedding(),
    "embedding with padding": lambda layers: layers.embedding(padding_idx=-4),
}


def check_parts(sequence_parallel: bool) -> None:
    torch.manual_seed(2)
    plain, layers = Layers(), Layers(world(), sequence_parallel)
    for name, make in PARTS.items():
        x = torch.randn(BATCH, SEQ, HIDDEN, dtype=torch.float64)
        if name.startswith("embedding"):
            x = torch.randint(WORDS, (BATCH, SEQ))
        model, reference = build(make, layers), build(make, plain)
        try:
            compare(model, reference, lambda m, x, model=model: run_whole(m, x, layers if m is model else plain), x)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


@contextmanager
def halving() -> Iterator[None]:
    """Products as small as these are communicated in halves."""
    with mock.patch.multiple(regions, HALVES_FROM=0, ROWS_FROM=1):
        yield


def check_halves(sequence_parallel: bool) -> None:
    """Compare halves of several samples and of one, with shards of 6, 4 and 3 positions."""
    torch.manual_seed(2)
    layers, plain = Layers(world(), sequence_parallel, 12), Layers(seq=12)
    for make in Mlp, lambda layers: Attention(layers, AttentionHeads(4, 2, HEAD_DIM), "at once"):
        for samples in (1, 3):
            model, reference = build(make, layers), build(make, plain)
            x = torch.randn(samples, 12, HIDDEN, dtype=torch.float64)
            with halving():
                compare(model, reference, lambda m, x, model=model: run_whole(m, x, layers if m is model else plain), x)


def check_copies() -> None:
    """Shards by messages instead of collectives, whole ones and in pieces, of several samples and of one."""
    torch.manual_seed(2)
    group = world()
    seq = 4 * group.size
    layers, plain = Layers(group, True, seq), Layers(seq=seq)
    for make in Mlp, lambda layers: Attention(layers, AttentionHeads(4, 2, HEAD_DIM), "at once"):
        for samples, most_rows in ((1, 4), (3, 3)):
            model, reference = build(make, layers), build(make, plain)
            x = torch.randn(samples, seq, HIDDEN, dtype=torch.float64)
            messages = ShardMessages(group, most_rows * HIDDEN * x.itemsize)
            group.use_shard_messages(messages)
            try:
                with mock.patch.object(regions, "ROWS_FROM", 1):
                    compare(
                        model, reference, lambda m, x, model=model: run_whole(m, x, layers if m is model else plain), x
                    )
            finally:
                group.use_shard_messages(None)
            messages.finish()
            # Each of two layers gathers and scatters forward and backward, and the first gathers its input once more.
            pieces = -(-4 // most_rows) * samples * (group.size - 1)
            runs = messages.calls["receive"] // pieces
            assert runs > 0
            assert messages.calls == Counter(send=5 * runs * pieces, taken=4 * runs * pieces, receive=runs * pieces)


def check_single_layers() -> None:
    """Column and row layers alone, with whole inputs and outputs."""
    group = world()
    torch.manual_seed(2)
    for bias in (True, False):
        for segments in (None, (3, 5, 2), [AttentionHeads(5, 5, 2).query]):
            column: dict[str, Any] = {"bias": bias, "gather_output": True, "segments": segments}
            row: dict[str, Any] = {"bias": bias, "input_is_parallel": False, "segments": segments}
            column_layers = [
                build(lambda layers, o=column: layers.column(HIDDEN, 10, **o), Layers(g)) for g in (group, None)
            ]
            compare(*column_layers, lambda m, x: m(x), torch.randn(3, HIDDEN, dtype=torch.float64))
            row_layers = [build(lambda layers, o=row: layers.row(10, HIDDEN, **o), Layers(g)) for g in (group, None)]
            compare(*row_layers, lambda m, x: m(x), torch.randn(BATCH, SEQ, 10, dtype=torch.float64))
    shared = {"gather_output": True, "segments": [AttentionHeads(4, 1, 5).key_value]}
    layers = [build(lambda layers: layers.column(HIDDEN, 5, **shared), Layers(g)) for g in (group, None)]
    compare(*layers, lambda m, x: m(x), torch.randn(HIDDEN, dtype=torch.float64))


def check_decoder(sequence_parallel: bool) -> None:
    torch.manual_seed(2)
    ids, labels = torch.randint(WORDS, (2, BATCH, SEQ))
    labels[0, 2:4] = -100
    layers, heads = Layers(world(), sequence_parallel), AttentionHeads(6, 3, HEAD_DIM)
    make = partial(Decoder, heads=heads, fused=heads.num_kv_heads >= layers.tp)
    compare(build(make, layers), build(make, Layers()), lambda m, ids: m(ids, labels), ids)


def check_gradient_penalty(sequence_parallel: bool) -> None:
    """A loss that contains gradients of the input and of weights: the collectives of the backward are differentiated."""
    layers = Layers(world(), sequence_parallel)
    model, reference = build(Mlp, layers), build(Mlp, Layers())

    def run(m: nn.Module, x: Tensor) -> Tensor:
        kind = layers if m is model else Layers()
        weights = [p for p in m.parameters() if p.dim() == 2]
        dx, *dws = torch.autograd.grad(run_whole(m, x, kind).square().sum(), [x, *weights], create_graph=True)
        penalty = torch.stack([dw.square().sum() for dw in dws]).sum()
        penalty = penalty if kind.group is None else reduce_from_region(penalty, kind.group)
        return dx.square() + penalty + run_whole(m, x, kind)

    x = torch.randn(BATCH, SEQ, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [run(m, x) for m, x in zip((model, reference), inputs, strict=True)]
    for y in outputs:
        y.sum().backward()
    torch.testing.assert_close(outputs[0], outputs[1], **EXACT)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, **EXACT)
    check_gradients(parts(model, {}), reference)


def check_cross_entropy(compiled: bool) -> None:
    group = world()
    passes = Passes.compiled(backend="aot_eager") if compiled else EAGER
    for words, options in [(WORDS, {}), (WORDS, {"label_smoothing": 0.1}), (8, {"z_loss": 1e-2, "ignore_index": 3})]:
        torch.compiler.reset()
        torch.manual_seed(3)
        logits = 30 * torch.randn(5, 4, words, dtype=torch.float64)
        labels, dy = torch.randint(words, (5, 4)), torch.randn(5, 4, dtype=torch.float64)
        labels[1] = options.get("ignore_index", -100)
        whole = logits.clone().requires_grad_()
        z_loss = options.pop("z_loss", 0.0)
        expected = F.cross_entropy(whole.flatten(0, 1), labels.flatten(), reduction="none", **options).view(5, 4)
        valid = labels != options.get("ignore_index", -100)
        expected = expected + z_loss * whole.logsumexp(-1).square() * valid
        expected.backward(dy)
        part = torch.tensor_split(torch.arange(words), group.size)[group.index]
        mine = logits[..., part].clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(mine, labels, group, words, z_loss=z_loss, passes=passes, **options)
        loss.backward(dy)
        torch.testing.assert_close(loss, expected, **EXACT)
        torch.testing.assert_close(mine.grad, whole.grad[..., part], **EXACT)
        half = logits[..., part].bfloat16().requires_grad_()
        loss = vocab_parallel_cross_entropy(half, labels, group, words, z_loss=z_loss, **options)
        rounded = logits.bfloat16().double()
        expected = F.cross_entropy(rounded.flatten(0, 1), labels.flatten(), reduction="none", **options).view(5, 4)
        expected = expected + z_loss * rounded.logsumexp(-1).square() * valid
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
        loss.sum().backward()
        assert half.grad.dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match="not in"):
            vocab_parallel_cross_entropy(mine, labels.masked_fill(labels == labels[0, 0], words), group, words)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_layers_equal_plain_torch(run_ranks, tp: int) -> None:
    run_ranks(tp, check_single_layers)
    run_ranks(tp, check_cross_entropy, False)


def test_a_compiled_cross_entropy_equals_plain_torch(run_ranks) -> None:
    run_ranks(2, check_cross_entropy, True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_blocks_and_models_equal_plain_torch(run_ranks, tp: int, sequence_parallel: bool) -> None:
    run_ranks(tp, check_parts, sequence_parallel)
    run_ranks(tp, check_halves, sequence_parallel)
    run_ranks(tp, check_decoder, sequence_parallel)
    run_ranks(tp, check_gradient_penalty, sequence_parallel)


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_shards_that_travel_beside_products_equal_plain_torch(run_ranks, tp: int) -> None:
    run_ranks(tp, check_copies)


def check_autocast() -> None:
    layers, plain = Layers(world()), Layers()
    model, reference = build(Mlp, layers).float(), build(Mlp, plain).float()
    x = torch.randn(BATCH, SEQ, HIDDEN, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = model(x), reference(x)
    assert y.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=2**-6, atol=2**-6)
    y.sum().backward()
    expected.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    check_gradients(parts(model, {}), reference, rtol=2**-4, atol=2**-4)


def test_autocast(run_ranks) -> None:
    run_ranks(2, check_autocast)


def count_block(sequence_parallel: bool, how: How, seq: int) -> tuple[dict[Any, int], dict[Any, int]]:
    """Count the collectives of a transformer layer's forward and backward."""
    layers = Layers(world(), sequence_parallel, seq)
    block = build(lambda layers: Block(layers, AttentionHeads(4, 4, HEAD_DIM), how), layers)
    shard = seq // layers.tp if sequence_parallel else seq
    x = torch.randn(BATCH, shard, HIDDEN, dtype=torch.float64, requires_grad=True)
    with Collectives() as forward:
        y = block(x)
    with Collectives() as backward:
        y.sum().backward()
    return dict(forward.counts), dict(backward.counts)


@pytest.mark.parametrize("how", ["fused", "at once", "one by one"])
@pytest.mark.parametrize("tp", [2, 4])
def test_a_transformer_layer_communicates_as_in_the_papers(run_ranks, tp: int, how: How) -> None:
    """Two all-reduces forward and two backward; or gathers and scatters of the same bytes, and the gathers done again."""
    whole = BATCH * 8 * HIDDEN * 8
    for forward, backward in run_ranks(tp, count_block, False, how, 8):
        assert forward == {("allreduce_", whole): 2}
        assert backward == {("allreduce_", whole): 2}
    # Of the row layers' gradients two; again for the weights of the column layers that gather by themselves.
    gathers = 2 + (1 if how == "one by one" else 2)
    for forward, backward in run_ranks(tp, count_block, True, how, 8):
        assert forward == {("_allgather_base_", whole // tp): 2, ("_reduce_scatter_base_", whole): 2}
        assert backward == {("_allgather_base_", whole // tp): gathers, ("_reduce_scatter_base_", whole): 2}


aten = torch.ops.aten
MULTIPLY = {
    aten.mm.default: "product",
    aten.mm.out: "product",
    aten.addmm.default: "product",
    aten.addmm.out: "product added",
    aten.addmm_.default: "product added",
}


class Products(TorchDispatchMode):
    """Adds to a list what is multiplied."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in MULTIPLY:
            self.events.append(MULTIPLY[func])
        return func(*args, **(kwargs or {}))


@contextmanager
def noting(events: list[str]) -> Iterator[None]:
    """Add to a list, in order, what is multiplied and communicated."""

    def noted(name: str, start: Callable[..., Work], *args: Any) -> Work:
        events.append(f"start {name}")
        work = start(*args)
        return mock.Mock(wait=lambda: (work.wait(), events.append(f"wait for {name}")))

    names = ("all_reduce", "all_gather_into", "reduce_scatter_into")
    starts = {name: partial(noted, name, getattr(collectives, name)) for name in names}
    with mock.patch.multiple(collectives, **starts), Products(events):
        yield


def note_order(num_layers: int, sequence_parallel: bool, mode: str, halved: bool) -> list[str]:
    """Return the events of the backward of column layers with one input, in order."""
    events: list[str] = []
    layers = nn.ModuleList(
        ColumnParallelLinear(HIDDEN, FFN, False, sequence_parallel=sequence_parallel, group=world())
        for _ in range(num_layers)
    )
    with halving() if halved else nullcontext(), backward_mode(layers, mode):
        ys = column_outputs(list(layers), torch.randn(1, 4, HIDDEN, requires_grad=True))
        with noting(events):
            torch.stack(ys).sum().backward()
    return events


REDUCED = ["start all_reduce", "wait for all_reduce"]


def test_the_backward_of_column_layers_hides_its_communication(run_ranks) -> None:
    """The input gradient's reduction behind the weights' products, the gathering done again behind the input's."""
    start, wait = REDUCED
    for events in run_ranks(2, note_order, 1, False, "autograd", True):
        assert events == ["product", start, "product", wait]
    for events in run_ranks(2, note_order, 3, False, "autograd", True):
        assert events == ["product", "product added", "product added", start, *3 * ["product"], wait]
    for events in run_ranks(2, note_order, 1, True, "fused", True):
        assert events == [
            "start all_gather_into",
            "product",
            "start reduce_scatter_into",
            "wait for all_gather_into",
            "product added",  # to the accumulator
            "wait for reduce_scatter_into",
        ]


def test_a_deferred_backward_of_column_layers_hides_half_of_its_communication(run_ranks) -> None:
    """There are no products of weights, so the first half of the input gradient is reduced while the second multiplies."""
    start, wait = REDUCED
    for events in run_ranks(2, note_order, 2, False, "deferred", True):
        assert events == 2 * ["product", "product added", start] + 2 * [wait]
    for events in run_ranks(2, note_order, 1, False, "deferred", False):
        assert events == ["product", start, wait], "a small one at once"
    start, wait = "start reduce_scatter_into", "wait for reduce_scatter_into"
    for events in run_ranks(2, note_order, 1, True, "deferred", True):
        by_rank = ["product", "product", start]
        assert [event for event in events if "gather" not in event] == [*by_rank, *by_rank, wait, wait]


def note_row(sequence_parallel: bool, halved: bool) -> list[str]:
    """Return the events of a row layer's forward, in order."""
    events: list[str] = []
    layer = RowParallelLinear(FFN, HIDDEN, sequence_parallel=sequence_parallel, group=world())
    with halving() if halved else nullcontext(), noting(events):
        layer(torch.randn(1, 4, FFN // 2))
    return events


def test_a_row_layer_hides_half_of_its_communication(run_ranks) -> None:
    start, wait = REDUCED
    for events in run_ranks(2, note_row, False, True):
        assert events == ["product", start, "product", start, wait, wait]
    for events in run_ranks(2, note_row, False, False):
        assert events == ["product", start, wait], "a small one at once"
    start, wait = "start reduce_scatter_into", "wait for reduce_scatter_into"
    for events in run_ranks(2, note_row, True, True):
        assert events == [*2 * ["product", "product", start], wait, wait], "the same half of each rank's places"


def count_ends() -> list[dict[Any, int]]:
    group = world()
    layers = Layers(group)
    embed = build(lambda layers: layers.embedding(), layers)
    ids = torch.randint(WORDS, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
    counts = []
    with Collectives() as embedded:
        x = embed(ids)
    counts.append(dict(embedded.counts))
    with Collectives() as loss:
        y = vocab_parallel_cross_entropy(embed.logits(x), ids, group, WORDS)
    counts.append(dict(loss.counts))
    with Collectives() as backward:
        y.sum().backward()
    return [*counts, dict(backward.counts)]


def test_embedding_and_loss_communicate_activations_and_numbers_per_token(run_ranks) -> None:
    tokens = BATCH * SEQ * 8
    for counts in run_ranks(2, count_ends):
        assert counts == [
            {("allreduce_", tokens * HIDDEN): 1},
            {("allreduce_", tokens): 1, ("allreduce_", 2 * tokens): 1},
            {("allreduce_", tokens * HIDDEN): 1},
        ]


class Users(nn.Module):
    """A user's model: grouped-query attention and a gated MLP with names as in Hugging Face's, tied output layer."""

    def __init__(self, heads: AttentionHeads):
        super().__init__()
        self.embed_tokens = nn.Embedding(WORDS, HIDDEN)
        self.layers = nn.ModuleList(nn.ModuleDict(self._block(heads)) for _ in range(2))
        self.lm_head = nn.Linear(HIDDEN, WORDS, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def _block(self, heads: AttentionHeads) -> dict[str, nn.Module]:
        return {
            "norm": nn.LayerNorm(HIDDEN),
            "q_proj": nn.Linear(HIDDEN, heads.query.size),
            "k_proj": nn.Linear(HIDDEN, heads.key_value.size),
            "v_proj": nn.Linear(HIDDEN, heads.key_value.size),
            "q_norm": nn.LayerNorm(HEAD_DIM),
            "o_proj": nn.Linear(heads.query.size, HIDDEN, bias=False),
            "gate_up_proj": nn.Linear(HIDDEN, 2 * FFN),
            "down_proj": nn.Linear(FFN, HIDDEN),
        }

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for m in self.layers:
            h = m["norm"](x)
            q, k, v = (m[f"{n}_proj"](h).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for n in "qkv")
            y = F.scaled_dot_product_attention(m["q_norm"](q), k, v, is_causal=True, enable_gqa=True)
            x = x + m["o_proj"](y.transpose(1, 2).flatten(2))
            gate, up = m["gate_up_proj"](m["norm"](x)).chunk(2, -1)
            x = x + m["down_proj"](F.silu(gate) * up)
        return self.lm_head(x)


def check_parallelize(sequence_parallel: bool) -> None:
    heads = AttentionHeads(6, 3, HEAD_DIM)
    reference, model = (build(lambda _: Users(heads), Layers()) for _ in range(2))
    plan = {
        "*.q_proj": Column(segments=[heads.query]),
        "*.[kv]_proj": Column(segments=[heads.key_value]),
        "*.o_proj": Row(segments=[heads.query]),
        "layers.*.gate_up_proj": "packed_colwise",
        "layers.*.down_proj": "rowwise",
        "*.q_norm": "replicated_with_grad_allreduce",
        "embed_tokens": "rowwise",
        "lm_head": "colwise_gather_output",
    }
    assert parallelize(model, plan, world(), sequence_parallel=sequence_parallel) is model
    assert model.lm_head.weight is model.embed_tokens.weight
    ids = torch.randint(WORDS, (BATCH, 12), generator=torch.Generator().manual_seed(0))
    compare(model, reference, lambda m, ids: m(ids), ids)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_a_users_module_sliced_by_a_plan_equals_itself(run_ranks, tp: int, sequence_parallel: bool) -> None:
    run_ranks(tp, check_parallelize, sequence_parallel)


def check_reduction_in_place() -> None:
    """Compare reductions of results that are views and of others; each gradient is that of the sum."""
    group, x = world(), torch.arange(6.0).view(2, 3)
    for result in (lambda x: 2 * x, lambda x: (2 * x).t(), lambda x: (2 * x).view(6), lambda x: (2 * x)[:, 1:]):
        mine = (x + group.index).requires_grad_()
        expected = sum(result(x + rank) for rank in range(group.size))
        y = reduce_from_region_(result(mine), group)
        assert torch.equal(y, expected)
        (y * expected).sum().backward()
        theirs = x.clone().requires_grad_()
        (result(theirs) * expected).sum().backward()
        assert torch.equal(mine.grad, theirs.grad)


def test_a_reduction_in_place_of_any_result(run_ranks) -> None:
    run_ranks(2, check_reduction_in_place)


# Parts of seven: features over 3 ranks, the heads of 2 key and value heads over 3 ranks, a sequence that needs padding.
DROPPED = {
    "features": (torch.Size([2, 5, 7]), -1, None),
    "heads": (torch.Size([2, 6, 3, 3]), -3, [AttentionHeads(6, 2, head_dim=1).query]),
    "sequence": (torch.Size([2, 7, 4]), -2, None),
}


def drop_whole_masks(what: str) -> list[tuple[Tensor, Tensor]]:
    """Twice: what this rank drops of ones, and its part of the whole that one process would drop."""
    group, (shape, dim, segments) = world(), DROPPED[what]
    masks = []
    for seed in (3, 4):
        torch.manual_seed(seed)
        whole = F.dropout(torch.ones(shape), 0.5)
        torch.manual_seed(seed)
        if what == "sequence":
            layer = SequenceDropout(0.5, layout_independent=True, group=group)
            own, part = layer(torch.ones(2, 3, 4), shape[dim]), F.pad(whole, (0, 0, 0, 2)).split(3, dim)[group.index]
        else:
            layer = SlicedDropout(0.5, shape[dim], dim, segments=segments, layout_independent=True, group=group)
            part = cut(shape[dim], segments, group.size).slicing(dim, group.index).part_of(whole)
            own = layer(torch.ones_like(part))
        masks.append((own, part))
    return masks


@pytest.mark.parametrize("what", DROPPED)
def test_slices_take_their_parts_of_one_mask_where_asked(run_ranks, what: str):
    for (first, wanted), (second, wanted_next) in run_ranks(3, drop_whole_masks, what):
        assert torch.equal(first, wanted)
        assert torch.equal(second, wanted_next)
        assert not torch.equal(first, second)


def check_region_in_a_graph() -> None:
    """Compare all collectives and dropout of shards, which draws twice, compiled in one graph and not."""
    group = world()
    dropout = SequenceDropout(0.5, group=group)

    def region(x: Tensor) -> Tensor:
        x = differentiable.copy_to_region(x.sin(), group)
        x = differentiable.reduce_scatter(x * group.index, group, -2)
        x = dropout(dropout(x).cos())
        x = differentiable.all_gather(x, group, -2).exp()
        x = differentiable.scatter_to_region(x, group, -1)
        x = differentiable.gather_from_region(x.sin(), group, -1)
        return reduce_from_region_(x * x, group)

    results = []
    for run in (region, torch.compile(region, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(5)
        x = torch.randn(2, 6, 4, dtype=torch.float64).requires_grad_()
        y = run(x)
        y.sin().sum().backward()
        results.append((y, x.grad, torch.rand(3)))
    for plain, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=0, atol=0)


def test_collectives_and_dropout_of_shards_do_not_break_a_graph(run_ranks) -> None:
    run_ranks(2, check_region_in_a_graph)


def draw_in_slices() -> tuple[Tensor, Tensor, Tensor]:
    """A mask drawn in common, one of the rank's own, and one in common again."""
    group = world()
    torch.manual_seed(3)
    masks = [torch.rand(50)]
    with group.own_stream(torch.device("cpu")):
        masks.append(torch.rand(50))
    masks.append(torch.rand(50))
    return masks[0], masks[1], masks[2]


def test_slices_draw_numbers_of_their_own_and_go_on_alike(run_ranks):
    ranks = run_ranks(3, draw_in_slices)
    for before, own, after in ranks[1:]:
        assert torch.equal(before, ranks[0][0])
        assert not torch.equal(own, ranks[0][1])
        assert torch.equal(after, ranks[0][2])
    # A single part draws as if nothing were sliced.
    torch.manual_seed(3)
    assert all(torch.equal(mask, torch.rand(50)) for mask in run_ranks(1, draw_in_slices)[0])


def warnings_of(sliced: bool) -> list[str]:
    config = {"tensor_parallel": {"size": 2}, "pipeline": {"stages": 1}}
    layer = LayerSpec(ColumnParallelLinear, 4, 4, gather_output=True) if sliced else LayerSpec(nn.Linear, 4, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        PipelineModule([layer], loss_fn=F.mse_loss, config=config)
    return [str(warning.message) for warning in caught]


def test_slices_of_a_model_that_slices_nothing_are_warned_of(run_ranks) -> None:
    first, second = run_ranks(2, warnings_of, False)
    assert [w for w in first if "tensor_parallel.size is 2, but no layer is sharded" in w]
    assert not second
    assert run_ranks(2, warnings_of, True) == [[], []]
