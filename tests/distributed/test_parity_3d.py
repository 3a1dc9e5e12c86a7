"""Pipeline x data x tensor, with every ZeRO stage, gives the numbers of one process in plain PyTorch (DESIGN 5)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import toy3d
from layouts import SHARDED, make_optimizer, specs
from layouts3d import ALL, Held, Layout, check, cover, held_by, joined, train, wanted
from reference import Reference

import parallel3d
from parallel3d.pipe import LayerSpec, PipelineModule


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


def initial_weights(pp: int, tp: int, zero: int) -> Held:
    torch.manual_seed(3)
    config = {
        "train_micro_batch_size_per_gpu": toy3d.SAMPLES,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": zero, **SHARDED},
        "tensor_parallel": {"size": tp, "sequence_parallel": True},
        "pipeline": {"stages": pp},
    }
    module = PipelineModule(specs(toy3d.model(tied=True)), loss_fn=LayerSpec(toy3d.SlicedLoss, False), config=config)
    parallel3d.initialize(model=module, config=config)
    return held_by(module)


@pytest.mark.parametrize(("pp", "tp", "dp", "zero"), [(1, 4, 1, 0), (2, 2, 2, 3)])
def test_initial_weights_are_bitwise_those_of_one_process(run_ranks, pp: int, tp: int, dp: int, zero: int):
    wanted = Reference(toy3d.model(tied=True), toy3d.plain_loss, make_optimizer("SGD"), base_seed=3).weights()
    whole = joined(run_ranks(pp * tp * dp, initial_weights, pp, tp, zero), wanted)
    assert [name for name, weight in wanted.items() if not torch.equal(whole[name], weight)] == []
