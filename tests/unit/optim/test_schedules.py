"""Learning-rate schedules against formulas written from their definitions, value by value."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from parallel3d.errors import ConfigError
from parallel3d.optim import build_scheduler

OWN_LRS = (0.1, 0.02)
STEPS = 200


def make_optimizer(cls: type[torch.optim.Optimizer] = torch.optim.Adam) -> torch.optim.Optimizer:
    """Two groups, of rates OWN_LRS."""
    return cls([{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in OWN_LRS])


def both(value: Any) -> tuple[Any, Any]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value, value)


# Each formula: after how many steps, and the parameters, to the rate of each of two groups.


def range_test(
    k: int,
    lr_range_test_min_lr: Any = 1e-3,
    lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0,
    lr_range_test_staircase: bool = False,
) -> list[float]:
    intervals = Fraction(k, int(lr_range_test_step_size))
    if lr_range_test_staircase:
        intervals = Fraction(math.floor(intervals))
    return [low + low * lr_range_test_step_rate * float(intervals) for low in both(lr_range_test_min_lr)]


def warmed(k: int, steps: int, kind: str) -> float:
    """How much of the warm-up the k-th step has; the first step, and the start, have nothing."""
    steps = max(2, int(steps))
    if kind == "linear":
        return min(1.0, max(0, k - 1) / steps)
    return min(1.0, math.log(max(1, k), steps))


def between(low: Any, high: Any, part: float) -> list[float]:
    return [(1 - part) * a + part * b for a, b in zip(both(low), both(high), strict=True)]


def warmup(
    k: int,
    warmup_min_lr: Any = 0.0,
    warmup_max_lr: Any = OWN_LRS,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> list[float]:
    return between(warmup_min_lr, warmup_max_lr, warmed(k, warmup_num_steps, warmup_type))


def decay(
    k: int,
    total_num_steps: int,
    warmup_min_lr: Any = 0.0,
    warmup_max_lr: Any = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> list[float]:
    start = max(2, warmup_num_steps)
    if k - 1 < start:
        return between(warmup_min_lr, warmup_max_lr, warmed(k, warmup_num_steps, warmup_type))
    left = total_num_steps - (k - 1)
    return between(warmup_min_lr, warmup_max_lr, left / (total_num_steps - start) if left > 0 else 0.0)


def cosine(
    k: int,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: str = "log",
) -> list[float]:
    start = max(2, warmup_num_steps)
    if k == 0:
        ratio = 0.0
    elif k <= start:
        ratio = warmup_min_ratio + (1 - warmup_min_ratio) * warmed(k, warmup_num_steps, warmup_type)
    else:
        done = (k - start) / (total_num_steps - start) if k < total_num_steps else 1.0
        ratio = cos_min_ratio + (1 - cos_min_ratio) * math.cos(math.pi / 2 * done) ** 2
    return [ratio * lr for lr in OWN_LRS]


def height(k: int, first: int, second: int | None, stairs: int, second_stairs: int | None) -> Fraction:
    """How far up a saw of this period is after k steps, exactly."""
    second = first if second is None else second
    second_stairs = stairs if second_stairs is None else second_stairs
    place = k % (first + second)
    up, count = (Fraction(place, first), stairs) if place <= first else (Fraction(first + second - place, second), 0)
    if place > first:
        count = second_stairs
    return Fraction(math.floor(up * count), count) if count else up


def one_cycle(
    k: int,
    cycle_min_lr: Any,
    cycle_max_lr: Any,
    decay_lr_rate: float = 0.0,
    cycle_first_step_size: int = 2000,
    cycle_second_step_size: int | None = None,
    cycle_first_stair_count: int = 0,
    cycle_second_stair_count: int | None = None,
    decay_step_size: int = 0,
    **momentum: Any,
) -> list[float]:
    second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
    after = k - cycle_first_step_size - second
    if after > 0:
        slower = 1 + decay_lr_rate * after / decay_step_size if decay_step_size else 1.0
        return [low / slower for low in both(cycle_min_lr)]
    shape = (cycle_first_step_size, cycle_second_step_size, cycle_first_stair_count, cycle_second_stair_count)
    return between(cycle_min_lr, cycle_max_lr, float(height(k, *shape)))


def one_cycle_momentum(k: int, params: dict[str, Any]) -> list[float]:
    """Against the rate: what one_cycle has of these rates is how far momentum is from the highest."""
    low, high = params.get("cycle_min_mom", 0.8), params.get("cycle_max_mom", 0.9)
    if k == 0:
        return list(both(low))
    first = params.get("cycle_first_step_size", 2000)
    second = params.get("cycle_second_step_size") or first
    if k > first + second:
        size = params.get("decay_step_size", 0)
        faster = 1 + params.get("decay_mom_rate", 0.0) * (k - first - second) / size if size else 1.0
        return [h * faster for h in both(high)]
    up = one_cycle(k, **{**params, "cycle_min_lr": 0.0, "cycle_max_lr": 1.0})
    return [h - (h - a) * u for a, h, u in zip(both(low), both(high), up, strict=True)]


CYCLE = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2}
CASES: list[tuple[str, Callable[..., list[float]], dict[str, Any]]] = [
    ("LRRangeTest", range_test, {}),
    ("LRRangeTest", range_test, {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 7}),
    ("LRRangeTest", range_test, {"lr_range_test_step_size": 20, "lr_range_test_step_rate": 5.0}),
    ("LRRangeTest", range_test, {"lr_range_test_step_size": 7, "lr_range_test_staircase": True}),
    ("LRRangeTest", range_test, {"lr_range_test_min_lr": [1e-3, 1e-5], "lr_range_test_step_size": 1}),
    ("WarmupLR", warmup, {}),
    ("WarmupLR", warmup, {"warmup_num_steps": 0}),
    ("WarmupLR", warmup, {"warmup_num_steps": 1, "warmup_min_lr": 0.01}),
    ("WarmupLR", warmup, {"warmup_num_steps": 2, "warmup_type": "linear"}),
    ("WarmupLR", warmup, {"warmup_num_steps": 50, "warmup_max_lr": 0.01}),
    ("WarmupLR", warmup, {"warmup_num_steps": 100.0, "warmup_type": "linear", "warmup_max_lr": 1e-3}),
    ("WarmupLR", warmup, {"warmup_num_steps": 9, "warmup_min_lr": [1e-4, 0], "warmup_max_lr": [0.1, 0.3]}),
    ("WarmupDecayLR", decay, {"total_num_steps": 150, "warmup_num_steps": 30}),
    ("WarmupDecayLR", decay, {"total_num_steps": 150, "warmup_num_steps": 30, "warmup_type": "linear"}),
    ("WarmupDecayLR", decay, {"total_num_steps": 1000, "warmup_num_steps": 0, "warmup_min_lr": 1e-5}),
    ("WarmupDecayLR", decay, {"total_num_steps": 60, "warmup_num_steps": 60, "warmup_max_lr": [0.1, 0.2]}),
    ("WarmupDecayLR", decay, {"total_num_steps": 61, "warmup_num_steps": 60}),
    ("WarmupCosineLR", cosine, {"total_num_steps": 150, "warmup_num_steps": 30}),
    ("WarmupCosineLR", cosine, {"total_num_steps": 150, "warmup_num_steps": 30, "warmup_type": "linear"}),
    ("WarmupCosineLR", cosine, {"total_num_steps": 500, "warmup_num_steps": 1, "warmup_min_ratio": 0.2}),
    ("WarmupCosineLR", cosine, {"total_num_steps": 40, "warmup_num_steps": 0, "cos_min_ratio": 0.1}),
    ("WarmupCosineLR", cosine, {"total_num_steps": 30, "warmup_num_steps": 30, "cos_min_ratio": 0.3}),
    ("OneCycle", one_cycle, CYCLE),
    ("OneCycle", one_cycle, {**CYCLE, "cycle_first_step_size": 30}),
    ("OneCycle", one_cycle, {**CYCLE, "cycle_first_step_size": 30, "cycle_second_step_size": 47}),
    ("OneCycle", one_cycle, {**CYCLE, "cycle_first_step_size": 21, "cycle_first_stair_count": 6}),
    (
        "OneCycle",
        one_cycle,
        {
            "cycle_min_lr": [1e-4, 1e-3],
            "cycle_max_lr": [1e-2, 5e-3],
            "cycle_first_step_size": 33,
            "cycle_second_step_size": 10,
            "cycle_first_stair_count": 11,
            "cycle_second_stair_count": 3,
            "decay_step_size": 8,
            "decay_lr_rate": 0.7,
            "decay_mom_rate": 0.001,
            "cycle_min_mom": [0.7, 0.85],
            "cycle_max_mom": [0.8, 0.95],
        },
    ),
    ("OneCycle", one_cycle, {**CYCLE, "cycle_first_step_size": 5, "decay_step_size": 3, "decay_lr_rate": 2.0}),
    ("OneCycle", one_cycle, {**CYCLE, "cycle_first_step_size": 25, "cycle_momentum": False}),
]
parametrize = pytest.mark.parametrize(
    ("name", "formula", "params"), CASES, ids=[f"{name}-{params}"[:90] for name, _, params in CASES]
)


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def near(values: Any) -> Any:
    return pytest.approx(values, rel=1e-12, abs=1e-15)


@parametrize
def test_200_rates_equal_the_formula_whatever_the_groups_hold(name: str, formula: Callable, params: dict[str, Any]):
    optimizer = make_optimizer()
    schedule = build_scheduler(name, optimizer, params)
    for group in optimizer.param_groups:
        group["params"] = []  # as sharding does, which puts its own there
    for k in range(STEPS):
        expected = formula(k, **params)
        assert rates(optimizer) == near(expected), f"after {k} steps"
        assert schedule.get_last_lr() == schedule.get_lr() == rates(optimizer)
        assert schedule.state_dict() == {"last_batch_iteration": k - 1}
        schedule.step()


@parametrize
@pytest.mark.parametrize("before", [0, 1, 77])
def test_a_resumed_schedule_goes_on_where_it_was(name: str, formula: Callable, params: dict[str, Any], before: int):
    saved = build_scheduler(name, make_optimizer(), params)
    for _ in range(before):
        saved.step()
    optimizer = make_optimizer()
    resumed = build_scheduler(name, optimizer, params)
    resumed.load_state_dict(saved.state_dict())
    for k in range(before, STEPS):
        assert rates(optimizer) == near(formula(k, **params)), f"after {k} steps"
        resumed.step()


@pytest.mark.parametrize("params", [p for name, _, p in CASES if name == "OneCycle"], ids=lambda p: str(p)[:60])
def test_one_cycle_turns_momentum_against_the_rate(params: dict[str, Any]):
    optimizer = make_optimizer()
    schedule = build_scheduler("OneCycle", optimizer, params)
    for k in range(STEPS):
        betas = [group["betas"] for group in optimizer.param_groups]
        if params.get("cycle_momentum", True):
            assert [b for b, _ in betas] == near(one_cycle_momentum(k, params)), f"after {k} steps"
            assert [b for _, b in betas] == [0.99, 0.99]
        else:
            assert betas == [(0.9, 0.999)] * 2
        schedule.step()


@settings(deadline=None, max_examples=60)
@given(
    first=st.integers(1, 40),
    second=st.integers(0, 40),
    stairs=st.integers(0, 12),
    second_stairs=st.one_of(st.none(), st.integers(0, 12)),
)
def test_one_cycle_of_any_shape(first: int, second: int, stairs: int, second_stairs: int | None):
    optimizer = make_optimizer()
    shape = {
        "cycle_first_step_size": first,
        "cycle_second_step_size": second,
        "cycle_first_stair_count": stairs,
        "cycle_second_stair_count": second_stairs,
    }
    schedule = build_scheduler("OneCycle", optimizer, {**CYCLE, **shape})
    for k in range(first + second + 3):
        assert rates(optimizer) == near(one_cycle(k, **CYCLE, **shape)), f"after {k} steps"
        schedule.step()


def test_a_schedule_can_start_late_and_jump():
    optimizer = make_optimizer()
    params = {"warmup_num_steps": 50, "warmup_max_lr": 0.01}
    schedule = build_scheduler("WarmupLR", optimizer, {**params, "last_batch_iteration": 19})
    assert rates(optimizer) == list(OWN_LRS), "what the optimizer was saved with stays until the next step"
    schedule.step()
    assert rates(optimizer) == near(warmup(21, **params))
    schedule.step(39)
    assert rates(optimizer) == near(warmup(40, **params))


def test_rates_held_as_tensors_are_written_in_place():
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=torch.tensor(0.1, dtype=torch.float64))
    rate = optimizer.param_groups[0]["lr"]
    schedule = build_scheduler("WarmupCosineLR", optimizer, {"total_num_steps": 40, "warmup_num_steps": 10})
    for k in range(50):
        assert float(rate) == near(cosine(k, 40, warmup_num_steps=10)[0])
        schedule.step()


def test_groups_added_later_keep_their_rate():
    optimizer = make_optimizer()
    schedule = build_scheduler("WarmupLR", optimizer, {"warmup_num_steps": 5})
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 7.0})
    schedule.step()
    assert rates(optimizer)[2] == 7.0


def test_one_cycle_tells_the_largest_momentum_before_the_first_step_which_trains_with_the_smallest():
    schedule = build_scheduler("OneCycle", make_optimizer(), {**CYCLE, "cycle_min_mom": 0.8, "cycle_max_mom": 0.95})
    assert {mom for mom, _ in schedule.get_mom()} == {0.95}
    assert {group["betas"][0] for group in schedule.optimizer.param_groups} == {0.8}


def test_warmups_tell_their_length_and_kind():
    schedule = build_scheduler("WarmupCosineLR", make_optimizer(), {"total_num_steps": 9, "warmup_num_steps": 1})
    assert (schedule.warmup_num_steps, schedule.warmup_type) == (2, "log")


def test_one_cycle_leaves_an_optimizer_without_betas_its_momentum():
    with pytest.warns(UserWarning, match="leaves the momentum of SGD alone"):
        schedule = build_scheduler("OneCycle", make_optimizer(torch.optim.SGD), CYCLE)
    schedule.step()
    assert schedule.get_mom() is None
    assert all("betas" not in group for group in schedule.optimizer.param_groups)


@pytest.mark.parametrize("name", ["WarmupDecayLR", "WarmupCosineLR"])
def test_a_warmup_longer_than_the_schedule_warns(name: str):
    with pytest.warns(UserWarning, match="total_num_steps is 5, less than the 10 steps of warm-up"):
        build_scheduler(name, make_optimizer(), {"total_num_steps": 5, "warmup_num_steps": 10})


TORCH: dict[str, tuple[dict[str, Any], Callable[[int], float] | None]] = {
    "StepLR": ({"step_size": 3, "gamma": 0.5}, lambda k: 0.5 ** (k // 3)),
    "MultiStepLR": ({"milestones": (2, 5), "gamma": 0.1}, lambda k: 0.1 ** ((k >= 2) + (k >= 5))),
    "ExponentialLR": ({"gamma": 0.9}, lambda k: 0.9**k),
    "ConstantLR": ({"factor": 0.25, "total_iters": 4}, lambda k: 0.25 if k < 4 else 1.0),
    "LinearLR": ({"start_factor": 0.5, "total_iters": 4}, lambda k: 0.5 + 0.5 * min(k, 4) / 4),
    "CosineAnnealingLR": ({"T_max": 12}, lambda k: math.cos(math.pi * k / 24) ** 2),
    "PolynomialLR": ({"total_iters": 10, "power": 2.0}, lambda k: max(0.0, 1 - k / 10) ** 2),
    "LambdaLR": ({"lr_lambda": lambda k: 1 / (k + 1)}, lambda k: 1 / (k + 1)),
    "MultiplicativeLR": ({"lr_lambda": lambda k: 0.8}, lambda k: 0.8**k),
    "CosineAnnealingWarmRestarts": ({"T_0": 5}, lambda k: math.cos(math.pi * (k % 5) / 10) ** 2),
    "CyclicLR": ({"base_lr": 0.1, "max_lr": 0.2, "cycle_momentum": False}, None),
    "OneCycleLR": ({"max_lr": 0.1, "total_steps": 20}, None),
    "ReduceLROnPlateau": ({"mode": "max"}, None),
}


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("name", TORCH)
def test_torch_schedules_by_name(name: str):
    params, factor = TORCH[name]
    optimizer = make_optimizer()
    schedule = build_scheduler(name.lower(), optimizer, params)
    assert type(schedule) is getattr(torch.optim.lr_scheduler, name)
    for k in range(11 if factor else 0):
        assert rates(optimizer) == pytest.approx([factor(k) * lr for lr in OWN_LRS], rel=1e-9, abs=1e-15)
        schedule.step()


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("WarmupLr2", {}, r"'WarmupLr2' is not one of LRRangeTest, .*StepLR.*lr_scheduler to initialize\. Did you mean 'WarmupLR'"),
    ("SequentialLR", {}, r"made of other schedules; pass it to initialize as lr_scheduler=lambda"),
    ("LRScheduler", {}, r"is not one of"),
    ("WarmupLR", {"warmup_steps": 5}, r"params of WarmupLR: there is no 'warmup_steps'; it takes warmup_min.*Did you mean 'w"),
    ("WarmupDecayLR", {}, r"total_num_steps must be given; it takes total_num_steps, warmup_min_lr"),
    ("OneCycle", {"cycle_min_lr": 0.1}, r"cycle_max_lr must be given"),
    ("WarmupLR", {"warmup_num_steps": -1}, r"warmup_num_steps is -1; give a number of at least 0"),
    ("WarmupLR", {"warmup_num_steps": 2.5}, r"warmup_num_steps is 2.5; give a whole number"),
    ("WarmupLR", {"warmup_type": "Linear"}, r"warmup_type is 'Linear'; give 'log' or 'linear'. Did you mean 'linear'"),
    ("WarmupLR", {"warmup_type": 3}, r"warmup_type is 3; give 'log' or 'linear'"),
    ("WarmupLR", {"warmup_max_lr": "1e-3"}, r"warmup_max_lr is '1e-3'; give a number.*is the text '1e-3', write .* 0.001"),
    ("WarmupLR", {"warmup_max_lr": [0.1]}, r"warmup_max_lr has 1 values for 2 parameter groups; give 2, or one number"),
    ("LRRangeTest", {"lr_range_test_step_size": 0}, r"lr_range_test_step_size is 0; give a number of at least 1"),
    ("OneCycle", {**CYCLE, "cycle_first_step_size": 0}, r"cycle_first_step_size is 0; give a number above 0"),
    ("OneCycle", {**CYCLE, "decay_lr_rate": math.nan}, r"decay_lr_rate is nan; give a number"),
    ("StepLR", {"step": 3}, r"there is no 'step'; it takes step_size, gamma, last_epoch. Did you mean 'step_size'"),
    ("CyclicLR", {"base_lr": 0.1, "max_lr": 0.2, "mode": "saw"}, r"scheduler.params of CyclicLR don't fit it: mode is invalid"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "params", "message"), WRONG, ids=lambda v: str(v)[:40])
def test_wrong_schedules_are_refused_with_what_is_right(name: str, params: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        build_scheduler(name, make_optimizer(), params)
