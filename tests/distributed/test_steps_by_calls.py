"""Steps by calls that don't go as planned: failures, several losses, another batch size; each against plain PyTorch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import parallel3d
from parallel3d import DeepSpeedEngine as Engine
from parallel3d.errors import ConfigError, ExecutionError
from parallel3d.pipe import LayerSpec, PipelineModule

WIDTH, SAMPLES, ACCUMULATION = 8, 4, 3
SIZES = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "steps_per_print": None,
}
ZERO = [
    {"stage": 0},
    {"stage": 1},
    {"stage": 2, "reduce_per_micro_batch": True},
]


class Model(nn.Module):
    """Its backward raises in the middle, on every rank, while `fails`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.fails = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if self.fails:
            hidden.register_hook(self.fail)
        return (self.second(hidden) - y).square().mean()

    def fail(self, gradient: Tensor) -> None:
        raise ArithmeticError("planted")


def micro_batch(g: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(g)
    return torch.randn(SAMPLES, WIDTH, generator=generator), torch.randn(SAMPLES, 1, generator=generator)


def make(accumulation: int = ACCUMULATION, **config: Any) -> Engine:
    whole = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "steps_per_print": None,
        **config,
    }
    engine, *_ = parallel3d.initialize(model=Model(), config=whole)
    return engine


def norm_of_mean(micro_batches: list[int], divisor: int) -> float:
    """Return the norm of the gradient of the micro-batches' summed losses over `divisor`, on one process."""
    model = Model()
    (torch.stack([model(*micro_batch(g)) for g in micro_batches]).sum() / divisor).backward()
    return torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()


def train(engine: Engine, micro_batches: range, by_calls: bool) -> None:
    if not by_calls:
        engine.train_batch(iter([micro_batch(g) for g in micro_batches]))
        return
    for g in micro_batches:
        engine.backward(engine(*micro_batch(g)))
        engine.step()


def fail_and_go_on(zero: dict[str, Any], by_calls: bool, failing: int) -> tuple[int, float]:
    """A backward fails in the failing-th micro-batch; what follows is a batch of its own."""
    engine = make(zero_optimization=zero)
    rank, dp = engine.global_rank, engine.dp_world_size
    calls = 0

    def before(model: Model, _: Any) -> None:
        nonlocal calls
        model.fails, calls = calls == failing, calls + 1

    engine.module.register_forward_pre_hook(before)
    with pytest.raises((ArithmeticError, ExecutionError), match="planted"):
        train(engine, range(100, 100 + ACCUMULATION), by_calls)
    train(engine, range(rank, ACCUMULATION * dp, dp), by_calls)
    return engine.global_steps, engine.get_global_grad_norm().item()


@pytest.mark.parametrize("zero", ZERO, ids=str)
@pytest.mark.parametrize("by_calls", [True, False])
@pytest.mark.parametrize("failing", [1, ACCUMULATION - 1])
def test_a_failed_backward_leaves_nothing_to_the_next_batch(
    run_ranks, zero: dict[str, Any], by_calls: bool, failing: int
):
    wanted = norm_of_mean(list(range(2 * ACCUMULATION)), 2 * ACCUMULATION)
    for steps, norm in run_ranks(2, fail_and_go_on, zero, by_calls, failing):
        assert steps == 1
        assert norm == pytest.approx(wanted, rel=1e-6)


def mix_ways() -> tuple[str, float, float, int]:
    """A train_batch in the middle of a step by calls; the step's end; and a train_batch after dropping half a step."""
    engine = make(2)
    rank, dp = engine.global_rank, engine.dp_world_size
    train(engine, range(rank, 1 + rank), by_calls=True)
    with pytest.raises(ExecutionError) as caught:
        engine.train_batch(iter([micro_batch(7), micro_batch(8)]))
    train(engine, range(dp + rank, dp + 1 + rank), by_calls=True)
    norm = engine.get_global_grad_norm().item()
    train(engine, range(1), by_calls=True)
    engine.zero_grad()
    engine.train_batch(iter([micro_batch(rank), micro_batch(dp + rank)]))
    train(engine, range(rank, 2 * dp, dp), by_calls=True)
    return str(caught.value), norm, engine.get_global_grad_norm().item(), engine.global_steps


def test_neither_way_to_train_resets_the_other(run_ranks):
    norms = []
    model = Model()
    for _ in range(3):  # plain SGD, as the engine has it
        model.zero_grad()
        (torch.stack([model(*micro_batch(g)) for g in range(4)]).sum() / 4).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(torch.stack([g.norm() for g in gradients]).norm().item())
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * (p.grad if p.grad is not None else 0)
    for message, first, last, steps in run_ranks(2, mix_ways):
        assert message.startswith("1 micro-batches of a step are done by engine.backward; end it by engine.step()")
        assert (first, last, steps) == (pytest.approx(norms[0], rel=1e-5), pytest.approx(norms[2], rel=1e-5), 3)


