"""Stages split by traced and by measured costs train with the numbers of one process; a limit of bytes holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toy
from layouts import BASE_SEED, STEPS, Run, check, own_iterator, run_reference, run_steps, specs
from reference import Reference
from torch import nn

import parallel3d
from parallel3d.errors import PartitionError
from parallel3d.models.blocks import decoder
from parallel3d.models.config import DecoderConfig
from parallel3d.models.loss import CausalLMLoss
from parallel3d.pipe import LayerSpec, PipelineModule

ACCUMULATION = 4
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": toy.SAMPLES,
    "gradient_accumulation_steps": ACCUMULATION,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"reduce_bucket_size": 1500},
    "steps_per_print": None,
}


def train_by(method: str, pp: int, dp: int, chunks: int) -> tuple[Run, tuple[int, ...]]:
    """On one rank: the run and the bounds."""
    inputs, labels = toy.micro_batch(0, "tuple")
    pipeline: dict[str, Any] = {"stages": pp, "num_chunks": chunks, "partition": method}
    pipeline |= {"schedule": "interleaved"} if chunks > 1 else {}
    config = {**CONFIG, "pipeline": pipeline}
    module = PipelineModule(
        specs(toy.model(tied=True)),
        loss_fn=toy.cross_entropy,
        seed_layers=True,
        base_seed=BASE_SEED,
        config=config,
        sample_input=inputs,
        sample_labels=labels,
    )
    engine, *_ = parallel3d.initialize(model=module, config=config)
    total = STEPS * ACCUMULATION * dp
    run = run_steps(engine, own_iterator(engine, [toy.micro_batch(g, "tuple") for g in range(total)]), STEPS)
    return run, module.partition.bounds


@pytest.mark.parametrize(
    ("method", "pp", "dp", "chunks"), [("flops", 2, 1, 2), ("profile", 2, 2, 1), ("flops", 3, 1, 1)]
)
def test_numbers_equal_one_process(run_ranks, method: str, pp: int, dp: int, chunks: int) -> None:
    ranks = run_ranks(pp * dp, train_by, method, pp, dp, chunks)
    reference = Reference(toy.model(tied=True), toy.cross_entropy, make_sgd, base_seed=BASE_SEED)
    per_step = ACCUMULATION * dp
    wanted = run_reference(reference, [toy.micro_batch(g, "tuple") for g in range(STEPS * per_step)], per_step)
    check([run for run, _ in ranks], wanted, dp)
    assert len({bounds for _, bounds in ranks}) == 1


def make_sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def parts_by(method: Any) -> tuple[list[int], str]:
    """Return the layers of this rank's stage, and the table of all stages."""
    module = PipelineModule([nn.Linear(4, 4) for _ in range(6)], num_stages=3, partition_method=method)
    return sorted(map(int, module.layers)), module.partition_table


GIVEN = [
    ([0, 1, 5, 6], {"0": [0], "1-4": [1, 2, 3, 4], "5": [5]}),
    ({"weights": [1, 1, 1, 3, 2, 1]}, {"0-2": [0, 1, 2], "3": [3], "4-5": [4, 5]}),
]


@pytest.mark.parametrize(("method", "parts"), GIVEN, ids=str)
def test_stages_have_the_layers_of_bounds_and_weights_that_are_given(
    run_ranks, method: Any, parts: dict[str, list[int]]
) -> None:
    """parts: layers of each stage, by how the table has them."""
    for (layers, table), wanted in zip(run_ranks(3, parts_by, method), parts.values(), strict=True):
        assert layers == wanted
        assert [line.split()[1] for line in table.splitlines()[1:]] == list(parts)


SIZE, SAMPLE, REPLICAS = 64, 1024, 2


