"""Costs of layers on a sample: FLOPs against closed formulas, measured order, and what finding them leaves alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import parallel3d
from parallel3d.comm.collectives import DONE
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.topology import PipeDataParallelTopology
from parallel3d.config import Config
from parallel3d.costs.counter import OperatorCounter
from parallel3d.costs.layer_profile import LayerProfile
from parallel3d.costs.model_traces import trace_layers
from parallel3d.costs.profilers import TimeProfiler
from parallel3d.costs.trained_layer import Sample
from parallel3d.costs.work import FLOPS_PER_BYTE
from parallel3d.errors import PartitionError
from parallel3d.models.blocks import decoder
from parallel3d.models.config import DecoderConfig
from parallel3d.optim.precision import Precision
from parallel3d.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from parallel3d.specs import BuildContext


@pytest.fixture(scope="module")
def context() -> BuildContext:
    return BuildContext(ProcessGroups(PipeDataParallelTopology(1, 1)), torch.device("cpu"))


class Traced(NamedTuple):
    """FLOPs of both passes, with bytes as FLOPs, bytes that are saved for the backward, and those of the input."""

    forward: float
    backward: float
    saved: int
    given: int


def trace(context: BuildContext, layers: list[Any], x: Any, labels: Any = None, loss: Any = None) -> list[Traced]:
    sample = Sample(x, labels, loss, Precision())
    profiles = trace_layers(layers, sample, Config(), context, "use partition method 'profile' or 'parameters'")
    return [
        Traced(p.forward.flops_and_bytes, p.backward.flops_and_bytes, p.saved_bytes, sum(p.inputs)) for p in profiles
    ]


def matmul(m: int, n: int, k: int) -> int:
    return 2 * m * n * k


class Attention(nn.Module):
    """Linears and fused attention alone: what remains besides matmuls are the bytes of no operator but copies."""

    def __init__(self, hidden: int, heads: int, causal: bool):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


@given(st.integers(1, 3), st.integers(1, 64), st.integers(1, 4), st.integers(1, 32), st.booleans())
@settings(max_examples=5, deadline=None)
def test_flops_of_attention_are_those_of_its_matrices(batch: int, seq: int, heads: int, dim: int, causal: bool) -> None:
    context = BuildContext(ProcessGroups(PipeDataParallelTopology(1, 1)), torch.device("cpu"))
    hidden, tokens = heads * dim, batch * seq
    (cost,) = trace(context, [LayerSpec(Attention, hidden, heads, causal)], torch.zeros(batch, seq, hidden))
    linears = matmul(tokens, 3 * hidden, hidden) + matmul(tokens, hidden, hidden)
    scores = batch * heads * matmul(seq, seq, dim) / (2 if causal else 1)
    # Of the input, to which no gradient goes, no gradient is computed.
    backward = 2 * linears - matmul(tokens, hidden, 3 * hidden) + 5 * scores
    moved = (cost.forward - linears - 2 * scores) / FLOPS_PER_BYTE, (cost.backward - backward) / FLOPS_PER_BYTE
    # The rest are copies: at most the attention's output forward; backward the gradients of query, key and value. Gradients of
    # weights are added to their accumulators.
    assert 0 <= moved[0] <= 2 * 4 * tokens * hidden
    assert 0 <= moved[1] - 3 * 4 * 4 * hidden**2 <= 40 * 4 * tokens * hidden


def test_linears_cost_two_flops_a_weight_and_token_forward_and_four_backward(context: BuildContext) -> None:
    layers = [LayerSpec(nn.Linear, 64, 256, bias=False), LayerSpec(nn.Linear, 256, 32, bias=False)]
    first, second = trace(context, layers, torch.zeros(8, 64))
    assert (first.forward, second.forward) == (matmul(8, 256, 64), matmul(8, 32, 256))
    added = 3 * 4 * FLOPS_PER_BYTE  # a gradient of a weight and its accumulator are read, and the sum is written
    assert first.backward == matmul(8, 256, 64) + 64 * 256 * added  # no gradient of the model's input
    assert second.backward == 2 * matmul(8, 32, 256) + 256 * 32 * added


def test_an_elementwise_layer_costs_its_bytes_and_a_look_up_not_its_table(context: BuildContext) -> None:
    embedding, relu, view = trace(
        context,
        [
            LayerSpec(nn.Embedding, 10**9, 16),
            LayerSpec(nn.ReLU),
            lambda x: x.transpose(0, 1),
        ],  # 64 GB: no memory needed
        torch.zeros(4, 8, dtype=torch.long),
    )
    numbers = 4 * 8 * 16
    assert embedding.forward == FLOPS_PER_BYTE * 4 * 2 * numbers
    assert relu.forward == FLOPS_PER_BYTE * 4 * 2 * numbers
    assert view.forward == 0


def test_the_loss_counts_with_the_last_layer_where_there_are_labels(context: BuildContext) -> None:
    layers, x, labels = [LayerSpec(nn.Linear, 8, 16), LayerSpec(nn.Linear, 16, 100)], torch.zeros(4, 8), torch.zeros(4)
    (_, without), (_, with_loss) = (
        trace(context, layers, x, y, nn.functional.cross_entropy) for y in (None, labels.long())
    )
    assert with_loss.forward - without.forward >= FLOPS_PER_BYTE * 4 * 4 * 100


def test_heads_that_share_keys_cost_as_many_scores(context: BuildContext) -> None:
    def share_of_scores(kv_heads: int, seq: int) -> float:
        config = DecoderConfig(
            vocab_size=32,
            hidden_size=64,
            ffn_size=64,
            num_layers=1,
            num_heads=8,
            num_kv_heads=kv_heads,
            max_positions=seq,
        )
        return trace(context, decoder(config), torch.zeros(1, seq, dtype=torch.long))[1].forward

    # From 256 to 512 tokens all else doubles; scores grow by 4.
    grown = [share_of_scores(kv, 512) - 2 * share_of_scores(kv, 256) for kv in (8, 2)]
    assert grown[0] == pytest.approx(matmul(512, 512, 64) - 2 * matmul(256, 256, 64), rel=0.05)
    assert grown[1] == pytest.approx(grown[0], rel=0.05)


def test_a_tensor_parallel_rank_has_its_share_of_products_and_of_activations() -> None:
    config = DecoderConfig(vocab_size=64, hidden_size=64, ffn_size=128, num_layers=1, num_heads=4, max_positions=16)
    sample = Sample(torch.zeros(2, 16, dtype=torch.long), None, None, Precision())

    def block(ranks: int, parallel: bool) -> LayerProfile:
        groups = ProcessGroups.imagined(ranks, lambda kind, nbytes: DONE)
        return trace_layers(
            decoder(config), sample, Config(), BuildContext(groups, torch.device("cpu"), parallel), "no"
        )[1]

    whole, own, parallel = block(1, False), block(2, False), block(2, True)
    for rank in (own, parallel):
        assert rank.forward.flops == whole.forward.flops / 2
        assert rank.backward.flops == whole.backward.flops / 2
        assert whole.forward.moved / 2 < rank.forward.moved < whole.forward.moved
    assert whole.saved_bytes / 2 <= parallel.saved_bytes < own.saved_bytes < whole.saved_bytes


def test_saved_bytes_are_those_that_the_backward_needs(context: BuildContext) -> None:
    layers = [LayerSpec(nn.Linear, 64, 64), LayerSpec(nn.Sequential, nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))]
    linear, mlp = trace(context, layers, torch.zeros(8, 64))
    assert linear.saved == 4 * 8 * 64  # its input
    assert mlp.saved == 4 * 8 * (64 + 256 + 256)  # each linear's and the GELU's
    assert mlp.given == 4 * 8 * 64


class Remembers(nn.Module):
    """Keeps something in an argument that it shares with others, and counts its calls in a buffer."""

    def __init__(self, size: int, memory: dict[str, Tensor]):
        super().__init__()
        self.linear, self.memory = nn.Linear(size, size), memory
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.memory.setdefault("shift", torch.ones(x.shape[-1], dtype=x.dtype))
        return nn.functional.dropout(self.linear(x) + self.memory["shift"], 0.1)


def test_a_trace_leaves_arguments_modules_and_generators_alone(context: BuildContext) -> None:
    memory: dict[str, Tensor] = {}
    own = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    before = copy.deepcopy(own.state_dict())
    state = torch.get_rng_state()
    layers = [LayerSpec(Remembers, 8, memory), own, LayerSpec(Remembers, 8, memory)]
    costs = trace(context, layers, torch.zeros(4, 8))
    assert costs[0].forward == costs[2].forward > 0
    assert memory == {}
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in own.state_dict().items():
        assert type(tensor) is Tensor
        assert torch.equal(tensor, before[name])
    assert all(type(p.data) is Tensor and p.grad is None for p in own.parameters())


class Looks(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if float(x.sum()) >= 0 else x


class Gathers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.distributed.all_reduce(x)
        return x


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (LayerSpec(Looks, 8), r"layer 1 \(Looks\): it can't be traced on fake tensors: .*if tensor.*'profile'"),
        (
            LayerSpec(Gathers),
            r"layer 1 \(Gathers\): it communicates .* BuildContext \(context=\), or use partition method 'profile'",
        ),
        (LayerSpec(nn.Linear, 9, 9), r"layer 1 \(Linear\): it can't be traced"),
    ],
)
def test_layers_that_cannot_be_traced_are_named(context: BuildContext, layer: Any, message: str) -> None:
    parallel3d.init_distributed()
    with pytest.raises(PartitionError, match=message):
        trace(context, [LayerSpec(nn.Linear, 8, 8), layer], torch.zeros(4, 8))


class Clock:
    """Clock that advances only by the seconds that layers add."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def read(self, marks: Sequence[float]) -> list[float]:
        return list(marks)


