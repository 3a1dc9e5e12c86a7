"""The memory of an optimizer's step is at most the prediction, and not far below it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from parallel3d.monitor.memory import LiveStorages
from parallel3d.optim import build_optimizer
from parallel3d.optim.optimizers import empty_optimizer, step_bytes

SIZES = (30_000, 50_000, 50_000, 20_000)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("SGD", {"lr": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
        ("AdamW", {"lr": 0.1, "weight_decay": 0.1}),
        ("Adam", {"lr": 0.1, "adam_w_mode": False, "weight_decay": 0.1}),
        ("AdamW", {"lr": 0.1, "foreach": True}),
        ("AdamW", {"lr": 0.1, "fused": True}),
        ("Lion", {"lr": 0.1}),
        ("Adagrad", {"lr": 0.1}),
        ("RMSprop", {"lr": 0.1, "momentum": 0.9}),
        ("Adadelta", {"lr": 0.1}),
        ("NAdam", {"lr": 0.1}),
        ("RAdam", {"lr": 0.1}),
    ],
    ids=str,
)
def test_a_step_takes_no_more_than_said(name: str, params: dict[str, Any]):
    parameters = [nn.Parameter(torch.randn(size)) for size in SIZES]
    optimizer = build_optimizer(name, parameters, params)
    for _ in range(2):  # the first makes its state
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        with LiveStorages() as live:
            optimizer.step()
    most = live.peak
    said = step_bytes(optimizer, sum(SIZES), max(SIZES), on_cuda=False)
    assert step_bytes(empty_optimizer(name, params), sum(SIZES), max(SIZES), on_cuda=False) == said
    assert most <= said + 64 * len(SIZES)
    assert said <= 4 * max(most, 4 * max(SIZES))


def test_fused_kernels_are_the_choice_on_cuda():
    for name, free in (("AdamW", True), ("SGD", True), ("RMSprop", False)):
        optimizer = build_optimizer(name, [nn.Parameter(torch.zeros(2))], {"lr": 0.1})
        assert (step_bytes(optimizer, 10, 10, on_cuda=True) == 0) is free