def two_losses(zero: dict[str, Any], how: str) -> float | str:
    engine = make(1, zero_optimization=zero)
    rank = engine.global_rank
    first, second = engine(*micro_batch(rank)), engine(*micro_batch(2 + rank))
    try:
        if how == "no_sync":
            with engine.no_sync():
                engine.backward(first)
        elif how == "sum":
            second = first + second
        else:
            engine.backward(first, retain_graph=how == "retained")
        engine.backward(second)
    except ExecutionError as error:
        return str(error)
    engine.step()
    return engine.get_global_grad_norm().item()


@pytest.mark.parametrize(
    ("zero", "how"), [(ZERO[0], "no_sync"), (ZERO[1], "no_sync"), (ZERO[1], "sum"), (ZERO[2], "apart")]
)
def test_two_losses_of_a_micro_batch_add_up(run_ranks, zero: dict[str, Any], how: str):
    wanted = norm_of_mean([0, 1, 2, 3], 2)
    assert run_ranks(2, two_losses, zero, how) == pytest.approx([wanted] * 2, rel=1e-6)


@pytest.mark.parametrize("zero", ZERO[:2], ids=str)
def test_gradients_are_not_reduced_twice(run_ranks, zero: dict[str, Any]):
    for message in run_ranks(2, two_losses, zero, "apart"):
        assert "summed once more; give one call the sum" in message


def twice_through_one_graph() -> list[float]:
    engine = make(2)
    loss = engine(*micro_batch(0))
    for retain in (True, False):
        engine.backward(loss, retain_graph=retain, scale_wrt_gas=False)
        engine.step()
    return [engine.get_global_grad_norm().item(), norm_of_mean([0, 0], 1)]


def test_a_graph_is_retained_and_losses_are_summed_if_asked(run_ranks):
    found, wanted = run_ranks(1, twice_through_one_graph)[0]
    assert found == pytest.approx(wanted, rel=1e-6)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x * self.weight, 0.5, self.training)


def draw(directory: str) -> tuple[list[list[float]], bool, bool]:
    """Return the masks of six forwards in two micro-batches, and whether train_batch and a resumed engine draw the first."""
    ones, config = torch.ones(32), {**SIZES, "gradient_accumulation_steps": 2}
    engine, resumed = (parallel3d.initialize(model=Noisy(), config=config)[0] for _ in range(2))
    engine.save_checkpoint(directory)
    masks = []
    for _ in range(2):
        forwards = [engine(ones), engine(ones)]
        with torch.no_grad():
            forwards.append(engine(ones))
        engine.backward((forwards[0] + forwards[1]).sum())
        masks += [mask.tolist() for mask in forwards]
    with torch.no_grad():
        resumed(ones)
    resumed.load_checkpoint(directory)
    first = resumed(ones).tolist() == masks[0]
    batch = parallel3d.initialize(model=Summed(), config={**config, "gradient_accumulation_steps": 1})[0]
    return masks, first, batch.train_batch(iter([ones])).item() == sum(masks[0])


class Summed(Noisy):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum()


def test_each_forward_of_a_micro_batch_draws_numbers_of_its_own(run_ranks, tmp_path: Path):
    ((masks, resumed, batch),) = run_ranks(1, draw, str(tmp_path))
    assert len({tuple(mask) for mask in masks}) == 6
    assert resumed
    assert batch


class Dropping(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x).tanh(), 0.2, self.training)


