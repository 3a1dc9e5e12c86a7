"""Seconds of work and of the exchanges in it, and what of exchanges is hidden."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.config import load
from parallel3d.config.layout import Layout
from parallel3d.costs.devices import Device, compute_seconds
from parallel3d.costs.layer_profile import LayerProfile
from parallel3d.costs.work import Collective, Exchange, Work
from parallel3d.models import DecoderConfig, causal_lm_loss, decoder
from parallel3d.planner.predict.profile import ModelProfile
from parallel3d.planner.predict.timing import exchange_seconds, layer_times
from parallel3d.planner.search.model import DEFAULTS

# A second for each FLOP, none for bytes.
DEVICE = Device(
    name="unit",
    memory=1 << 30,
    peak_flops=1.0,
    gemm_flops=1.0,
    attention_flops=1.0,
    memory_bandwidth=1e30,
    kernel_seconds=0.0,
)
SEQ, HIDDEN, FFN, HEADS = 2048, 4096, 8192, 32


def block(
    dropout: float = 0.0, tensor_ranks: int = 2, sequence_parallel: bool = False, samples: int = 4
) -> LayerProfile:
    """The second layer of a decoder in bf16, with fp32 accumulators."""
    config = DecoderConfig(
        vocab_size=1024,
        hidden_size=HIDDEN,
        ffn_size=FFN,
        num_layers=1,
        num_heads=HEADS,
        gated=False,
        activation="relu",
        residual_dropout=dropout,
        max_positions=SEQ,
    )
    tokens = torch.zeros(1, SEQ, dtype=torch.int64)
    given = load({**DEFAULTS, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1})
    profile = ModelProfile(decoder(config), tokens, tokens, causal_lm_loss, given)
    return profile.layers(Layout(tensor_ranks=tensor_ranks, sequence_parallel=sequence_parallel, micro_batch=samples))[
        1
    ]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=6))
def test_what_is_waited_for_is_what_two_queues_leave(parts: list[tuple[int, int]]):
    """Tick by tick: the links take one collective after the other, the device goes on, and waits at the end."""
    starts, now = [], 0
    for sent, computed in parts:
        starts.append((now, sent))
        now += computed
    free = 0
    for start, sent in starts:
        for tick in range(start, start + 10**6):
            if tick >= free:
                free = tick + sent
                break
    exchange: Exchange = tuple((Collective("all_reduce", sent), Work(float(computed))) for sent, computed in parts)
    found = exchange_seconds(exchange, DEVICE, lambda collective: collective.nbytes, overlap=1.0)
    assert found == max(0, free - now)


def test_compute_is_slower_beside_what_it_hides():
    exchange: Exchange = ((Collective("all_reduce", 4.0), Work(10.0)),)
    assert exchange_seconds(exchange, DEVICE, lambda c: c.nbytes, overlap=1.25) == pytest.approx(0.25 * 4)


def test_whole_backwards_hide_all_reduces_after_weights_gradients_and_split_ones_have_none_to_hide_behind():
    profile = block(samples=1)
    split = [part for exchange in profile.input_gradient.exchanges for part in exchange]
    whole = [part for exchange in profile.backward.exchanges for part in exchange]
    assert len(split) == len(whole) == 2
    assert all(beside.gemm_flops == 0 for _, beside in split)
    # The weights of queries, keys and values, and of what the feed-forward begins with: half of each for two ranks.
    products = [2 * SEQ * HIDDEN * FFN / 2, 2 * SEQ * HIDDEN * 3 * HIDDEN / 2]
    assert sorted(beside.gemm_flops for _, beside in whole) == sorted(products)
    assert profile.backward.gemm_flops == profile.input_gradient.gemm_flops + profile.weight_gradient.gemm_flops


def test_the_first_half_of_a_large_product_is_sent_behind_the_second():
    exchanges = block(samples=4).forward.exchanges
    # Of the output projection and of the feed-forward's second product, each over two ranks.
    products = [2 * 4 * SEQ * HIDDEN * width / 2 for width in (HIDDEN, FFN)]
    assert [[beside.gemm_flops for _, beside in e] for e in exchanges] == [[flops / 2, 0] for flops in products]


@pytest.mark.parametrize("samples", [1, 5])
def test_operands_grow_with_samples_and_weights_do_not(samples: int):
    profile = block(tensor_ranks=1, samples=samples)
    tokens, weights = samples * SEQ, 4 * HIDDEN**2 + 2 * HIDDEN * FFN
    # x and y of queries, keys, values, the output projection, and of both of the feed-forward.
    numbers = tokens * (8 * HIDDEN + 2 * (HIDDEN + FFN))
    assert profile.forward.operands == profile.weight_gradient.operands == 2 * numbers
    assert profile.forward.weights == profile.input_gradient.weights == 2 * weights
    assert profile.weight_gradient.weights == (4 + 4) * weights  # read and written, in fp32


def test_products_take_their_operands_time_too():
    device = DEVICE.model_copy(update={"gemm_flops": 100.0, "memory_bandwidth": 10.0})
    assert compute_seconds(Work(gemm_flops=300.0, operands=5.0, weights=15.0), device) == pytest.approx(3 + 2)
    slow = device.model_copy(update={"fp32_flops": 10.0})
    assert compute_seconds(Work(gemm_flops=300.0, fp32_gemm_flops=100.0), slow) == pytest.approx(2 + 10)
    assert compute_seconds(Work(attention_flops=50.0, fp32_attention_flops=50.0), slow) == pytest.approx(5)


def test_times_of_whole_backwards_are_those_of_their_work():
    profile = replace(block(), forward=Work())
    whole = layer_times([profile], DEVICE, lambda collective: 1e9, splits=False)
    waited = sum(exchange_seconds(e, DEVICE, lambda collective: 1e9, 1.0) for e in profile.backward.exchanges)
    expected = compute_seconds(profile.backward, DEVICE) + waited
    assert float(whole.total[0]) == pytest.approx(expected)


def test_dropout_of_a_sequence_in_parts_can_be_traced():
    plain, dropping = block(sequence_parallel=True), block(dropout=0.1, sequence_parallel=True)
    assert dropping.forward.gemm_flops == plain.forward.gemm_flops
    assert dropping.forward.moved > plain.forward.moved
