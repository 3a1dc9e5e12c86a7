"""Pipeline x data x tensor, with every ZeRO stage, gives the numbers of one process in plain PyTorch (DESIGN 5)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layouts3d import ALL, Held, Layout, check, cover, train, wanted


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "layout" in metafunc.fixturenames:
        layouts = ALL if metafunc.config.getoption("full") else cover(max_ranks=8)
        metafunc.parametrize("layout", layouts, ids=str)


def test_losses_norms_and_weights_equal_one_process(run_ranks, layout: Layout):
    ranks = run_ranks(layout.num_ranks, train, layout)
    check(ranks, wanted(layout.dp, layout.tied, layout.clipping, layout.optimizer))


def test_losses_by_tokens_over_slices(run_ranks):
    layout = Layout(2, 2, 1, "1", True, "1f1b", True, True, "SGD")
    check(run_ranks(4, train, layout, True), wanted(1, True, True, "SGD"))


def train_by_policies(layout: Layout) -> list[tuple[list[float], list[float], Held]]:
    return [train(replace(layout, policy=policy)) for policy in ("none", "cheap", "attention", "full")]


def test_policies_change_no_bit(run_ranks):
    layout = Layout(2, 2, 1, "1", True, "zb-h1", True, True, "AdamW")
    for plain, *others in run_ranks(4, train_by_policies, layout):
        for losses, norms, held in others:
            assert (losses, norms) == plain[:2]
            assert all(torch.equal(held[name][1], values) for name, (_, values) in plain[2].items())
