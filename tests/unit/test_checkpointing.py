"""Recomputed regions give the gradients that plain PyTorch gives, and hold their inputs alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.autograd.recomputation import Checkpointer, Copy, RecomputationTimes
from parallel3d.config import ActivationCheckpointingConfig
from parallel3d.deepspeed import checkpointing
from parallel3d.errors import ConfigError, ExecutionError

HIDDEN = 8


class HostCopies:
    """Stands in for a device: every tensor leaves, and what moves is noted by the first element of its data."""

    def __init__(self) -> None:
        self.log: list[tuple[str, float]] = []

    def leaves(self, tensor: Tensor) -> bool:
        return True

    def to_host(self, tensor: Tensor) -> Copy:
        self.log.append(("out", float(tensor.flatten()[0])))
        return Copy(tensor.clone(), "on host")

    def to_device(self, copy: Copy, device: torch.device) -> Copy:
        assert copy.done == "on host"
        self.log.append(("back", float(copy.tensor.flatten()[0])))
        return Copy(copy.tensor.clone(), "on device")

    def wait(self, copy: Copy) -> None:
        assert copy.done == "on device"
        self.log.append(("wait", float(copy.tensor.flatten()[0])))


class Model(nn.Module):
    """ids and a mask in, a dict out; dropout everywhere; `wrap` runs each part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, HIDDEN)
        self.blocks = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, ids: Tensor, mask: Tensor, wrap: Callable[..., Any]) -> Tensor:
        state = wrap(lambda batch: {"x": F.dropout(self.embed(batch[0])), "rest": [batch[1], None, 3]}, (ids, mask))
        for block in self.blocks:
            state = wrap(self.run_block, state, block=block)
        return state["x"].sum()

    @staticmethod
    def run_block(state: dict[str, Any], block: nn.Module) -> dict[str, Any]:
        mask, nothing, power = state["rest"]
        assert nothing is None
        x = F.dropout(torch.tanh(block(state["x"])) ** power) * mask.unsqueeze(-1)
        return {"x": state["x"] + x, "rest": [mask, nothing, power]}


def plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def gradients(wrap: Callable[..., Any]) -> list[Tensor]:
    model = Model()
    torch.manual_seed(1)
    ids, mask = torch.randint(11, (2, 5)), torch.rand(2, 5) < 0.7
    torch.manual_seed(2)
    loss = model(ids, mask, wrap)
    state = torch.get_rng_state()
    torch.randn(3)  # whatever draws between forward and backward
    after = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), after), "the recomputation moved the random state"
    torch.set_rng_state(state)
    return [*(p.grad for p in model.parameters()), torch.randn(2)]


@contextmanager
def shared(**settings: Any) -> Iterator[None]:
    checkpointing.configure(None, **settings)
    yield
    checkpointing.configure(None)


@pytest.mark.parametrize("settings", [{}, {"checkpoint_in_cpu": True}, {"synchronize": True, "profile": True}], ids=str)
def test_gradients_are_bitwise_plain_torchs(settings: dict[str, Any]):
    wanted = gradients(plain)
    with shared(**settings):
        got = gradients(checkpointing.checkpoint)
    assert all(torch.equal(g, w) for g, w in zip(got, wanted, strict=True))


def test_offloaded_inputs_give_bitwise_the_same_and_come_back_one_ahead():
    copies = HostCopies()
    settings = ActivationCheckpointingConfig(cpu_checkpointing=True)
    got = gradients(Checkpointer(settings, transfers=copies))
    assert all(torch.equal(g, w) for g, w in zip(got, gradients(plain), strict=True))
    out, moves = [value for what, value in copies.log if what == "out"], [what for what, _ in copies.log]
    assert len(out) == 2 + 3 * 2, "ids and mask of the embedding, x and mask of each block; no weight"
    assert [value for what, value in copies.log if what == "wait"] == [
        v for k in (3, 2, 1, 0) for v in out[2 * k : 2 * k + 2]
    ]
    # Two of the last block, then always two of the one before while one is recomputed: nothing twice.
    first = ["back", "wait", "back", "back", "back", "wait"]
    assert moves == ["out"] * 8 + first + ["wait", "back", "back", "wait"] * 2 + ["wait", "wait"]


