"""A run that was broken off and goes on equals one that was not, bit for bit, in the same layout."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import toy
from layouts import BASE_SEED, OPTIMIZERS, specs
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import parallel3d
from parallel3d.engine import Engine
from parallel3d.pipe import PipelineModule

BEFORE, AFTER, SAMPLES_IN_ALL = 5, 6, 20  # an epoch is 20 / 8 -> 3 steps: the break is within the second


class Samples(Dataset[Any]):
    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return SAMPLES_IN_ALL

    def __getitem__(self, k: int) -> Any:
        self.read.append(k)
        ids, labels = toy.micro_batch(k)
        return ids[0], labels[0]


class Norms(nn.Module):
    """A module of no pipeline, with running means and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(toy.VOCABULARY, 6)
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, toy.VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(self.embed(ids).flatten(0, 1)) + torch.rand(6)
        return nn.functional.cross_entropy(self.out(nn.functional.dropout(x, 0.3, self.training)), labels.flatten())


def make(case: str, seed: int, data: Any = None) -> Engine:
    torch.manual_seed(seed)
    config: dict[str, Any] = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": OPTIMIZERS["AdamW"]},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 12, "warmup_num_steps": 4}},
        "zero_optimization": {"stage": 0, "reduce_bucket_size": 1500},
        "seed": seed,
        "steps_per_print": None,
    }
    config |= {
        "fp16 zero1": {
            "fp16": {"enabled": True, "initial_scale_power": 22, "loss_scale_window": 2, "hysteresis": 1},
            "zero_optimization": {"stage": 1, "reduce_bucket_size": 1500},
        },
        "bf16 zero2": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2, "reduce_bucket_size": 1500}},
        "whole tensors": {"optimizer": {"type": "Adafactor", "params": {"lr": 0.01}}},
        "own loader": {"scheduler": {"type": "MultiStepLR", "params": {"milestones": [2, 6, 8]}}},
        "momentum": {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, "pipeline": {"stages": 2}},
    }.get(case, {})
    data = data or Samples()
    model: nn.Module
    if case in ("plain", "own loader"):
        torch.manual_seed(seed)
        model = Norms()
    else:
        config.setdefault("pipeline", {"stages": 2})
        items = specs(toy.model(tied=True, num_blocks=2, dropout=0.2))
        loss = toy.cross_entropy
        model = PipelineModule(items, loss_fn=loss, seed_layers=True, base_seed=seed + BASE_SEED, config=config)
    if case == "own loader":
        replicas, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        data = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, replicas, rank))
    return parallel3d.initialize(model=model, config=config, training_data=data)[0]


def steps(engine: Engine, number: int) -> list[Any]:
    """Everything that a break could change."""
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # skipped steps
        for _ in range(number):
            loss = engine.train_batch().item()
            seen.append((loss.hex(), float(engine.get_global_grad_norm()).hex(), engine.get_lr(), engine.loss_scale()))
    seen.append((engine.global_steps, engine.global_samples, engine.skipped_steps))
    seen.append([random.random(), float(np.random.rand()), float(torch.rand(()))])
    seen.append({name: tensor.clone() for name, tensor in engine.module.state_dict().items()})
    return seen


def break_and_go_on(case: str, directory: str, in_use: bool) -> tuple[list[Any], list[Any], int]:
    engine = make(case, seed=3)
    steps(engine, BEFORE)
    engine.save_checkpoint(directory)
    unbroken, skipped = steps(engine, AFTER), engine.skipped_steps
    # Of another seed, so that nothing agrees by itself.
    other = make(case, seed=4)
    if in_use:
        steps(other, 2)
    other.load_checkpoint(directory)
    return unbroken, steps(other, AFTER), skipped


def check_equal(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        differ = {name: (one[name], other[name]) for name in one if not torch.equal(one[name], other[name])}
        assert differ == {}
    else:
        assert one == other


@pytest.mark.parametrize(
    ("case", "ranks", "in_use"),
    [
        ("bf16 zero2", 4, False),
        ("fp16 zero1", 4, True),
        ("momentum", 2, True),
        ("whole tensors", 2, False),
        ("plain", 2, False),
        ("own loader", 2, True),
    ],
)
def test_a_broken_run_equals_an_unbroken_one(run_ranks, tmp_path, case: str, ranks: int, in_use: bool) -> None:
    for unbroken, broken, skipped in run_ranks(ranks, break_and_go_on, case, str(tmp_path), in_use):
        for one, other in zip(unbroken, broken, strict=True):
            check_equal(one, other)
        assert not case.startswith("fp16") or skipped > 0, "an overflow must be met to be tested"


def samples_read(directory: str, goes_on: bool) -> list[list[int]]:
    """Of each step, those that this replica reads."""
    data = Samples()
    engine = make("plain", seed=4 if goes_on else 3, data=data)
    if goes_on:
        engine.load_checkpoint(directory)
    read = []
    for _ in range(AFTER if goes_on else BEFORE):
        data.read.clear()
        engine.train_batch()
        read.append(list(data.read))
    if not goes_on:
        engine.save_checkpoint(directory)
    return read


@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 2)])
def test_the_order_of_the_data_goes_on_with_another_number_of_replicas(run_ranks, tmp_path, before, after) -> None:
    replicas = [run_ranks(n, samples_read, str(tmp_path), goes_on) for n, goes_on in ((before, False), (after, True))]
    orders = [torch.randperm(SAMPLES_IN_ALL, generator=torch.Generator().manual_seed(3 + k)).tolist() for k in range(9)]
    wanted = [
        [orders[step // 3][(step % 3 * 8 + k) % SAMPLES_IN_ALL] for k in range(8)] for step in range(BEFORE + AFTER)
    ]
    found = []
    for ranks in replicas:
        for own in zip(*ranks, strict=True):  # of one step, every replica's
            micro_batches = [zip(samples[::2], samples[1::2], strict=True) for samples in own]
            found.append([k for together in zip(*micro_batches, strict=True) for pair in together for k in pair])
    assert found == wanted


def iterators_of_a_script(directory: str) -> tuple[list[float], list[float]]:
    """A script that iterates over initialize's loader by itself, and makes its iterator before it loads."""

    def start(seed: int) -> tuple[Engine, Any]:
        engine = make("bf16 zero2", seed)
        return engine, parallel3d.utils.RepeatingLoader(engine._data_iterator.loader)

    engine, data = start(3)
    for _ in range(BEFORE):
        engine.train_batch(data)
    engine.save_checkpoint(directory)
    unbroken = [engine.train_batch(data).item() for _ in range(AFTER)]
    engine, data = start(4)
    engine.load_checkpoint(directory)
    return unbroken, [engine.train_batch(data).item() for _ in range(AFTER)]


def test_a_scripts_own_iterator_over_the_loader_goes_on(run_ranks, tmp_path) -> None:
    [(unbroken, broken), _] = run_ranks(2, iterators_of_a_script, str(tmp_path))
    assert unbroken == broken