def bounds_under(limit: int, zero: int, schedule: str = "1f1b") -> tuple[int, ...] | str:
    """The bounds of six equal linears without bias on two stages, or the error."""
    config = {
        "train_micro_batch_size_per_gpu": SAMPLE,
        "gradient_accumulation_steps": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "pipeline": {"stages": 2, "max_stage_bytes": limit, "schedule": schedule, "num_chunks": 1},
    }
    layers = [LayerSpec(nn.Linear, SIZE, SIZE, bias=False) for _ in range(6)]
    try:
        return PipelineModule(layers, config=config, sample_input=torch.zeros(SAMPLE, SIZE)).partition.bounds
    except PartitionError as error:
        return str(error)


@pytest.mark.parametrize("zero", [0, 1])
def test_a_limit_counts_model_state_and_activations_in_flight(run_ranks, zero: int) -> None:
    # Of each weight: bf16, fp32 accumulator; master and two moments in fp32, shared by the replicas under ZeRO-1.
    state = SIZE * SIZE * (2 + 4 + 12 // (REPLICAS if zero else 1))
    saved = SAMPLE * SIZE * 2  # a linear's input in bf16
    # 1F1B's first stage of two holds two micro-batches, the last one.
    peaks = {k: max(k * (state + 2 * saved), (6 - k) * (state + saved)) for k in range(1, 6)}
    assert peaks[2] < peaks[3]

    def found(limit: int) -> tuple[int, ...] | str:
        answers = set(run_ranks(2 * REPLICAS, bounds_under, limit, zero))
        assert len(answers) == 1
        return answers.pop()

    assert found(peaks[3]) == (0, 3, 6)  # equal numbers of parameters
    assert found(peaks[3] - 1) == found(peaks[2]) == (0, 2, 6)
    assert f"the smallest limit that works is {peaks[2]}. " in found(peaks[2] - 1)


def test_under_schedule_auto_a_stage_may_hold_what_the_plan_may(run_ranks) -> None:
    # 1.5 times the two micro-batches of 1F1B's first stage, on either stage.
    peak = 3 * (SIZE * SIZE * (2 + 4 + 12 // REPLICAS) + 3 * SAMPLE * SIZE * 2)
    assert set(run_ranks(2 * REPLICAS, bounds_under, peak, 1, "auto")) == {(0, 3, 6)}
    (refused,) = set(run_ranks(2 * REPLICAS, bounds_under, peak - 1, 1, "auto"))
    assert f"the smallest limit that works is {peak}. " in refused


def sliced_costs(method: str, tp: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return the layer costs of a Llama on one stage in two chunks, on `tp` tensor-parallel ranks."""
    config = DecoderConfig(
        vocab_size=64, hidden_size=32, ffn_size=64, num_layers=6, num_heads=4, num_kv_heads=2, max_positions=16
    )
    ids = torch.arange(32).view(2, 16)
    module = PipelineModule(
        decoder(config),
        loss_fn=CausalLMLoss(),
        config={
            "tensor_parallel": {"size": tp, "sequence_parallel": tp > 1},
            "pipeline": {"stages": 1, "num_chunks": 2, "schedule": "interleaved", "partition": method},
        },
        sample_input=ids,
        sample_labels=ids,
    )
    return module.partition.costs, module.partition.bounds


def test_sliced_layers_are_traced_as_a_rank_has_them(run_ranks) -> None:
    ((whole, bounds),) = run_ranks(1, sliced_costs, "flops", 1)
    sliced = run_ranks(2, sliced_costs, "flops", 2)
    assert len(set(sliced)) == 1
    costs, own_bounds = sliced[0]
    assert own_bounds == bounds
    # Besides half of the products and of the bytes, it has copies of what is gathered: test_costs.py counts both.
    assert all(all_of / 2 < own < all_of for own, all_of in zip(costs, whole, strict=True))


def test_sliced_layers_are_measured_together(run_ranks) -> None:
    first, second = run_ranks(2, sliced_costs, "profile", 2)
    assert first == second
    assert min(first[0]) > 0
