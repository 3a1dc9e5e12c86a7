"""Training in any layout gives the numbers of one process in plain PyTorch (DESIGN 5)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import toy
from layouts import (
    AXES,
    BASE_SEED,
    CLIPPING,
    STEPS,
    Layout,
    Run,
    all_pairs,
    check,
    check_layout,
    issue_layouts,
    make_engine,
    make_optimizer,
    own_iterator,
    pairs_of,
    possible_pairs,
    run_reference,
    run_steps,
    train,
)
from reference import Reference
from torch import Tensor

from parallel3d import utils


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "layout" in metafunc.fixturenames:
        full = metafunc.config.getoption("full")
        metafunc.parametrize("layout", issue_layouts() if full else all_pairs(), ids=str)


def test_losses_norms_and_weights_equal_one_process(run_ranks, layout: Layout):
    check_layout(layout, run_ranks(layout.pp * layout.dp, train, layout))


def test_the_default_cover_holds_every_pair():
    """Drawn at random, no layout has a pair that is not covered."""
    covered = set().union(*(pairs_of(layout) for layout in all_pairs()))
    assert covered == possible_pairs()
    rng = random.Random(1)
    drawn = (Layout(**{axis: rng.choice(values) for axis, values in AXES.items()}) for _ in range(2000))
    assert all(pairs_of(layout) <= covered for layout in drawn if layout.is_valid)


# Adam's default eps normalizes the rounding noise of gradients that are truly zero (key biases): float64 has little.
ADAM = {"lr": 1e-2, "eps": 1e-8}
DOUBLE_LAYOUTS = [(1, 2, "gpipe", 1), (2, 2, "1f1b", 1), (4, 1, "interleaved", 2), (2, 3, "interleaved", 3)]


@contextmanager
def in_double() -> Iterator[None]:
    """Make float64 the default dtype."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@in_double()
def train_in_double(pp: int, dp: int, schedule: str, chunks: int) -> Run:
    pipeline = {"stages": pp, "schedule": schedule, "num_chunks": chunks}
    engine = make_engine(
        toy.model(tied=True), optimizer="AdamW", optimizer_changes=ADAM, accumulation=12 // dp, pipeline=pipeline
    )
    return run_steps(engine, own_iterator(engine, [toy.micro_batch(g, "lengths") for g in range(12 * STEPS)]), STEPS)


@pytest.mark.parametrize(("pp", "dp", "schedule", "chunks"), DOUBLE_LAYOUTS)
def test_float64_agrees_to_1e_10_with_adams_default_eps(run_ranks, pp: int, dp: int, schedule: str, chunks: int):
    with in_double():
        make = make_optimizer("AdamW", **ADAM)
        reference = Reference(toy.model(tied=True), toy.cross_entropy, make, base_seed=BASE_SEED)
        wanted = run_reference(reference, [toy.micro_batch(g, "lengths") for g in range(12 * STEPS)], 12)
    check(run_ranks(pp * dp, train_in_double, pp, dp, schedule, chunks), wanted, dp, tolerance=1e-10)


ACCUMULATIONS = [1, 2, 8]


@in_double()
def gradients_before_clipping(pp: int) -> list[dict[str, Tensor]]:
    """On one rank: the gradients of a clipped step, by name, for each number of micro-batches."""
    found = []
    for accumulation in ACCUMULATIONS:
        engine = make_engine(
            toy.model(tied=True), accumulation=accumulation, clipping=CLIPPING, pipeline={"stages": pp}
        )
        gradients: dict[str, Tensor] = {}

        def keep(engine=engine, gradients=gradients) -> None:
            for info in engine.module.parameter_infos():
                gradients[info.name] = utils.safe_get_full_grad(info.parameter).clone()

        engine.update.call_before_step(keep)
        engine.train_batch(own_iterator(engine, [toy.micro_batch(g, "tuple") for g in range(accumulation)]))
        found.append(gradients)
    return found


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_gradients_before_clipping_equal_one_process(run_ranks, pp: int):
    """On every stage, to 1e-10 of the model's norm: a key's bias has a gradient that is truly zero."""
    ranks = run_ranks(pp, gradients_before_clipping, pp)
    for accumulation, *stages in zip(ACCUMULATIONS, *ranks, strict=True):
        with in_double():
            alone = Reference(toy.model(tied=True), toy.cross_entropy, make_optimizer("SGD"), base_seed=BASE_SEED)
            _, norm = alone.step([toy.micro_batch(g, "tuple") for g in range(accumulation)])
        assert norm > CLIPPING, "clipping must have an effect to be tested"
        assert all(stages)
        assert set().union(*stages) == set(alone.parameters)
        for own in stages:
            for name, gradient in own.items():
                assert (gradient - alone.parameters[name].grad).norm() <= 1e-10 * norm, f"{name}, {accumulation}"