def test_a_graph_that_is_kept_is_recomputed_once():
    linear, copies = nn.Linear(HIDDEN, HIDDEN), HostCopies()
    x = torch.ones(2, HIDDEN, requires_grad=True) * 2
    run = Checkpointer(ActivationCheckpointingConfig(cpu_checkpointing=True), transfers=copies)
    y = run(lambda x: linear(x).tanh(), x).sum()
    first, second = (torch.autograd.grad(y, linear.weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert [value for what, value in copies.log if what == "back"] == [2.0]


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (
            (torch.exp, lambda x: x.double().exp()),
            r"\[2, 8\] of torch.float32 in its forward, but \[2, 8\] of torch.float64",
        ),
        ((torch.exp, torch.neg), "saved 1 tensors in its forward, but 0 in its recomputation"),
    ],
)
def test_a_region_that_computes_something_else_the_second_time_is_refused(others: Any, message: str):
    functions = iter(others)
    y = Checkpointer()(lambda x: next(functions)(x), torch.ones(2, HIDDEN, requires_grad=True) * 2)
    with pytest.raises(ExecutionError, match=message):
        y.sum().backward()


def test_regions_in_regions_give_the_gradients_of_plain_autograd():
    run, calls = Checkpointer(), []

    def inner(x: Tensor) -> Tensor:
        calls.append("inner")
        return F.dropout(x.sin()).exp()

    def outer(wrap: Callable[..., Any], x: Tensor) -> Tensor:
        return wrap(inner, wrap(inner, x).cos()).tanh()

    results = []
    for wrap in (plain, run):
        torch.manual_seed(3)
        x = torch.linspace(0, 1, HIDDEN, requires_grad=True)
        y = wrap(outer, wrap, x * 1.5)
        results.append((y.detach(), *torch.autograd.grad(y.square().sum(), x)))
        calls.append("end")
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    # In the backward the outer region runs once, up to what it needs, and so does each inner one.
    assert calls == ["inner"] * 2 + ["end"] + ["inner"] * 6 + ["end"]