def draw_after_recomputation(interval: int, own: bool) -> tuple[list[bool], list[Tensor]]:
    """Return whether the script draws the same after a backward as without it, and the weights after the step."""
    layers = [LayerSpec(Dropping, WIDTH, WIDTH) for _ in range(3)]
    module = PipelineModule(layers, num_stages=1, seed_layers=True, activation_checkpoint_interval=interval)
    engine, *_ = parallel3d.initialize(model=module, config=SIZES)
    states = [torch.get_rng_state()]
    loss = engine(micro_batch(0)[0]).square().mean()
    loss.backward() if own else engine.backward(loss)
    states.append(torch.get_rng_state())
    engine.step()
    return [torch.equal(state, states[0]) for state in states[1:]], [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("own", [False, True])
def test_a_recomputation_leaves_the_scripts_random_numbers_alone(run_ranks, own: bool):
    (plain,), (recomputed,) = (run_ranks(1, draw_after_recomputation, interval, own) for interval in (0, 1))
    assert plain[0] == recomputed[0] == [True]
    assert all(map(torch.equal, plain[1], recomputed[1]))


def resize() -> tuple[list[bool], str, list[float]]:
    engine = make(2)
    boundaries, message = [], ""
    for g in range(4):
        if g == 3:
            try:
                engine.set_train_batch_size(3 * SAMPLES)
            except ConfigError as error:
                message = str(error)
        engine.backward(engine(*micro_batch(g)))
        engine.step()
    engine.set_train_batch_size(3 * SAMPLES)
    model = Model()
    model.load_state_dict(engine.module.state_dict())
    (torch.stack([model(*micro_batch(g)) for g in range(3)]).mean()).backward()
    wanted = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()
    for g in range(3):
        boundaries.append(engine.is_gradient_accumulation_boundary())
        engine.backward(engine(*micro_batch(g)))
        engine.step()
    return boundaries, message, [engine.get_global_grad_norm().item(), wanted]


def test_another_batch_size_counts_from_the_step_on_at_which_it_is_set(run_ranks):
    boundaries, message, (found, wanted) = run_ranks(1, resize)[0]
    assert boundaries == [False, False, True]
    assert "1 micro-batches of a step are done" in message
    assert found == pytest.approx(wanted, rel=1e-6)


def save_within_a_step(directory: str, zero: dict[str, Any]) -> Any:
    engine = make(2, zero_optimization=zero)
    wanted = make(2, zero_optimization=zero)
    train(wanted, range(4), by_calls=True)
    train(engine, range(3), by_calls=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.save_checkpoint(directory)
    train(engine, range(3, 4), by_calls=True)
    other = make(2, zero_optimization=zero)
    other.load_checkpoint(directory)
    train(other, range(2, 4), by_calls=True)
    states = [e.module.state_dict() for e in (engine, other, wanted)]
    same = [all(torch.equal(state[name], value) for name, value in states[2].items()) for state in states[:2]]
    return [str(w.message) for w in caught], same, wanted.global_steps


@pytest.mark.parametrize("zero", ZERO)
def test_a_checkpoint_within_a_step_is_of_the_step_before(run_ranks, tmp_path: Path, zero: dict[str, Any]):
    first, second = run_ranks(2, save_within_a_step, str(tmp_path), zero)
    assert any(message.startswith("1 micro-batches of a step are done, whose gradients") for message in first[0])
    assert second[0] == []
    assert first[1:] == second[1:] == ([True, True], 2)


def timed(how: str) -> list[str]:
    engine = make(2, wall_clock_breakdown=True, steps_per_print=1)
    engine.eval()
    engine(*micro_batch(9))  # outside of a step, though autograd records it
    engine.train(how != "in eval mode")
    for g in range(2):
        engine.backward(engine.module(*micro_batch(g)) if how == "not called" else engine(*micro_batch(g)))
        engine.step()
    _, timeline = engine.reports.timeline()
    return [str(span.instruction) for span in timeline.spans]


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ("called", ["F0@0", "B0@0", "F1@0", "B1@0"]),
        ("not called", ["B0@0", "B1@0"]),
        ("in eval mode", ["B0@0", "F1@0", "B1@0"]),
    ],
)
def test_a_step_is_timed_wherever_its_losses_come_from(run_ranks, how: str, wanted: list[str]):
    assert run_ranks(1, timed, how)[0] == wanted


class Recurrent(nn.Module):
    """One layer used three times, each recomputed."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.again, self.last = (nn.Linear(WIDTH, size) for size in (WIDTH, WIDTH, 1))
        self.reentrant = reentrant

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = self.run(x) if self.reentrant is None else checkpoint(self.run, x, use_reentrant=self.reentrant)
        return (self.last(x) - y).square().mean()

    def run(self, x: Tensor) -> Tensor:
        return torch.tanh(self.again(x))


def recompute(reentrant: bool, zero: dict[str, Any]) -> float | str:
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"reduce_bucket_size": 32, **zero},  # a bucket is reduced while the backward still runs
        "steps_per_print": None,
    }
    engine, *_ = parallel3d.initialize(model=Recurrent(reentrant), config=config)
    loss = engine(*micro_batch(engine.global_rank))
    try:
        engine.backward(loss)
    except ExecutionError as error:
        return str(error)
    engine.step()
    return engine.get_global_grad_norm().item()


@pytest.mark.parametrize("zero", ZERO, ids=str)
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_gradient_behind_its_reduction_is_an_error(run_ranks, reentrant: bool, zero: dict[str, Any]):
    model = Recurrent(None)
    (sum(model(*micro_batch(g)) for g in range(2)) / 2).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()
    for found in run_ranks(2, recompute, reentrant, zero):
        if reentrant:
            assert found.startswith("parameter again."), found
            assert "use_reentrant=False" in found
        else:
            assert found == pytest.approx(norm, rel=1e-6)


class WithPenalty(Model):
    """Keeps a part of its loss apart from its output."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.penalty = self.second.weight.square().sum()
        return super().forward(x, y)

    def loss(self, g: int) -> Tensor:
        return self(*micro_batch(g)) / 3 + self.penalty


