"""Stages split by traced and by measured costs train with the numbers of one process; a limit of bytes holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toy
from layouts import BASE_SEED, STEPS, Run, check, own_iterator, run_reference, run_steps, specs
from reference import Reference

import parallel3d
from parallel3d.pipe import PipelineModule

ACCUMULATION = 4
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": toy.SAMPLES,
    "gradient_accumulation_steps": ACCUMULATION,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"reduce_bucket_size": 1500},
    "steps_per_print": None,
}


def train_by(method: str, pp: int, dp: int, chunks: int, limit: int | None = None) -> tuple[Run, tuple[int, ...], int]:
    """On one rank: the run, the bounds, and the bytes of model state that the rank holds."""
    inputs, labels = toy.micro_batch(0, "tuple")
    pipeline: dict[str, Any] = {"stages": pp, "num_chunks": chunks, "partition": method}
    pipeline |= {"schedule": "interleaved"} if chunks > 1 else {}
    pipeline |= {} if limit is None else {"max_stage_bytes": limit}
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
    held = sum(info.parameter.nbytes for info in module.parameter_infos())
    return run, module.partition.bounds, held


@pytest.mark.parametrize(
    ("method", "pp", "dp", "chunks"), [("flops", 2, 1, 2), ("profile", 2, 2, 1), ("flops", 3, 1, 1)]
)
def test_numbers_equal_one_process(run_ranks, method: str, pp: int, dp: int, chunks: int) -> None:
    ranks = run_ranks(pp * dp, train_by, method, pp, dp, chunks)
    reference = Reference(toy.model(tied=True), toy.cross_entropy, make_sgd, base_seed=BASE_SEED)
    per_step = ACCUMULATION * dp
    wanted = run_reference(reference, [toy.micro_batch(g, "tuple") for g in range(STEPS * per_step)], per_step)
    check([run for run, _, _ in ranks], wanted, dp)
    assert len({bounds for _, bounds, _ in ranks}) == 1


def make_sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)
