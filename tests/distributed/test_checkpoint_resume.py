"""A run that was broken off and goes on equals one that was not, bit for bit, in the same layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from resume_runs import AFTER, BEFORE, SAMPLES_IN_ALL, Samples, break_and_go_on, check_equal, make

import parallel3d
from parallel3d import DeepSpeedEngine as Engine
from parallel3d.errors import CheckpointError


@pytest.mark.parametrize(
    ("case", "ranks", "in_use"),
    [
        ("fp16 zero1", 4, True),
        ("bf16 slices zero3", 4, False),
        ("momentum", 2, True),
        ("whole tensors", 2, False),
        ("plain", 2, False),
        ("own loader", 2, True),
        ("stateful loader", 2, True),
        ("stream", 2, True),
    ],
)
def test_a_broken_run_equals_an_unbroken_one(run_ranks, tmp_path, case: str, ranks: int, in_use: bool) -> None:
    for unbroken, broken, skipped in run_ranks(ranks, break_and_go_on, case, str(tmp_path), in_use):
        for one, other in zip(unbroken, broken, strict=True):
            check_equal(one, other)
        assert not case.startswith("fp16") or skipped > 0, "an overflow must be met to be tested"


def steps_read(engine: Engine, data: Samples, number: int) -> list[list[int]]:
    """Return the samples that this replica reads in each step."""
    read = []
    for _ in range(number):
        data.read.clear()
        engine.train_batch()
        read.append(list(data.read))
    return read


def samples_read(directory: str, goes_on: bool) -> list[list[int]]:
    data = Samples()
    engine = make("plain", seed=4 if goes_on else 3, data=data)
    if goes_on:
        engine.load_checkpoint(directory)
    read = steps_read(engine, data, AFTER if goes_on else BEFORE)
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


def other_micro_batches(directory: str, case: str) -> tuple[list[list[int]], list[list[int]]]:
    """Return the samples after some of an epoch in micro-batches of 2, and those of a run that continues in ones of 4."""
    data = Samples()
    engine = make(case, seed=3, data=data)
    steps_read(engine, data, 5 if case == "stream" else 4)
    engine.save_checkpoint(directory)
    unbroken = steps_read(engine, data, AFTER)
    other = make(case, seed=4, data=data, micro_batch_size=4)
    other.load_checkpoint(directory)
    broken = steps_read(other, data, AFTER)
    if case != "stream":  # whose epochs are whole steps
        last = make(case, seed=4, data=data, micro_batch_size=8)
        refused = "12 samples into the epoch, where no micro-batches of 1 replicas x 8 samples begin; keep"
        with pytest.raises(CheckpointError, match=refused):
            last.load_checkpoint(directory)
        last.load_checkpoint(directory, load_module_only=True)
    return unbroken, broken


@pytest.mark.parametrize("case", ["own loader", "stateful loader", "stream"])
def test_the_data_go_on_with_another_size_of_micro_batches(run_ranks, tmp_path, case: str) -> None:
    [(unbroken, broken)] = run_ranks(1, other_micro_batches, str(tmp_path), case)
    assert unbroken == broken


def iterators_of_a_script(directory: str) -> tuple[list[float], list[float]]:
    """A script that iterates over initialize's loader by itself, and makes its iterator before it loads."""

    def start(seed: int) -> tuple[Engine, Any]:
        engine = make("bf16 zero2", seed)
        return engine, parallel3d.utils.RepeatingLoader(engine.data.iterator.loader)

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
