"""Optimizer state in host memory: the numbers are those of training without offload."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from late_copies import late_copies
from layouts import run_steps
from offload_runs import (
    BF16,
    CASES,
    DEVICE,
    HALF,
    ON_CPU,
    STEPS,
    WAYS,
    WORLDS,
    Case,
    compare,
    data_of,
    engine_of,
    on_disk,
    optimizer_state,
    trained,
)
from parallel3d.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import Tensor, nn

import parallel3d
from parallel3d import DeepSpeedEngine as Engine
from parallel3d.deepspeed.runtime import OffloadStateTypeEnum
from parallel3d.errors import ConfigError, ExecutionError, OffloadError, Parallel3DError
from parallel3d.zero.memory import MOMENTS


def compare_late(case: Case, directory: Path, names: Sequence[str]) -> list[str]:
    with late_copies():
        return compare(case, directory, names=names)


# Without --full: others have each of their settings but the optimizers, each of which takes the same steps on the host.
FULL_ONLY = ("dp3-zero3", "dp2-others")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_the_numbers_are_those_without_offload_also_if_copies_are_late:
        full = metafunc.config.getoption("full")
        metafunc.parametrize("name", [name for name in CASES if full or name not in FULL_ONLY])


def test_the_numbers_are_those_without_offload_also_if_copies_are_late(
    run_ranks, name: str, tmp_path: Path, full: bool
):
    """In every way; without --full in every second one, the cases in turn in these and in those."""
    names = WAYS if full else WAYS[list(CASES).index(name) % 2 :: 2]
    for problems in run_ranks(WORLDS[name], compare_late, CASES[name], tmp_path, names):
        assert not problems, "\n".join(problems)


class TwoDtypes(nn.Module):
    """Weights in fp32 and fp64, whose buckets pass through the same buffers."""

    def __init__(self, first: torch.dtype, second: torch.dtype):
        super().__init__()
        self.dtypes = first, second, first
        self.layers = nn.ModuleList(nn.Linear(40, 40, dtype=dtype) for dtype in self.dtypes)

    def forward(self, x: Tensor) -> Tensor:
        for dtype, layer in zip(self.dtypes, self.layers, strict=True):
            x = layer(x.to(dtype))
        return x.square().mean()


def train_two_dtypes(directory: Path) -> dict[str, float]:
    """Return how far weights are from those of plain PyTorch, by where the state was."""
    far = {}
    for order in ((torch.float32, torch.float64), (torch.float64, torch.float32)):
        for name, offload in {"device": DEVICE, "cpu": ON_CPU, "disk": on_disk(directory)}.items():
            torch.manual_seed(2)
            plain = TwoDtypes(*order)
            model = deepcopy(plain)
            optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (plain, model)]
            zero = {"stage": 1, "reduce_bucket_size": 1700, **offload}
            config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero}
            engine, *_ = parallel3d.initialize(model=model, optimizer=optimizers[1], config=config)
            for x in torch.randn(3, 4, 40):
                optimizers[0].zero_grad()
                plain(x).backward()
                optimizers[0].step()
                engine.backward(engine(x))
                engine.step()
            pairs = zip(plain.parameters(), model.parameters(), strict=True)
            far[f"{order}, {name}"] = max(float((a - b).abs().max()) for a, b in pairs)
    return far


def test_weights_of_two_dtypes_share_the_buffers(run_ranks, tmp_path: Path):
    [far] = run_ranks(1, train_two_dtypes, tmp_path)
    assert max(far.values()) < 1e-6, far


class Scaled(nn.Module):
    """A parameter without dims, like the temperature of CLIP's loss, among others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 3), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.scale).square().mean()


def train_scaled(directory: Path, offload: dict[str, Any]) -> dict[str, float]:
    """Return how far weights are from those of plain PyTorch, by optimizer, also after a checkpoint of another stage."""
    far = {}
    for make in (torch.optim.NAdam, torch.optim.ASGD):  # each with another number beside `step`
        torch.manual_seed(2)
        plain = Scaled()
        engines = []
        for stage, own in ((2, offload), (0, {}), (1, offload)):
            model = deepcopy(plain)
            config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage, **own}}
            optimizer = make(model.parameters(), lr=1e-2)
            engines.append(parallel3d.initialize(model=model, optimizer=optimizer, config=config)[0])
        optimizer = make(plain.parameters(), lr=1e-2)
        for k, engine in enumerate(engines):
            if k > 0:
                engine.load_checkpoint(directory / make.__name__)
            for x in torch.randn(2, 4, 8):
                optimizer.zero_grad()
                plain(x).backward()
                optimizer.step()
                engine.backward(engine(x))
                engine.step()
            if k < 2:
                engine.save_checkpoint(directory / make.__name__)
        pairs = zip(plain.parameters(), engines[-1].module.parameters(), strict=True)
        far[make.__name__] = max(float((a - b).abs().max()) for a, b in pairs)
    return far