class Takes(nn.Module):
    """A second for each of `rounds`, forward and backward alike; ten times as long while it warms up and in its last call."""

    def __init__(self, clock: Clock, rounds: int):
        super().__init__()
        self.clock, self.rounds, self.calls = clock, rounds, 0

    def __deepcopy__(self, memo: Any) -> Takes:
        return Takes(self.clock, self.rounds)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        seconds = self.rounds * (10 if self.calls in (1, 2, 7) else 1)
        self.clock.now += seconds
        y = x * 2
        if y.requires_grad:
            y.register_hook(lambda _: setattr(self.clock, "now", self.clock.now + seconds))
        return y


def test_measured_is_the_median_after_a_warm_up(context: BuildContext) -> None:
    clock = Clock()
    sample = Sample(torch.randn(4, 8), None, None, Precision())
    layers = [nn.Linear(8, 8), *(Takes(clock, rounds) for rounds in (8, 1, 64))]
    found = TimeProfiler(sample, context, clock=clock).measure_all(layers)
    assert [(cost.forward, cost.backward) for cost in found] == [(0, 0), (8, 8), (1, 1), (64, 64)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layers_are_measured_in_the_precision_of_training(context: BuildContext, dtype: torch.dtype) -> None:
    seen = []

    class Notes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((x.dtype, self.weight.dtype))
            return super().forward(x)

    TimeProfiler(Sample(torch.randn(4, 8), None, None, Precision(weights=dtype)), context).measure_all([Notes(8, 8)])
    assert set(seen) == {(dtype, dtype)}


def test_a_layer_may_work_on_its_input_in_place(context: BuildContext) -> None:
    layers = [LayerSpec(nn.Linear, 8, 8), LayerSpec(nn.ReLU, inplace=True)]
    x = torch.randn(4, 8)
    for costs in (
        trace(context, layers, x),
        TimeProfiler(Sample(x, None, None, Precision()), context).measure_all(layers),
    ):
        assert all(cost.forward > 0 and cost.backward > 0 for cost in costs)


def test_a_tied_layer_is_found_by_how_it_is_called(context: BuildContext) -> None:
    def project(module: nn.Embedding, x: Tensor) -> Tensor:
        return x @ module.weight.t()

    layers = [
        TiedLayerSpec("embed", nn.Embedding, 100, 8),
        TiedLayerSpec("embed", nn.Embedding, 100, 8, forward_fn=project),
    ]
    embedding, head = trace(context, layers, torch.zeros(4, dtype=torch.long))
    assert head.forward == matmul(4, 100, 8)
    assert embedding.forward == FLOPS_PER_BYTE * 2 * 4 * 4 * 8


@pytest.mark.parametrize("method", ["flops", "profile"])
def test_finding_costs_moves_neither_weights_nor_generators(method: str) -> None:
    memory: dict[str, Tensor] = {}
    layers = [
        LayerSpec(Remembers, 8, memory),
        Remembers(8, {}),
        LayerSpec(nn.Sequential, nn.Linear(8, 8), Remembers(8, {})),
        LayerSpec(nn.Linear, 8, 8),
    ]

    def build(**changes: Any) -> tuple[dict[str, Tensor], Tensor]:
        torch.manual_seed(3)
        module = PipelineModule(copy.deepcopy(layers), num_stages=1, num_chunks=2, **changes)
        return dict(module.state_dict()), torch.rand(3)

    plain, after = build()
    found, after_found = build(
        partition_method=method, sample_input=torch.randn(4, 8), config={"bf16": {"enabled": True}}
    )
    assert plain.keys() == found.keys()
    assert all(found[name].dtype == tensor.dtype for name, tensor in plain.items())
    assert all(torch.equal(found[name], tensor) for name, tensor in plain.items())
    assert torch.equal(after, after_found)


class Scaled(nn.Linear):
    """Its table and its weight must have one dtype, as rotary tables and what attention mixes."""

    def __init__(self, size: int):
        super().__init__(size, size)
        self.register_buffer("table", torch.ones(size, size))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.table


@pytest.mark.parametrize("method", ["flops", "profile"])
def test_buffers_have_the_dtype_that_training_gives_them(method: str) -> None:
    layers = [LayerSpec(Scaled, 8) for _ in range(4)]
    module = PipelineModule(
        layers,
        num_stages=1,
        num_chunks=2,
        partition_method=method,
        sample_input=torch.randn(4, 8),
        config={"bf16": {"enabled": True}},
    )
    assert module.partition.num_parts == 2


def test_a_method_that_needs_a_sample_says_so() -> None:
    with pytest.raises(PartitionError, match=r"'flops' runs the layers on a sample, .* pass sample_input="):
        PipelineModule([nn.Linear(2, 2)] * 2, num_stages=1, num_chunks=2, partition_method="flops")


def test_recomputed_layers_cost_a_forward_more() -> None:
    layers = [LayerSpec(nn.Linear, 64, 64, bias=False) for _ in range(4)]
    options: dict[str, Any] = {"num_stages": 1, "num_chunks": 2, "partition_method": "flops"}
    x = torch.zeros(256, 64)
    plain = PipelineModule(layers, **options, sample_input=x).partition.costs
    recomputed = PipelineModule(layers, **options, sample_input=x, activation_checkpoint_interval=1).partition.costs
    assert [b - a for a, b in zip(plain, recomputed, strict=True)] == [2 * matmul(256, 64, 64)] * 2


def results_on_meta() -> list[tuple[Any, ...]]:
    """Run operators whose results differ in shape, strides, dtype or memory with little in their arguments."""
    x, half, rows = torch.empty(4, 1, 6), torch.empty(4, 5, 6, dtype=torch.bfloat16), torch.empty(5, 6)
    grown, turned, whole = torch.empty(0), torch.empty(2, 3), torch.empty(5, dtype=torch.int64)
    found = [x + half, x.expand(4, 5, 6) + 1, half.transpose(0, 2) * half.transpose(0, 2), half * 2, half > 2, x.sum(1)]
    found += [whole * 2, whole * 2.0, whole * True, whole / 2, torch.where(rows > 0, rows, 0), x.amax(-1), half.float()]
    found += [
        torch.add(rows, 1, out=grown),
        turned.t_(),
        rows.exp_(),
        rows.addmm_(rows @ rows.T, rows),
        rows[1:].mul_(2),
    ]
    found += [torch.cat([rows, rows]), torch.cat([rows, rows], 1), torch.zeros(3), grown.add_(1), turned.add_(1)]
    return [(t.shape, t.stride(), t.dtype, t.untyped_storage().nbytes(), t._is_view()) for t in found]


def test_results_that_a_counter_remembers_are_those_of_pytorch() -> None:
    counter = OperatorCounter("")
    for dtype in (torch.float32, torch.float64, torch.float32):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"):
                expected = results_on_meta()
                with counter:
                    assert results_on_meta() == results_on_meta() == expected
        finally:
            torch.set_default_dtype(before)
