"""Learning rates after a load in which the optimizer's state or the schedule's is left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import parallel3d
from parallel3d import DeepSpeedEngine as Engine

BEFORE, AFTER = 4, 5
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5),
    "steps": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.1),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, [lambda step: 1 / (1 + step), lambda _: 1.0]),
    "cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [0.3, 0.2], total_steps=20),
    "warm-up": lambda optimizer: parallel3d.optim.schedules.WarmupDecayLR(optimizer, 20, warmup_num_steps=3),
}


def make(name: str) -> Engine:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    groups = [{"params": net[0].parameters()}, {"params": net[1].parameters(), "lr": 0.02}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    config = {"train_batch_size": 2, "steps_per_print": None}
    return parallel3d.initialize(model=net, optimizer=optimizer, lr_scheduler=SCHEDULES[name], config=config)[0]


def settings(engine: Engine, steps: int) -> list[Any]:
    """Return learning rates and betas now, and after each of some steps."""
    found = []
    for step in range(steps + 1):
        if step:
            engine.backward(engine(torch.ones(2, 4)).square().mean())
            engine.step()
        found.append([(group["lr"], group["betas"]) for group in engine.optimizer.param_groups])
    return found


def rates(name: str, directory: str, options: dict[str, bool]) -> tuple[list[Any], list[Any], list[Any]]:
    first = make(name)
    begun = settings(first, BEFORE)
    first.save_checkpoint(directory)
    loaded = make(name)
    loaded.load_checkpoint(directory, **options)
    return begun, settings(first, AFTER), settings(loaded, AFTER)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_without_the_optimizers_state(run_ranks, tmp_path: Path, name: str) -> None:
    [(_, unbroken, loaded)] = run_ranks(1, rates, name, str(tmp_path), {"load_optimizer_states": False})
    skipped = 1 if name == "cycle" else 0  # OneCycleLR sets betas in its next step
    assert loaded[skipped:] == unbroken[skipped:]
    assert [lr for lr, _ in loaded[0]] == [lr for lr, _ in unbroken[0]]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_that_is_not_loaded_starts_from_the_beginning(run_ranks, tmp_path: Path, name: str) -> None:
    [(begun, _, loaded)] = run_ranks(1, rates, name, str(tmp_path), {"load_lr_scheduler_states": False})
    assert loaded[: BEFORE + 1] == begun
