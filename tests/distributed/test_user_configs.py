"""Users' configurations train, with batch sizes that suit the world and "auto"s given, like one process in plain PyTorch."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from half_reference import HalfReference, distance_of_models
from layouts import BASE_SEED, Run, own_iterator, run_reference, run_steps, specs
from reference import Item, Reference
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from user_configs import AUTO, FOLDER

import parallel3d
from parallel3d.config import read_source
from parallel3d.errors import ConfigError
from parallel3d.pipe import PipelineModule

STEPS, ACCUMULATION, RATE = 5, 2, 1e-2
LINEARS = [Item(nn.Linear, (toy.HIDDEN, toy.HIDDEN)) for _ in range(4)]


def squares(output: Tensor, labels: Tensor) -> Tensor:
    return (output.float() - labels).square().mean()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    shape = (toy.SAMPLES, toy.HIDDEN)
    pairs = range(STEPS * ACCUMULATION * 2)
    return [(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)) for _ in pairs]


@dataclass(frozen=True)
class Case:
    """Settings of one process that trains by a file. rate(k): the learning rate after k steps. changes: of the file, by
    section, so that the schedule moves within a few steps."""

    dtype: torch.dtype | None
    rate: Callable[[int], float]
    clipping: float
    adam: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    own_optimizer: bool = False


def warmed(k: int, steps: int) -> float:
    """The part of a logarithmic warm-up."""
    return min(1.0, math.log(max(1, k)) / math.log(steps))


def half_cosine(k: int) -> float:
    """The file's, after two steps of warm-up, of eight steps."""
    return (0.0, 0.0, 0.5)[k] if k < 3 else 1e-4 + (1 - 1e-4) * (1 + math.cos(math.pi * (k - 2) / 6)) / 2


CASES = {
    "auto_dict_stage2.json": Case(None, lambda k: RATE * warmed(k, 100), 1.0, {"weight_decay": 0.0}),
    "zero2_adamw_cosine_wandb.json": Case(
        torch.float16,
        lambda k: RATE * half_cosine(k),
        1.0,
        {"eps": 1e-7, "weight_decay": 0.01},
        {"optimizer": {"lr": RATE}, "scheduler": {"warmup_num_steps": 2, "total_num_steps": 8}},
    ),
    "zero2_offload_comments.json": Case(torch.float16, lambda k: 1e-3, 0.0, {"weight_decay": 0.0}),
    "zero3_offload_auto_bf16.json": Case(
        torch.bfloat16,
        lambda k: 5e-6 + (RATE - 5e-6) * warmed(k, 10),
        1.0,
        {"betas": (0.9, 0.95), "weight_decay": 0.01},
    ),
    "zero3_offload_fp16.json": Case(torch.float16, lambda k: RATE, 0.5, own_optimizer=True),
}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE)


def train(name: str) -> tuple[Run, list[float], int]:
    """On one of 4 ranks, in 2 stages of 2 replicas: the run, its learning rates, and how many steps were skipped."""
    case, config = CASES[name], dict(read_source(FOLDER / name)[1])
    config |= {
        "train_batch_size": 2 * ACCUMULATION * toy.SAMPLES,
        "train_micro_batch_size_per_gpu": toy.SAMPLES,
        "gradient_accumulation_steps": ACCUMULATION,
    }
    for section, params in case.changes.items():
        config[section]["params"] |= params
    auto = AUTO[name]
    if config.get("optimizer", {}).get("params", {}).get("lr") == "auto":
        auto = {**auto, "optimizer.params.lr": RATE}
    module = PipelineModule(
        specs(LINEARS), num_stages=2, loss_fn=squares, seed_layers=True, base_seed=BASE_SEED, config=config
    )
    optimizer = adamw if case.own_optimizer else None
    engine, *_ = parallel3d.initialize(model=module, config=config, auto=auto, optimizer=optimizer)
    data = own_iterator(engine, batches())
    rates, losses, norms = [], [], []
    for _ in range(STEPS):
        rates += engine.get_lr()
        (loss,), (norm,), weights = run_steps(engine, data, 1)
        losses.append(loss)
        norms.append(norm)
    return (losses, norms, weights), rates, engine.skipped_steps


@pytest.mark.parametrize("name", CASES)
def test_a_users_file_trains(run_ranks, name: str):
    case = CASES[name]
    ranks = run_ranks(4, train, name)
    reference = HalfReference(
        LINEARS, squares, lambda p: torch.optim.AdamW(p, **case.adam), case.dtype, case.clipping, BASE_SEED
    )
    before = reference.named_weights()
    losses, norms, micro_batches = [], [], batches()
    rates = [case.rate(k) for k in range(STEPS)]
    for k, rate in enumerate(rates):
        reference.optimizer.param_groups[0]["lr"] = rate
        share = micro_batches[k * 2 * ACCUMULATION : (k + 1) * 2 * ACCUMULATION]
        losses.append(reference.step(share, 2.0**10 if case.dtype is torch.float16 else 1.0))
        norms.append(reference.grad_norm)
    wanted = reference.named_weights()
    got: dict[str, Tensor] = {}
    for (found_losses, found_norms, weights), found_rates, skipped in ranks:
        tolerance = {None: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[case.dtype]
        assert skipped == 0
        assert found_rates == pytest.approx(rates, rel=1e-6)
        assert found_losses == pytest.approx(losses, rel=tolerance)
        assert found_norms == pytest.approx(norms, rel=tolerance)
        got |= weights
    assert distance_of_models(got, wanted) < 0.05 * distance_of_models(before, wanted)


OPEN = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": ACCUMULATION,
    "optimizer": {"type": "SGD", "params": {"lr": "auto", "momentum": "auto"}},
    "steps_per_print": None,
}


def dataset() -> TensorDataset:
    inputs, labels = zip(*batches(), strict=True)
    return TensorDataset(torch.cat(inputs), torch.cat(labels))


def train_by_arguments(path: Path, batch_size: int) -> tuple[int, list[float]]:
    """Train as a script with its configuration's path on the command line, and its own optimizer and loader."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parallel3d.add_config_arguments(parser)
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    module = PipelineModule(specs(LINEARS), num_stages=2, loss_fn=squares, seed_layers=True, base_seed=BASE_SEED)
    engine, *_ = parallel3d.initialize(
        args=args,
        model=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5),
        training_data=DataLoader(dataset(), batch_size=batch_size),
    )
    return engine.train_micro_batch_size_per_gpu(), [engine.train_batch().item() for _ in range(STEPS)]


def test_a_scripts_own_optimizer_and_loader_fill_autos(run_ranks, tmp_path: Path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(OPEN))
    micro_batch = 2 * toy.SAMPLES
    reference = Reference(LINEARS, squares, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5), base_seed=BASE_SEED)
    micro_batches = list(DataLoader(dataset(), batch_size=micro_batch))
    losses, _, _ = run_reference(reference, micro_batches, ACCUMULATION)
    for found_size, found_losses in run_ranks(2, train_by_arguments, path, micro_batch):
        assert found_size == micro_batch
        assert found_losses == pytest.approx(losses, rel=1e-5)


def refuse_a_loader(path: Path) -> str:
    try:
        train_by_arguments(path, 3)
    except ConfigError as error:
        return str(error)
    return "accepted"


def test_a_loader_of_another_micro_batch_is_refused(run_ranks, tmp_path: Path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({**OPEN, "train_micro_batch_size_per_gpu": 2}))
    for message in run_ranks(2, refuse_a_loader, path):
        assert "a DataLoader with batches of 3, but train_micro_batch_size_per_gpu is 2; make the two equal" in message