def test_autocast_and_the_default_device_are_those_of_the_forward():
    seen = []

    def region(x: Tensor) -> Tensor:
        made = torch.zeros(1)
        seen.append((made.device.type, torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return (x * 2).exp()

    x = torch.ones(3, requires_grad=True)
    with torch.autocast("cpu", torch.float16), torch.device("meta"):
        y = Checkpointer()(region, x * 1)
    with torch.autocast("cpu", torch.bfloat16):
        y.sum().backward()
        assert (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")) == (True, torch.bfloat16)
    assert seen == [("meta", True, torch.float16)] * 2


@pytest.mark.parametrize(("offloaded", "error"), [(False, RuntimeError), (True, ExecutionError)])
def test_a_region_that_writes_into_its_argument_is_refused(offloaded: bool, error: type[Exception]):
    run = Checkpointer(ActivationCheckpointingConfig(cpu_checkpointing=offloaded), transfers=HostCopies())
    x = torch.randn(2, HIDDEN, requires_grad=True) * 2
    with pytest.raises(error, match=r"in ?place"):
        run(lambda x: x.relu_().tanh(), x).sum().backward()


def change_what_tanh_saved(x: Tensor) -> Tensor:
    y = x.tanh()
    return y.add_(1).sigmoid()


@pytest.mark.parametrize("policy", ["full", "cheap", "attention"])
def test_a_region_that_writes_into_what_it_saved_is_refused_as_by_autograd(policy: Any):
    run = Checkpointer(ActivationCheckpointingConfig(policy=policy))
    x = torch.randn(2, HIDDEN, requires_grad=True)
    for function, error in (
        (change_what_tanh_saved, RuntimeError),
        (lambda x: run(change_what_tanh_saved, x), ExecutionError),
    ):
        with pytest.raises(error, match=r"in ?place"):
            function(x).sum().backward()


def held_bytes(wrap: Callable[..., Any]) -> int:
    """Return the bytes that autograd holds for the backward of six wide layers."""
    layers = [nn.Linear(HIDDEN, HIDDEN) for _ in range(6)]
    total = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal total
        total += 0 if isinstance(tensor, nn.Parameter) else tensor.numel() * tensor.element_size()
        return tensor

    x = torch.randn(100, HIDDEN, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        for layer in layers:
            x = wrap(lambda x, layer=layer: torch.sigmoid(torch.tanh(layer(x)) ** 2), x)
    return total


def test_only_the_inputs_of_regions_are_held():
    one = 100 * HIDDEN * 4
    assert held_bytes(Checkpointer()) == 6 * one
    assert held_bytes(plain) >= 4 * 6 * one


def test_without_gradients_nothing_is_held_or_run_twice():
    calls = []
    with torch.no_grad():
        assert Checkpointer()(lambda x: calls.append(0) or x, 3) == 3
    assert calls == [0]


def test_a_region_may_hold_another():
    inner, outer = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
    x = torch.randn(3, HIDDEN)
    copies = HostCopies()
    run = Checkpointer(ActivationCheckpointingConfig(cpu_checkpointing=True), transfers=copies)

    def nested(wrap: Callable[..., Any]) -> Tensor:
        y = wrap(lambda x: outer(wrap(lambda x: inner(x).tanh(), x)).tanh(), x)
        return torch.autograd.grad(y.sum(), [inner.weight, outer.weight])[0]

    assert torch.equal(nested(run), nested(plain))


class Ticks:
    """A clock that the regions move on."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def read(self, marks: list[float]) -> list[float]:
        return list(marks)


def test_profile_tells_forwards_from_recomputations():
    clock, seconds = Ticks(), iter([3.0, 4.0, 10.0, 20.0])
    run = Checkpointer(ActivationCheckpointingConfig(profile=True), clock)

    def region(x: Tensor) -> Tensor:
        clock.now += next(seconds)
        return x.tanh().tanh()

    x = torch.ones(2, requires_grad=True)
    run(region, run(region, x)).sum().backward()
    assert run.times() == RecomputationTimes(2, 7.0, 2, 30.0)
    assert run.times() == RecomputationTimes()


@pytest.mark.parametrize("settings", [{}, {"policy": "cheap"}, {"profile": True}, {"cpu_checkpointing": True}], ids=str)
def test_compiled_code_recomputes_in_its_graph_unless_settings_need_the_host(settings: dict[str, Any]):
    linear, copies = nn.Linear(HIDDEN, HIDDEN), HostCopies()
    run = Checkpointer(ActivationCheckpointingConfig(**settings), transfers=copies)
    needs_host = "policy" not in settings and bool(settings)

    def region(state: dict[str, Any], power: int) -> dict[str, Any]:
        return {"x": torch.tanh(linear(state["x"])) ** power, "rest": state["rest"]}

    def model(wrap: Callable[..., Any], x: Tensor) -> Tensor:
        return wrap(region, wrap(region, {"x": x, "rest": [1, None]}, 2), power=3)["x"].sum()

    x = torch.randn(2, HIDDEN)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=not needs_host)
    got, wanted = (torch.autograd.grad(f(wrap, x), linear.weight)[0] for f, wrap in ((compiled, run), (model, plain)))
    assert torch.equal(got, wanted)
    assert run.times().num_recomputations == 2 * ("profile" in settings)
    assert ("back" in dict(copies.log)) == ("cpu_checkpointing" in settings)


def test_configure_reads_the_section_and_arguments_override_it():
    checkpointing.configure(
        None, {"activation_checkpointing": {"profile": True, "cpu_checkpointing": True}}, profile=False
    )
    assert checkpointing.is_configured()
    gradients(checkpointing.checkpoint)
    assert checkpointing.times() == RecomputationTimes()
    checkpointing.configure(
        None, profile=True, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=4
    )
    gradients(checkpointing.checkpoint)
    assert checkpointing.times().num_recomputations == 4
    # Of a file whose "auto"s another call fills, only the section counts.
    checkpointing.configure(
        None,
        deepspeed_config={
            "optimizer": {"type": "Adam", "params": {"lr": "auto"}},
            "activation_checkpointing": {"profile": True},
        },
    )
    checkpointing.checkpoint(torch.exp, torch.ones(1, requires_grad=True))
    assert checkpointing.times().num_forwards == 1
    checkpointing.configure(None)
    with pytest.raises(ConfigError, match="number_checkpoints is 0"):
        checkpointing.configure(None, num_checkpoints=0)
