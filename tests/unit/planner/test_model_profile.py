"""Work and memory of layers, against counts by hand and published formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d.config import load
from parallel3d.config.layout import Layout
from parallel3d.costs.layer_profile import LayerProfile
from parallel3d.costs.tracing import Held
from parallel3d.errors import PartitionError
from parallel3d.models import DecoderConfig, causal_lm_loss
from parallel3d.models.blocks import decoder
from parallel3d.pipe import LayerSpec
from parallel3d.planner.predict.profile import ModelProfile

VOCAB, HIDDEN, FFN, HEADS, KV, SEQ = 512, 128, 384, 8, 4, 64
BF16 = {"bf16": {"enabled": True}}


def decoder_profile(
    device: Any = "cuda", changes: dict[str, Any] | None = None, vocab: int = VOCAB, **more: Any
) -> ModelProfile:
    config = DecoderConfig(
        vocab_size=vocab,
        hidden_size=HIDDEN,
        ffn_size=FFN,
        num_layers=3,
        num_heads=HEADS,
        num_kv_heads=KV,
        max_positions=SEQ,
        **more,
    )
    ids = torch.zeros(5, SEQ, dtype=torch.long)
    settings = load({"train_micro_batch_size_per_gpu": 1, **BF16, **(changes or {})})
    return ModelProfile(decoder(config), ids, ids, causal_lm_loss, settings, device)


def linears(tensor_ranks: int) -> int:
    """Weights of a block's matrices on one slice."""
    return (2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN * KV // HEADS + 3 * HIDDEN * FFN) // tensor_ranks


@pytest.mark.parametrize("tensor_ranks", [1, 2, 4])
@pytest.mark.parametrize("samples", [1, 2, 7])
def test_a_blocks_flops_are_those_of_its_matrices(tensor_ranks: int, samples: int):
    """The papers' formulas: 2 FLOPs per weight and token, 4 backward; causal attention has half of all pairs."""
    block = decoder_profile().layers(Layout(tensor_ranks=tensor_ranks, micro_batch=samples))[1]
    tokens = samples * SEQ
    scores = 2 * samples * SEQ * SEQ * HIDDEN / 2 / tensor_ranks
    assert block.forward.gemm_flops == 2 * tokens * linears(tensor_ranks)
    assert block.weight_gradient.gemm_flops == 2 * tokens * linears(tensor_ranks)
    assert block.input_gradient.gemm_flops == 2 * tokens * linears(tensor_ranks)
    assert block.forward.attention_flops == 2 * scores
    assert block.input_gradient.attention_flops == 5 * scores
    assert block.weight_gradient.attention_flops == 0
    assert block.output_bytes == block.gradient_bytes == 2 * tokens * HIDDEN


def test_the_head_counts_with_its_loss():
    *_, head = decoder_profile().layers(Layout(micro_batch=2))
    assert head.loss is not None
    assert head.forward.gemm_flops == 2 * 2 * SEQ * HIDDEN * VOCAB
    assert head.forward.moved == head.loss.forward.moved >= 2 * 2 * SEQ * VOCAB  # at least once all logits


@pytest.mark.parametrize(
    ("sequence_parallel", "forward", "backward"),
    [
        # arXiv:1909.08053: an all-reduce behind attention and one behind the feed-forward, and before each backward.
        (False, [("all_reduce", 1)] * 2, [("all_reduce", 1)] * 2),
        # arXiv:2205.05198: a gathering and a scattering instead; the gathered inputs of weights are gathered again.
        (
            True,
            [("all_gather", 1), ("reduce_scatter", 1)] * 2,
            [("all_gather", 1), ("all_gather", 1), ("reduce_scatter", 1)] * 2,
        ),
    ],
)
def test_collectives_of_sliced_blocks_are_those_of_the_papers(
    sequence_parallel: bool, forward: list[tuple[str, int]], backward: list[tuple[str, int]]
):
    block = decoder_profile().layers(Layout(tensor_ranks=2, sequence_parallel=sequence_parallel, micro_batch=3))[1]
    message = 2 * 3 * SEQ * HIDDEN
    assert [(c.kind, c.nbytes) for c in block.forward.collectives] == [(kind, n * message) for kind, n in forward]
    found = sorted((c.kind, c.nbytes) for c in block.input_gradient.collectives)
    assert found == sorted((kind, n * message) for kind, n in backward)
    assert not block.weight_gradient.collectives
    assert block.output_bytes == (message // 2 if sequence_parallel else message)


def test_nothing_is_joined_or_communicated(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a trace communicates")

    for name in ("init_process_group", "new_group", "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
        monkeypatch.setattr(dist, name, refuse)
    decoder_profile().layers(Layout(tensor_ranks=4, sequence_parallel=True))


def test_equal_layers_share_a_profile_and_blocks_differ_by_their_window():
    blocks = decoder_profile().layers()[1:4]
    assert blocks[0] is blocks[1] is blocks[2]
    blocks = decoder_profile(windows=(None, 8, 8)).layers()[1:4]
    assert blocks[1] is blocks[2] is not blocks[0]


def numbers(profile: LayerProfile) -> dict[str, Any]:
    names = ("forward", "input_gradient", "weight_gradient", "inputs", "outputs", "whole", "split", "loss")
    return {name: getattr(profile, name) for name in names}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_more_samples_follow_from_few(sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch):
    # Few words: the gradient of the embedding is then never what takes the most.
    layout = Layout(tensor_ranks=2, sequence_parallel=sequence_parallel, micro_batch=6)
    followed = decoder_profile(vocab=32).layers(layout)
    monkeypatch.setattr("parallel3d.planner.predict.profile._FEW", ((6, 6),))
    traced = decoder_profile(vocab=32).layers(layout)
    assert [numbers(p) for p in followed] == [numbers(p) for p in traced]


class TwoLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 48), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def test_bytes_held_are_those_that_the_gradients_need():
    """In fp32: the input and relu's output are kept; a deferred weight gradient needs both and both linears' gradients."""
    rows = 10
    profile = ModelProfile(
        [LayerSpec(TwoLinears), LayerSpec(TwoLinears)][:1],
        torch.zeros(rows, 32),
        None,
        None,
        load({"train_micro_batch_size_per_gpu": rows}),
        "cpu",
    )
    (layer,) = profile.layers(Layout(micro_batch=rows))
    hidden, outer = 4 * rows * 48, 4 * rows * 16
    assert layer.inputs == (4 * rows * 32,)
    for held in (layer.whole, layer.split):
        assert held.saved == Held(own=hidden, inputs=frozenset({0}))
        assert held.forward_peak == max(2 * hidden, hidden + outer)
    assert layer.split.deferred == Held(2 * hidden, frozenset({0}), output_gradients=frozenset({0}))
    assert layer.whole.deferred == Held()
    # Both gradients of the hidden layer and its own output; then the weights' gradients too, where autograd adds them.
    assert layer.split.backward_peak == 3 * hidden + outer
    assert {name: tuple(p.shape) for name, p in layer.parameters}["second.weight"] == (16, 48)


def test_dropout_keeps_a_byte_a_number_on_cuda():
    rows = 16
    masks: dict[Literal["cuda", "cpu"], int] = {"cuda": 1, "cpu": 2}
    for device, mask in masks.items():
        specs = [LayerSpec(nn.Linear, 8, 8), LayerSpec(nn.Dropout, 0.1)]
        config = load({"train_micro_batch_size_per_gpu": rows, **BF16})
        profile = ModelProfile(specs, torch.zeros(rows, 8), None, None, config, device)
        assert profile.layers(Layout(micro_batch=rows))[1].whole.saved == Held(own=mask * rows * 8)


def test_compiled_work_moves_less_and_multiplies_as_much():
    plain, fused = (decoder_profile(changes={"compile": {"enabled": on}}).layers()[1] for on in (False, True))
    assert fused.forward.gemm_flops == plain.forward.gemm_flops
    assert fused.forward.moved < plain.forward.moved
    assert fused.forward.kernels < plain.forward.kernels


def test_a_compiled_loss_holds_the_logits_beside_their_gradient():
    *_, head = decoder_profile(changes={"compile": {"enabled": True}}).layers()
    logits = 2 * SEQ * VOCAB
    assert head.loss is not None
    assert head.loss.inputs[0] == logits
    assert 2 * logits < head.loss.whole.sole_peak < 2.1 * logits


def test_recomputed_layers_run_their_forward_again():
    model = decoder_profile()
    plain, again = model.layers(Layout(micro_batch=2)), model.layers(Layout(micro_batch=2, recompute=1))
    for before, after in zip(plain, again, strict=True):
        assert after.recomputed
        own = before.forward.gemm_flops
        assert after.input_gradient.gemm_flops == before.input_gradient.gemm_flops + own
        assert replace(after.forward, operators=before.forward.operators) == before.forward
        # A forward's operators are called again, and what each saves is kept apart, unpacked and made anew.
        called = before.forward.operators - (before.loss.forward.operators if before.loss is not None else 0)
        assert after.forward.operators == before.forward.operators + called / 2
        assert after.backward.operators == before.backward.operators + 2 * called
    head = plain[-1]
    assert head.loss is not None
    more = again[-1].input_gradient.moved - head.input_gradient.moved
    assert more == pytest.approx(head.forward.moved - head.loss.forward.moved)


class Looks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum().item() > 0 else -x


def test_a_layer_that_looks_at_values_is_named():
    specs = [LayerSpec(nn.Linear, 4, 4), LayerSpec(Looks)]
    config = load({"train_micro_batch_size_per_gpu": 2})
    with pytest.raises(PartitionError, match=r"layer 1 \(Looks\): it can't be traced"):
        ModelProfile(specs, torch.zeros(2, 4), None, None, config).layers()


class AsksItsDevice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "meta":
            raise RuntimeError("there is nothing on the meta device")
        return self.linear(x)


@pytest.mark.parametrize("layer", [nn.Linear(8, 8), LayerSpec(AsksItsDevice)], ids=["built", "asks"])
@pytest.mark.parametrize("changes", [BF16, {"torch_autocast": {"enabled": True, "dtype": "bf16"}}], ids=str)
def test_what_the_meta_device_cannot_trace_fake_tensors_do(layer: Any, changes: dict[str, Any]):
    config = load({"train_micro_batch_size_per_gpu": 4, **changes})
    (linear,) = ModelProfile([layer], torch.zeros(4, 8), None, None, config).layers(Layout(micro_batch=4))
    assert linear.forward.gemm_flops == 2 * 4 * 8 * 8
    assert linear.output_bytes == 2 * 4 * 8
    assert linear.whole.deferred.own == 0, "a whole backward leaves nothing, autocast's copies of weights included"
    assert not any(p.device.type != "cpu" for p in (layer.parameters() if isinstance(layer, nn.Module) else ()))


class Experts(nn.Module):
    """Tokens in equal parts for four experts, as the mixtures of transformers multiply them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 16, 32))

    def forward(self, tokens: Tensor) -> Tensor:
        ends = torch.arange(1, 5, dtype=torch.int32, device=tokens.device) * (len(tokens) // 4)
        return torch._grouped_mm(tokens, self.weight, offs=ends)


def test_the_products_of_experts_count_each_token_once():
    """Whatever the number of experts, of which each has a share of the tokens: forward, and both products of the backward."""
    config = load({"train_micro_batch_size_per_gpu": 64, **BF16})
    specs = [LayerSpec(nn.Linear, 16, 16), LayerSpec(Experts)]
    _, experts = ModelProfile(specs, torch.zeros(64, 16), None, None, config).layers(Layout(micro_batch=64))
    expected = 2 * 64 * 16 * 32
    assert experts.forward.gemm_flops == expected
    assert experts.backward.gemm_flops == 2 * expected
    assert experts.forward.weights == 2 * 4 * 16 * 32


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.linear(x).unflatten(-1, (2, 32)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("changes", [{}, BF16, {"torch_autocast": {"enabled": True, "dtype": "bf16"}}], ids=str)
def test_products_in_float32_are_counted_as_such(changes: dict[str, Any]):
    """Forward and backward: tensor cores don't compute them. Under autocast and in bf16 there are none."""
    config = load({"train_micro_batch_size_per_gpu": 2, **changes})
    (layer,) = ModelProfile([LayerSpec(Attends)], torch.zeros(2, 16, 64), None, None, config).layers(
        Layout(micro_batch=2)
    )
    for work in (layer.forward, layer.backward):
        assert work.gemm_flops > 0
        assert work.attention_flops > 0
        assert work.fp32_gemm_flops == (0 if changes else work.gemm_flops)
        assert work.fp32_attention_flops == (0 if changes else work.attention_flops)


class Communicates(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops._c10d_functional.all_reduce(x, "sum", "0")


def test_a_layer_that_communicates_by_itself_is_refused():
    config = load({"train_micro_batch_size_per_gpu": 2})
    with pytest.raises(PartitionError, match=r"layer 0 \(Communicates\): it communicates with other ranks"):
        ModelProfile([LayerSpec(Communicates)], torch.zeros(2, 4), None, None, config).layers()


def test_layers_have_the_configurations_policies_unless_the_layout_has_one():
    by_class = {"Block": "cheap", "Head": "none", "default": "full"}
    profile, plain = decoder_profile(changes={"activation_checkpointing": {"policy": by_class}}), decoder_profile()
    cheap, attention = (plain.layers(Layout(recompute=1, policy=policy)) for policy in ("cheap", "attention"))
    embedding, block, *_, norm, head = profile.layers(Layout(recompute=1))
    assert (embedding.recomputed, block.recomputed, norm.recomputed, head.recomputed) == (True, False, True, False)
    assert block.whole == cheap[1].whole
    assert profile.layers(Layout(recompute=1, policy="attention"))[1].whole == attention[1].whole
    assert profile.layers()[1].whole == plain.layers()[1].whole


def test_norms_of_a_sequence_come_with_the_inputs_gradients():
    block = decoder_profile().layers()[1]
    assert block.early == {"attention_norm.weight", "mlp_norm.weight"}
