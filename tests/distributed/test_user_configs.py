"""Users' configurations train, with batch sizes that suit the world and "auto"s given, like one process in plain PyTorch."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from layouts import BASE_SEED, Run, own_iterator, run_reference, run_steps, specs
from reference import Item, Reference
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from user_configs import AUTO, FOLDER

import parallel3d
from parallel3d.errors import ConfigError
from parallel3d.pipe import PipelineModule

STEPS, ACCUMULATION = 2, 2
LINEARS = [Item(nn.Linear, (toy.HIDDEN, toy.HIDDEN)) for _ in range(4)]


def squares(output: Tensor, labels: Tensor) -> Tensor:
    return (output.float() - labels).square().mean()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    shape = (toy.SAMPLES, toy.HIDDEN)
    pairs = range(STEPS * ACCUMULATION * 2)
    return [(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)) for _ in pairs]


def train(name: str, rate: float) -> Run:
    """On one of 4 ranks: 2 stages of 2 replicas. rate: for what is "auto"."""
    module = PipelineModule(
        specs(LINEARS), num_stages=2, loss_fn=squares, seed_layers=True, base_seed=BASE_SEED, config=FOLDER / name
    )
    given = dict(AUTO[name])
    if name == "auto_dict_stage2.json":
        given["scheduler.params"] = {**given["scheduler.params"], "warmup_min_lr": rate}
    sizes = {"train_micro_batch_size_per_gpu": toy.SAMPLES, "gradient_accumulation_steps": ACCUMULATION}
    engine, *_ = parallel3d.initialize(
        model=module,
        config=FOLDER / name,
        auto={**given, **sizes, "optimizer.params.lr": rate},
    )
    return run_steps(engine, own_iterator(engine, batches()), STEPS)


@pytest.mark.parametrize(
    # Both warm up from a rate above 0, which log(1) = 0 keeps for the first two steps.
    ("name", "settings", "tolerance"),
    [
        ("auto_dict_stage2.json", {"lr": 1e-2, "weight_decay": 0.0}, 1e-5),
        ("zero3_offload_auto_bf16.json", {"lr": 5e-6, "betas": (0.9, 0.95), "weight_decay": 0.01}, 1e-2),
    ],
)
def test_a_users_file_trains(run_ranks, name: str, settings: dict[str, Any], tolerance: float):
    ranks = run_ranks(4, train, name, 1e-2)
    reference = Reference(
        LINEARS,
        squares,
        lambda parameters: torch.optim.AdamW(parameters, **settings),
        clipping=1.0,
        base_seed=BASE_SEED,
    )
    losses, norms, _ = run_reference(reference, batches(), ACCUMULATION * 2)
    for found_losses, found_norms, _ in ranks:
        assert found_losses == pytest.approx(losses, rel=tolerance)
        assert found_norms == pytest.approx(norms, rel=tolerance)


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
    """As a script does that has its configuration's path on its command line, and an optimizer and a loader of its own."""
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