def call_backward(zero: dict[str, Any], precision: dict[str, Any], accumulation: int) -> list[float]:
    """Return norms of the steps whose backwards or gradients are the script's own, and of the same by engine.backward."""
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"reduce_bucket_size": 32, **zero},
        "steps_per_print": None,
        **precision,
    }
    engine, *_ = parallel3d.initialize(model=WithPenalty(), config=config)
    found = []
    for way in ("own", "mixed", "engine.backward", "given"):
        rank, last, weights = engine.global_rank, accumulation - 1, list(engine.module.parameters())
        given = [torch.zeros_like(weight) for weight in weights]
        if way == "mixed":  # the first backward fails, and the step starts over
            engine.module.fails = True
            loss = engine(*micro_batch(0))
            with pytest.raises(ArithmeticError, match="planted"):
                engine.scale(loss).backward()
            engine.module.fails = False
        for k in range(accumulation):
            loss = engine(*micro_batch(rank + 2 * k)) / 3 + engine.module.penalty
            if way == "own" or (way == "mixed" and k == last):
                torch.autograd.grad(loss, [engine.module.first.bias], retain_graph=True)  # adds to no gradient
                engine.scale(loss).backward()
            elif way == "given":
                gradients = torch.autograd.grad(engine.scale(loss) / accumulation, weights)
                given = [a + b for a, b in zip(given, gradients, strict=True)]
                for weight, gradient in zip(weights, given, strict=True):
                    weight.grad = gradient
            else:
                engine.backward(loss)
            engine.step()
        found.append(engine.get_global_grad_norm().item())
        with torch.no_grad(), parallel3d.zero.GatheredParameters(weights, modifier_rank=0):
            engine.module.load_state_dict(WithPenalty().state_dict())
    return found


HALF = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "loss_scale": 64}}
OWN = [
    *((zero, {}, accumulation) for zero in (*ZERO, {"stage": 3}) for accumulation in (1, 3)),
    *((zero, half, 3) for zero in (ZERO[1], {"stage": 3}) for half in HALF),
]


def call_backward_everywhere() -> list[list[float]]:
    return [call_backward(*case) for case in OWN]


def test_the_scripts_own_backward_equals_plain_pytorch(run_ranks):
    for found in run_ranks(2, call_backward_everywhere):
        for norms, (zero, half, accumulation) in zip(found, OWN, strict=True):
            model = WithPenalty()
            (sum(model.loss(g) for g in range(2 * accumulation)) / (2 * accumulation)).backward()
            wanted = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()
            assert norms == pytest.approx([wanted] * 4, rel=1e-2 if half else 1e-6), (zero, half, accumulation)


def backward_without_scale(before: str) -> str:
    engine = make(1, fp16={"enabled": True})
    if before:
        loss = engine.scale(engine(*micro_batch(0)))  # of another backward, or of none
        if before == "autograd.grad":
            torch.autograd.grad(loss, list(engine.module.parameters()))
    with pytest.raises(ExecutionError) as caught:
        engine(*micro_batch(0)).backward()
    return str(caught.value)


@pytest.mark.parametrize("before", ["", "scale", "autograd.grad"])
def test_float16_asks_for_the_loss_scale(run_ranks, before: str):
    assert "engine.scale(loss).backward()" in run_ranks(1, backward_without_scale, before)[0]


def checkpoint_the_engine() -> tuple[str, float]:
    engine = make(1)
    with pytest.raises(ExecutionError) as caught:
        engine.backward(checkpoint(engine, *micro_batch(0), use_reentrant=False))
    train(engine, range(1, 2), by_calls=True)
    return str(caught.value), engine.get_global_grad_norm().item()


def test_a_call_of_the_engine_inside_a_backward_is_refused(run_ranks):
    [(message, norm)] = run_ranks(1, checkpoint_the_engine)
    assert "checkpoint parts of the module" in message
    assert norm == pytest.approx(norm_of_mean([1], 1))


def train_scripted() -> float:
    torch.manual_seed(0)
    model = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, 1), nn.Tanh()))
    engine, *_ = parallel3d.initialize(model=model, config=SIZES)
    engine.backward(engine(micro_batch(0)[0]).mean())
    engine.step()
    return engine.get_global_grad_norm().item()


def test_a_module_of_torchscript_is_trained(run_ranks):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, 1), nn.Tanh())
    plain(micro_batch(0)[0]).mean().backward()
    wanted = torch.stack([p.grad.norm() for p in plain.parameters() if p.grad is not None]).norm().item()
    assert run_ranks(1, train_scripted) == [pytest.approx(wanted)]
