"""Loss curves: the data, the plain run, and how far a curve may lie from the plain ones."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "bench"))

import curve_run
import curves
import ours
from cases import CaseError, parse_case
from deviations import deviation_table, is_within_noise, largest_difference, noise, outside, verdict

from parallel3d.config import load
from parallel3d.models.user_model import Subject
from parallel3d.parity.reference import Reference

TINY = ours.SIZES["tiny"]
CPU = torch.device("cpu")


def arguments(monkeypatch: pytest.MonkeyPatch, text: str) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["ours.py", *text.split()])
    return ours.parse_arguments()


# Data


def test_tokens_walk_on_the_chain():
    following = torch.tensor(curve_run.successors(256))
    inputs, labels = curve_run.walk(TINY, 200, number=5)
    assert inputs.shape == labels.shape == (200, TINY.seq)
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    reached = labels[..., None] == following[inputs]
    assert reached.any(-1).all()
    # 6400 choices: a share is within 4 standard deviations, besides the few successors that are there twice.
    assert float(reached[..., 0].double().mean()) == pytest.approx(curve_run.CHANCES[0], abs=0.03)


def test_every_micro_batch_is_new_and_the_same_in_every_layout(monkeypatch: pytest.MonkeyPatch):
    one = arguments(monkeypatch, "--micro_batches 4")
    two = arguments(monkeypatch, "--micro_batches 2 --dp 2")
    whole = list(itertools.islice(curve_run.stream(one, 0, CPU), 8))
    replicas = [list(itertools.islice(curve_run.stream(two, replica, CPU), 4)) for replica in (0, 1)]
    shared = [batch for pair in zip(*replicas, strict=True) for batch in pair]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(whole, shared, strict=True))
    assert len({tuple(inputs.flatten().tolist()) for inputs, _ in whole}) == 8


# The plain run


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The products are tiny."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("dtype", "layers"), [(torch.float32, "--sliced_layers"), (torch.bfloat16, "")])
def test_the_plain_run_is_the_references(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, layers: str):
    args = arguments(monkeypatch, f"--micro_batches 2 --steps 3 {layers}")
    found = curve_run.train_plainly(args, curve_run.Plain(dtype), CPU)
    config = ours.make_config(args, cuda=False)
    subject = Subject(
        ours.layer_specs(args), lambda number: curve_run.walk(TINY, 1, number), ours.loss_of(args), config
    )
    reference = Reference(subject, load(config), curve_run.BASE_SEED, dtype, CPU)
    assert found == pytest.approx([reference.step(2).loss for _ in range(3)], rel=1e-6)
    assert len(set(found)) == 3


# Commands


def test_all_runs_train_on_equally_many_micro_batches_and_the_same_layers():
    args = argparse.Namespace(lr=None, steps=50, micro_batch=1, micro_batches=8)
    commands = curves.commands_of([parse_case("pp2dp2-zero2"), parse_case("tp2")], args, "1b")
    assert {name: processes for name, (_, processes) in commands.items()} == {"": 6, "pp2dp2-zero2": 4, "tp2": 2}
    counts = {name: command[command.index("--micro_batches") + 1] for name, (command, _) in commands.items()}
    assert counts == {"": "8", "pp2dp2-zero2": "4", "tp2": "8"}
    assert all("--sliced_layers" in command for command, _ in commands.values())
    assert [name for name, (command, _) in commands.items() if "--plain" in command] == [""]
    halves = curves.commands_of([parse_case("pp2-half")], args, "1b")
    assert all("half" in command for command, _ in halves.values())
    for names, said in [
        (["ds-pp4"], "ds-pp4"),
        (["dp3"], "dp3"),
        (["pp2-half", "pp2"], "half"),
        (["pp2-half", "tp2"], "half"),
    ]:
        with pytest.raises(CaseError, match=said):
            curves.commands_of([parse_case(name) for name in names], args, "1b")


# Deviations

PLAIN = [[5.0, 4.0, 3.0], [5.0, 4.1, 3.0], [5.0, 4.0, 2.95]]


@pytest.mark.parametrize(
    ("curve", "far", "within"),
    [
        ([5.0, 4.05, 2.97], 0.0, True),
        ([5.0, 4.2, 3.0], 0.1, True),
        ([5.0, 4.0, 2.8], 0.15, False),
        ([5.2, 4.0, 3.0], 0.2, False),
        ([5.0, 4.0, float("nan")], float("inf"), False),
    ],
)
def test_a_curve_may_leave_the_plain_runs_band_by_its_greatest_width(curve: list[float], far: float, within: bool):
    assert noise(PLAIN) == pytest.approx(0.1)
    assert outside(curve, PLAIN) == pytest.approx(far)
    # At the boundary itself rounding decides.
    assert is_within_noise(curve, PLAIN) is within or far == 0.1


def test_the_table_and_the_verdict():
    near, far = [5.0, 4.0, 3.02], [5.0, 4.5, 3.0]
    run = {
        "curves": {"a": PLAIN[0], "b": PLAIN[1], "near": near, "far": far},
        "plain_bf16": ["a", "b"],
        "cases": ["near", "far"],
    }
    assert largest_difference(far, PLAIN[0]) == (0.5, 2)
    rows = {row[0]: row[1:] for row in deviation_table(run)}
    assert rows["a"] == ["5.0000", "3.0000", "4.0000", "", "", "", ""]
    assert rows["b"] == ["5.0000", "3.0000", "4.0333", "0.1000", "2", "", ""]
    assert rows["near"] == ["5.0000", "3.0200", "4.0067", "0.0200", "3", "0.0200", "yes"]
    assert rows["far"] == ["5.0000", "3.0000", "4.1667", "0.5000", "2", "0.4000", "NO"]
    assert "0.1000 nats; NOT WITHIN NOISE: far" in verdict(run)
    assert "all cases lie within noise" in verdict(run | {"cases": ["near"]})


@pytest.mark.parametrize(
    ("mean", "others", "passes"),
    [(4.039, [], True), (4.041, [], False), (4.041, [4.05], True), (3.959, [4.05], True), (3.94, [4.05], False)],
)
def test_fp8_may_differ_by_one_percent_or_as_bf16_does(mean: float, others: list[float], passes: bool):
    """The means of the last 50 losses alone count; the first run is one of 4.0."""
    first, *bf16 = [[start] * 7 + [value] * 50 for start, value in zip([13.0, 4.0], [4.0, *others], strict=False)]
    names = ["a", "b"][: 1 + len(bf16)]
    curves = dict(zip(names, [first, *bf16], strict=True)) | {"pp1-fp8": [9.0] * 7 + [mean] * 50}
    run = {"curves": curves, "plain_bf16": names, "cases": ["pp1-fp8"]}
    assert ("NOT" not in verdict(run)) is passes


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("pp2-zbv-bf16acc-compile-cudnn", "2 stages, schedule zbv, bf16 gradient sums"),
        ("pp2tp2-sp-1f1b", "2 stages, 2 tensor-parallel ranks, schedule 1f1b, sequence-parallel"),
        ("dp2-zero2-permicro", "2 replicas, ZeRO-2"),
    ],
)
def test_the_picture_names_layouts_in_words(case: str, words: str):
    assert curves.plain_name(parse_case(case)) == words