@pytest.mark.parametrize(("ranks", "is_on_disk"), [(1, False), (2, True)])
def test_a_parameter_without_dims_is_trained_like_the_others(run_ranks, tmp_path: Path, ranks: int, is_on_disk: bool):
    offload = on_disk(tmp_path) if is_on_disk else DEVICE
    for far in run_ranks(ranks, train_scaled, tmp_path, offload):
        assert max(far.values()) < 1e-6, far


def train_late() -> float:
    """Return how far weights are from plain PyTorch's where a layer gets its first gradient later than others."""
    torch.manual_seed(2)
    plain = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    model = deepcopy(plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.1) for m in (plain, model)]
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": ON_CPU}
    engine, *_ = parallel3d.initialize(model=model, optimizer=optimizers[1], config=config)
    for step, x in enumerate(torch.randn(3, 4, 8)):
        optimizers[0].zero_grad()
        for layers in (plain, model):
            loss = nn.Sequential(*layers[: 1 + bool(step)])(x).square().mean()
            engine.backward(loss) if layers is model else loss.backward()
        optimizers[0].step()
        engine.step()
    return max(float((a - b).abs().max()) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_the_cpu_starts_the_momentum_of_each_parameter_with_its_first_gradient(run_ranks):
    assert run_ranks(1, train_late)[0] < 1e-6


AUTO = {"offload_optimizer": {"device": "cpu", "ratio": "auto"}, "sub_group_size": 300}


def move_back(case: Case) -> dict[str, Any]:
    wanted, wanted_state, _, _ = trained(case, {})
    run, state, _, engine = trained(case, AUTO)
    report = engine.reports.memory_report()[engine.global_rank]
    return {
        "equal": run[:2] == wanted[:2] and all(torch.equal(state[key], wanted_state[key]) for key in wanted_state),
        "host": report["host"][1],
        "offloaded": sum(bucket.is_offloaded for bucket in engine.update.sharded.buckets),
    }


@pytest.mark.parametrize("name", ["dp1", "dp3-bf16"])
def test_with_ratio_auto_the_device_keeps_what_it_has_room_for(run_ranks, name: str):
    for found in run_ranks(WORLDS[name], move_back, CASES[name]):
        assert found == {"equal": True, "host": 0, "offloaded": 0}


RESUMED = Case(dp=2, config=BF16)


def resume(directory: Path) -> dict[str, bool]:
    """Save with offload after one step, and go on without it, and the other way round."""
    found = {}
    disk = on_disk(directory)
    wanted = trained(RESUMED, {})[1]
    ways: dict[str, Any] = {"to device": (DEVICE, {}), "to host": ({}, DEVICE), "to cpu": (HALF, ON_CPU)}
    for name, (first, second) in {**ways, "off disk": (disk, {}), "to disk": ({}, disk)}.items():
        engine = engine_of(RESUMED, first)
        run_steps(engine, data_of(engine, 0, 1), 1)
        engine.save_checkpoint(directory / name)
        other = engine_of(RESUMED, second)
        other.load_checkpoint(directory / name)
        run_steps(other, data_of(other, 1, STEPS - 1), STEPS - 1)
        tolerance = 1e-6 if second is ON_CPU else 0.0
        state = optimizer_state(other)
        found[name] = all(torch.allclose(state[k], wanted[k], rtol=tolerance, atol=tolerance) for k in wanted)
    return found


def test_a_checkpoint_goes_on_with_and_without_offload(run_ranks, tmp_path: Path):
    for found in run_ranks(2, resume, tmp_path):
        assert found == {"to device": True, "to host": True, "to cpu": True, "off disk": True, "to disk": True}


FAILING = Case(optimizer=("AdamW", {"lr": 2e-3}), config=BF16, blocks=2)


class Failing:
    """A function that raises after its n-th call."""

    def __init__(self, function: Callable[..., Any], number: int):
        self._function, self._left = function, number

    def __call__(self, *args: Any) -> Any:
        result = self._function(*args)
        self._left -= 1
        if not self._left:
            raise ZeroDivisionError
        return result


def fail(directory: Path) -> list[str]:
    """Let the second step fail in the middle, look at the state, and go on from a checkpoint; return what is wrong."""
    problems = []
    engine = engine_of(FAILING, {})
    states = []
    for step in range(2):
        run_steps(engine, data_of(engine, step, 1), 1)
        states.append({key: value.clone() for key, value in optimizer_state(engine).items()})
    disk = on_disk(directory)
    for name, offload in {"device": DEVICE, "disk": disk, "read": disk}.items():
        engine = engine_of(FAILING, offload)
        run_steps(engine, data_of(engine, 0, 1), 1)
        engine.save_checkpoint(directory / name)
        with pytest.MonkeyPatch.context() as patch:
            if name == "read":  # of the last state of a span
                [file] = engine.update.disks().values()
                patch.setattr(file, "read", Failing(file.read, 15))
            else:  # the first call is without spans
                patch.setattr(engine.optimizer, "step", Failing(engine.optimizer.step, 4))
            with pytest.raises(ZeroDivisionError):
                engine.train_batch(data_of(engine, 1, 1))
        found = "".join(map(str, progress(engine, *states)))
        if re.fullmatch("1+0+" if name == "read" else "110+", found) is None:
            problems.append(f"{name}: the spans' state is after step {found}")
        for call in (lambda e: e.train_batch(data_of(e, 1, 1)), lambda e: e.save_checkpoint(directory / "mixed")):
            with pytest.raises(Parallel3DError, match=r"ZeroDivisionError.*load a checkpoint with its optimizer state"):
                call(engine)
        engine.load_checkpoint(directory / name)
        run_steps(engine, data_of(engine, 1, 1), 1)
        state = optimizer_state(engine)
        problems += [f"{name}: {key} at last" for key in state if not torch.equal(state[key], states[1][key])]
    return problems


def fail_late(directory: Path) -> list[str]:
    with late_copies():
        return fail(directory)


def progress(engine: Engine, *states: dict[str, Tensor]) -> Iterator[int]:
    """Yield which of these states each span is in, and -1 if it is in none."""
    engine.update.sharded.settle()
    for span in (span for bucket in engine.update.sharded.buckets for span in bucket.spans):
        equal = set(range(len(states)))
        for shard in span.shards:
            for kind, value in {"master": shard.master, **engine.optimizer.state[shard.master]}.items():
                wholes = [state.get(f"{kind}/{shard.info.name}") for state in states]
                part = slice(shard.start, shard.start + value.numel())
                equal -= {
                    k for k, w in enumerate(wholes) if w is not None and not w.view(-1)[part].equal(value.view(-1))
                }
        yield equal.pop() if len(equal) == 1 else -1


def test_a_step_that_fails_in_the_middle_leaves_whole_spans_and_asks_for_a_checkpoint(run_ranks, tmp_path: Path):
    [problems] = run_ranks(1, fail_late, tmp_path)
    assert not problems, "\n".join(problems)


def write() -> tuple[float, float]:
    """Write a master and a weight between steps; return how far they are from what a step without a gradient makes of them."""
    case = Case(optimizer=("SGD", {"lr": 0.0}), config=BF16, clipping=0.0)
    engine = engine_of(case, DEVICE)
    first, second = list(engine.module.parameters())[:2]
    run_steps(engine, data_of(engine, 0, 1), 1)
    safe_set_full_fp32_param(first, torch.full_like(first, 0.123, dtype=torch.float32))
    with torch.no_grad():
        second.fill_(2.5)
    run_steps(engine, data_of(engine, 1, 1), 1)
    return float(safe_get_full_fp32_param(first).mean()), float(safe_get_full_fp32_param(second).mean())


def test_masters_on_the_host_follow_what_is_written(run_ranks):
    [(first, second)] = run_ranks(1, write)
    assert (first, second) == (pytest.approx(0.123), 2.5)


SHORT = {"offload": {"host_memory_gib": 1e-5}}


def refusals(directory: Path) -> list[str]:
    errors = []
    for optimizer, zero, config in (
        (("Adafactor", {"lr": 1e-3}), DEVICE, {}),
        (("SGD", {"lr": 0.1}), {"offload_optimizer": {"device": "gpu"}}, {}),
        (("SGD", {"lr": 0.1}), {"offload_optimizer": {"device": "nvme"}}, {}),
        (("AdamW", {"lr": 1e-3}), DEVICE, SHORT),
        # One rank's directory is missing, and all ranks raise.
        (("AdamW", {"lr": 1e-3}), on_disk(directory / str(torch.distributed.get_rank())), {}),
    ):
        try:
            engine_of(Case(dp=2, optimizer=optimizer, config=config), zero)
        except (ConfigError, OffloadError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(MOMENTS, "AdamW")
        with pytest.raises(OffloadError) as unknown:
            engine_of(Case(dp=2), on_disk(directory / "0"))
    return [*errors, str(unknown.value)]


def test_what_cannot_be_offloaded_is_an_error_on_all_ranks(run_ranks, tmp_path: Path):
    (tmp_path / "0").mkdir()
    for whole, device, no_path, short, missing, unknown in run_ranks(2, refusals, tmp_path):
        assert "Adafactor works on whole tensors" in whole
        assert "offload_optimizer.device" in device
        assert "'gpu'" in device
        assert "device is nvme, but nvme_path is missing" in no_path
        assert short.startswith(
            "OffloadError: offloaded state needs 0.000 GiB of host memory (by local rank: 0.000 by 0"
        )
        assert "offload.host_memory_gib leaves 0.000 GiB" in short
        assert missing.startswith("OffloadError: a scratch file of")
        assert str(tmp_path / "1") in missing
        assert "how much state AdamW keeps for an element isn't known" in unknown
    assert list((tmp_path / "0").iterdir()) == []


PARKED = {
    "dp2-stage3": Case(dp=2, stage=3, config=BF16),
    "dp1": Case(stage=0),
    "dp2": Case(dp=2, tied=True, config=BF16),
}


def park(case: Case) -> dict[str, Any]:
    """Move state to the host between steps, and train on."""
    wanted = trained(case, {})
    engine = engine_of(case, {})
    run_steps(engine, data_of(engine, 0, 1), 1)
    buckets, errors = engine.update.sharded.buckets, []

    def sizes() -> list[int]:
        masters = [shard.master for bucket in buckets for shard in bucket.shards]
        state = [value for m in masters for value in engine.optimizer.state[m].values() if value.dim()]
        kinds = (*masters, *state), [bucket.gradient_shard for bucket in buckets], list(engine.module.parameters())
        return [sum(t.untyped_storage().nbytes() for t in tensors) for tensors in kinds]

    whole = sizes()
    engine.offload_states(include=[OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params])
    some = sizes()
    engine.eval_batch(data_of(engine, 0, 1))
    engine.offload_states(include=["lp_grads"])
    engine.offload_states()
    none = sizes()
    for call in (engine.train_batch, engine.eval_batch):
        try:
            call(data_of(engine, 1, 1))
        except ExecutionError as error:
            errors.append(str(error))
    engine.reload_states()
    run = run_steps(engine, data_of(engine, 1, STEPS - 1), STEPS - 1)
    state = optimizer_state(engine)
    return {
        "whole": whole,
        "some": some,
        "none": none,
        "errors": errors,
        "losses": run[0] == wanted[0][0][1:],
        "state": all(torch.equal(state[key], wanted[1][key]) for key in wanted[1]),
    }


@pytest.mark.parametrize("name", PARKED)
def test_state_that_is_parked_on_the_host_comes_back_as_it_was(run_ranks, name: str):
    case = PARKED[name]
    for found in run_ranks(case.dp, park, case):
        assert found["losses"]
        assert found["state"]
        assert min(found["whole"]) > 0
        in_place = not case.config  # weights are their own masters
        assert found["some"][:2] == [found["some"][0] if in_place else 0, found["whole"][1]]
        assert found["some"][0] < found["whole"][0]
        assert found["none"][:2] == [0, 0]
        # With stage 3 parameters are placeholders of one element.
        assert found["none"][2] == (found["whole"][2] if case.stage == 3 else 0)
        assert len(found["errors"]) == 2
        assert "engine.reload_states()" in found["errors"][0]
