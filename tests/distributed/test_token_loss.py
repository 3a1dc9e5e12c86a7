"""A loss function that returns (sum, count) is divided once, by the count of all ranks and micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import toy
from layouts import BASE_SEED, CLIPPING, OPTIMIZERS, Run, check, copies, make_engine, own_iterator, run_steps, specs
from reference import Reference
from torch import Tensor

import parallel3d
from parallel3d.errors import ConfigError
from parallel3d.pipe import PipelineModule

STEPS, ACCUMULATION, DP = 3, 3, 2
IGNORED = -100


def token_loss(output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    loss = F.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss, (labels != IGNORED).sum()


def micro_batches() -> list[Any]:
    """One to all of the ten labels of a micro-batch count; of one of them, none."""
    batches = []
    for g in range(STEPS * ACCUMULATION * DP):
        ids, labels = toy.micro_batch(g)
        labels.view(-1)[: (7 * g + 3) % 10] = IGNORED
        if g == 4:
            labels.fill_(IGNORED)
        batches.append((ids, labels))
    return batches


def train(pipeline: dict[str, Any], zero: dict[str, Any], clipping: float, samples: int, accumulation: int) -> Run:
    """samples: those of a micro-batch."""
    engine = make_engine(
        toy.model(tied=True),
        token_loss,
        accumulation=accumulation,
        clipping=clipping,
        pipeline=pipeline,
        train_micro_batch_size_per_gpu=samples,
        zero_optimization={"reduce_bucket_size": 1500, **zero},
    )
    ids, labels = (torch.cat(tensors).split(samples) for tensors in zip(*micro_batches(), strict=True))
    return run_steps(engine, own_iterator(engine, list(zip(ids, labels, strict=True))), STEPS)


def by_calls(clipping: float) -> Run:
    """On one stage, forward, backward and step by hand."""
    module = PipelineModule(specs(toy.model(tied=True)), num_stages=1, seed_layers=True, base_seed=BASE_SEED)
    config = {
        "train_micro_batch_size_per_gpu": toy.SAMPLES,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": clipping,
        "optimizer": {"type": "SGD", "params": OPTIMIZERS["SGD"]},
        "zero_optimization": {"stage": 1},
        "steps_per_print": None,
    }
    engine, *_ = parallel3d.initialize(model=module, config=config)
    norms, own = [], micro_batches()[engine.global_rank :: DP]
    for ids, labels in own:
        engine.backward(token_loss(engine(ids), labels))
        engine.step()
        if engine.micro_steps % ACCUMULATION == 0:
            norms.append(engine.get_global_grad_norm().item())
    return [], norms, copies(engine.module)


def on_one_process(clipping: float) -> Run:
    """All micro-batches of a step as one sum, divided by all its tokens."""
    reference = Reference(
        toy.model(tied=True), token_loss, lambda p: torch.optim.SGD(p, **OPTIMIZERS["SGD"]), clipping, BASE_SEED
    )
    losses, norms, batches = [], [], micro_batches()
    for step in range(STEPS):
        share = batches[step * ACCUMULATION * DP : (step + 1) * ACCUMULATION * DP]
        parts = [token_loss(reference.forward(ids), labels) for ids, labels in share]
        loss = sum(total for total, _ in parts) / sum(count for _, count in parts)
        reference.optimizer.zero_grad()
        loss.backward()
        norms.append(torch.stack([p.grad.double().square().sum() for p in reference.trained]).sum().sqrt().item())
        if clipping:
            torch.nn.utils.clip_grad_norm_(reference.trained, clipping)
        reference.optimizer.step()
        losses.append(loss.item())
    return losses, norms, reference.weights()


PIPELINES = [
    {"stages": 1},
    {"stages": 2, "schedule": "1f1b"},
    {"stages": 2, "schedule": "zb-h1"},
    {"stages": 2, "schedule": "interleaved", "num_chunks": 2},
]


@pytest.mark.parametrize("clipping", [0.0, CLIPPING])
@pytest.mark.parametrize("zero", [{"stage": 0}, {"stage": 1}, {"stage": 2, "reduce_per_micro_batch": True}], ids=str)
@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
@pytest.mark.parametrize(("dp", "samples", "accumulation"), [(DP, toy.SAMPLES, ACCUMULATION), (1, 4, 3), (3, 2, 2)])
def test_gradients_are_those_of_one_batch(
    run_ranks,
    pipeline: dict[str, Any],
    zero: dict[str, Any],
    clipping: float,
    dp: int,
    samples: int,
    accumulation: int,
):
    """However the 12 samples of a step are split over replicas and micro-batches."""
    ranks = run_ranks(dp * pipeline["stages"], train, pipeline, zero, clipping, samples, accumulation)
    check(ranks, on_one_process(clipping), dp)


def test_steps_by_calls_divide_by_all_tokens(run_ranks):
    _, norms, weights = on_one_process(CLIPPING)
    check(run_ranks(DP, by_calls, CLIPPING), ([], norms, weights), DP)


def evaluate() -> tuple[float, list[float]]:
    engine = make_engine(toy.model(tied=False), token_loss, accumulation=2, pipeline={"stages": 2})
    average = engine.eval_batch(own_iterator(engine, micro_batches()[:4])).item()
    each = engine.eval_batch(own_iterator(engine, micro_batches()[:4]), reduce_output=None)
    return average, [loss.item() for loss in each]


def evaluate_nothing() -> tuple[float, list[float]]:
    engine = make_engine(toy.model(tied=False), token_loss, accumulation=1, pipeline={"stages": 1})
    ids, labels = toy.micro_batch(0)
    nothing = (ids, torch.full_like(labels, IGNORED))
    each = engine.eval_batch(iter([nothing]), reduce_output=None)
    return engine.eval_batch(iter([nothing])).item(), [loss.item() for loss in each]


def test_of_no_token_the_loss_is_zero_as_in_training(run_ranks):
    assert run_ranks(1, evaluate_nothing) == [(0.0, [0.0])]


def train_on_nothing(precision: dict[str, Any], clipping: float) -> list[bool]:
    engine = make_engine(
        toy.model(tied=False), token_loss, accumulation=1, clipping=clipping, pipeline={"stages": 1}, **precision
    )
    before = [p.detach().clone() for p in engine.module.parameters()]
    ids, labels = toy.micro_batch(0)
    loss = engine.train_batch(iter([(ids, torch.full_like(labels, IGNORED))]))
    unchanged = all(torch.equal(p, q) for p, q in zip(engine.module.parameters(), before, strict=True))
    return [unchanged, loss.item() == 0, engine.get_global_grad_norm().item() == 0]


@pytest.mark.parametrize(("precision", "clipping"), [({}, CLIPPING), ({"bf16": {"enabled": True}}, 0.0)], ids=str)
def test_a_step_without_a_token_leaves_the_weights(run_ranks, precision: dict[str, Any], clipping: float):
    assert run_ranks(1, train_on_nothing, precision, clipping) == [[True] * 3]


def test_evaluation_averages_over_tokens(run_ranks):
    reference = Reference(toy.model(tied=False), token_loss, lambda p: torch.optim.SGD(p, lr=0.1), 0.0, BASE_SEED)
    with torch.no_grad():
        parts = [token_loss(reference.forward(ids), labels) for ids, labels in micro_batches()[:4]]
    average = float(sum(total for total, _ in parts) / sum(count for _, count in parts))
    each = [float(total / count) for total, count in parts]
    for rank, (found, found_each) in enumerate(run_ranks(4, evaluate)):
        assert found == pytest.approx(average, rel=1e-5)
        assert found_each == pytest.approx(each[rank % 2 :: 2], rel=1e-5)


def count_some_tokens(output: Tensor, labels: Tensor) -> Any:
    """Return (sum, count) only where labels are ignored."""
    loss, count = token_loss(output, labels)
    return (loss, count) if count < labels.numel() else loss / count


def mix_counts_and_means() -> list[str]:
    ids, labels = toy.micro_batch(0)
    data = [(ids, labels), (ids, torch.full_like(labels, IGNORED))]
    engine = make_engine(toy.model(tied=False), count_some_tokens, accumulation=2, pipeline={"stages": 1})
    found = []
    for run in (engine.train_batch, engine.eval_batch):
        with pytest.raises(ConfigError) as caught:
            run(iter(data))
        found.append(str(caught.value))
    for ids, labels in data:
        engine.backward(count_some_tokens(engine(ids), labels))
        if not engine.is_gradient_accumulation_boundary():
            engine.step()
    with pytest.raises(ConfigError) as caught:
        engine.step()
    return [*found, str(caught.value)]


def test_counts_for_some_micro_batches_alone_are_refused(run_ranks):
    (messages,) = run_ranks(1, mix_counts_and_means)
    for message in messages:
        assert "(sum, count) for 1 of 2 micro-batches and a mean for the others" in message
