"""Learning-rate schedules of DeepSpeed, with its parameters, defaults and values; and torch's, by name.

They read and write the settings of the optimizer's parameter groups and never look at its parameters.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from parallel3d.errors import ConfigError, nearest
from parallel3d.optim.optimizers import call, classes_of

# One number for all parameter groups, or one for each.
PerGroup = float | Sequence[float]


class Schedule(ABC):
    """Learning rates by the number of steps done. `step()` follows each optimizer step.

    last_batch_iteration: index of the last batch for which `step` was called, -1 before the first; then the learning
    rates that the first batch trains with are set at once.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int = -1):
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        if last_batch_iteration == -1:
            self._apply()

    @abstractmethod
    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group after `last_batch_iteration`."""

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each parameter group that is in force."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go on by one batch, or to the one given, and set the learning rates of the groups."""
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = following if last_batch_iteration is None else last_batch_iteration
        self._apply()

    def state_dict(self) -> dict[str, int]:
        """Return the position; all else follows from the parameters."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to a position, and set the learning rates that were in force there."""
        self.last_batch_iteration = state["last_batch_iteration"]
        self._apply()

    def _apply(self) -> None:
        # A group that was added later keeps its own rate.
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=False):
            _set_lr(group, lr)


class LRRangeTest(Schedule):
    """lr = min_lr (1 + step_rate interval), where interval is steps / step_size, rounded down if staircase is set.

    This finds the largest rate that trains (arXiv:1803.09820). Raises ConfigError.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ):
        self.min_lrs = _per_group(optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = _whole("lr_range_test_step_size", lr_range_test_step_size, at_least=1)
        self.step_rate = _number("lr_range_test_step_rate", lr_range_test_step_rate)
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group after `last_batch_iteration`."""
        steps = self.last_batch_iteration + 1
        interval = steps // self.step_size if self.staircase else steps / self.step_size
        return [low * (1 + self.step_rate * interval) for low in self.min_lrs]


class OneCycle(Schedule):
    """One cycle of lr from cycle_min_lr up to cycle_max_lr and down again, then a decay (arXiv:1803.09820).

    Each half takes the steps of its step size (the second those of the first when None), in its number of stairs, or
    smoothly for 0 stairs. Then lr = cycle_min_lr / (1 + decay_lr_rate steps / decay_step_size), constant where one of
    them is 0.
    With cycle_momentum, betas[0] runs against lr between cycle_max_mom and cycle_min_mom, then decays as
    cycle_max_mom (1 + decay_mom_rate steps / decay_step_size); betas[1] is 0.99; and the first batch trains with
    cycle_min_mom, as in DeepSpeed. An optimizer without betas keeps its momentum, with a warning. Raises ConfigError.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ):
        self.min_lrs = _per_group(optimizer, "cycle_min_lr", cycle_min_lr)
        self.max_lrs = _per_group(optimizer, "cycle_max_lr", cycle_max_lr)
        self.min_moms = _per_group(optimizer, "cycle_min_mom", cycle_min_mom)
        self.max_moms = _per_group(optimizer, "cycle_max_mom", cycle_max_mom)
        second_size = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        second_stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.first_size = _number("cycle_first_step_size", cycle_first_step_size, above=0)
        self.second_size = _number("cycle_second_step_size", second_size, at_least=0)
        self.total_size = self.first_size + self.second_size
        self.step_ratio = self.first_size / self.total_size  # DeepSpeed's name
        self.first_stairs = _whole("cycle_first_stair_count", cycle_first_stair_count, at_least=0)
        self.second_stairs = _whole("cycle_second_stair_count", second_stairs, at_least=0)
        self.decay_step_size = _number("decay_step_size", decay_step_size, at_least=0)
        self.decay_lr_rate = _number("decay_lr_rate", decay_lr_rate)
        self.decay_mom_rate = _number("decay_mom_rate", decay_mom_rate)
        self.cycle_momentum = cycle_momentum and all("betas" in group for group in optimizer.param_groups)
        if cycle_momentum and not self.cycle_momentum:
            warnings.warn(
                f"OneCycle leaves the momentum of {type(optimizer).__name__} alone: it has no betas; set cycle_momentum to "
                "false",
                stacklevel=3,
            )
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group after `last_batch_iteration`."""
        height, decay = self._height, 1 + self.decay_lr_rate * self._decay_intervals
        return [(low + (high - low) * height) / decay for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of each parameter group after `last_batch_iteration`, None where momentum is not cycled.

        As in DeepSpeed, before the first step they start with cycle_max_mom, although the optimizer has cycle_min_mom.
        """
        if not self.cycle_momentum:
            return None
        height, growth = self._height, 1 + self.decay_mom_rate * self._decay_intervals
        pairs = zip(self.min_moms, self.max_moms, strict=True)
        return [((high - (high - low) * height) * growth, 0.99) for low, high in pairs]

    def _apply(self) -> None:
        super()._apply()
        moms = self.get_mom() or []
        if moms and self.last_batch_iteration < 0:
            moms = [(low, 0.99) for low in self.min_moms]
        for group, betas in zip(self.optimizer.param_groups, moms, strict=False):
            group["betas"] = betas

    @property
    def _decay_intervals(self) -> float:
        """Intervals of the decay so far; 0 during the cycle."""
        if self.last_batch_iteration < self.total_size or self.decay_step_size == 0:
            return 0.0
        return (self.last_batch_iteration - self.total_size + 1) / self.decay_step_size

    @property
    def _height(self) -> float:
        """Height in the cycle, from 0 to 1; 0 after it."""
        if self.last_batch_iteration >= self.total_size:
            return 0.0
        position = (self.last_batch_iteration + 1) % self.total_size
        rises = position <= self.first_size
        done = position if rises else self.total_size - position
        size, stairs = (self.first_size, self.first_stairs) if rises else (self.second_size, self.second_stairs)
        # Multiplied before it is divided, so that a whole number of stairs is not rounded down.
        return math.floor(done * stairs / size) / stairs if stairs else done / size


class WarmupLR(Schedule):
    """lr from warmup_min_lr to warmup_max_lr within warmup_num_steps steps, at least 2, then constant.

    warmup_type: "log" (log of the step) or "linear". warmup_max_lr: the groups' own rates when None. Raises ConfigError.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        highest = _own_lrs(optimizer) if warmup_max_lr is None else warmup_max_lr
        self.min_lrs = _per_group(optimizer, "warmup_min_lr", warmup_min_lr)
        self.max_lrs = _per_group(optimizer, "warmup_max_lr", highest)
        self._warmup = Warmup(warmup_num_steps, warmup_type)
        self.warmup_num_steps, self.warmup_type = self._warmup.num_steps, warmup_type
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group after `last_batch_iteration`."""
        step = self.last_batch_iteration
        part = self._warmup.part(step) if step < self._warmup.num_steps else self._part_after_warmup(step)
        return [low + (high - low) * part for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _part_after_warmup(self, step: int) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """WarmupLR, then linearly from warmup_max_lr to warmup_min_lr at total_num_steps steps. Raises ConfigError."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        self.total_num_steps = _whole("total_num_steps", total_num_steps, at_least=0)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        self._warmup.warn_of_no_time(self.total_num_steps)

    def _part_after_warmup(self, step: int) -> float:
        return max(0.0, (self.total_num_steps - step) / max(1, self.total_num_steps - self._warmup.num_steps))


class WarmupCosineLR(Schedule):
    """The groups' own rates times a ratio: from warmup_min_ratio up to 1, then by a cosine down to cos_min_ratio.

    warmup_num_steps is at least 2; warmup_type is "log" or "linear"; cos_min_ratio is reached one step before
    total_num_steps and kept. As in DeepSpeed the first batch trains with rate 0. Raises ConfigError.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        self.total_num_steps = _whole("total_num_steps", total_num_steps, at_least=0)
        self.warmup_min_ratio = _number("warmup_min_ratio", warmup_min_ratio)
        self.cos_min_ratio = _number("cos_min_ratio", cos_min_ratio)
        self._warmup = Warmup(warmup_num_steps, warmup_type)
        self.warmup_num_steps, self.warmup_type = self._warmup.num_steps, warmup_type
        self._warmup.warn_of_no_time(self.total_num_steps)
        self.original_lrs = _own_lrs(optimizer)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group after `last_batch_iteration`."""
        ratio = self.get_lr_ratio()
        return [lr * ratio for lr in self.original_lrs]

    def get_lr_ratio(self) -> float:
        """Return the factor of the groups' own rates after `last_batch_iteration`."""
        step, warmup_steps = self.last_batch_iteration, self._warmup.num_steps
        if step < 0:
            return 0.0
        if step < warmup_steps:
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * self._warmup.part(step)
        progress = min(1.0, (step - warmup_steps + 1) / max(1, self.total_num_steps - warmup_steps))
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2)


class Warmup:
    """Share of a warm-up that is done after a step. Raises ConfigError for an unknown kind."""

    def __init__(self, num_steps: int, kind: str):
        if kind not in ("log", "linear"):
            hint = nearest(kind, ("log", "linear")) if isinstance(kind, str) else ""
            raise ConfigError(f"warmup_type is {kind!r}; give 'log' or 'linear'.{hint}")
        # The logarithm of 1 step would be a division by 0.
        self.num_steps = max(2, _whole("warmup_num_steps", num_steps, at_least=0))
        self._kind = kind

    def part(self, step: int) -> float:
        """Return the share after a step below num_steps: 0 before the first step, then a number that grows to 1."""
        if step < 0:
            return 0.0
        return math.log(step + 1) / math.log(self.num_steps) if self._kind == "log" else step / self.num_steps

    def warn_of_no_time(self, total_num_steps: int) -> None:
        """Warn where the schedule ends before its warm-up."""
        if total_num_steps < self.num_steps:
            warnings.warn(
                f"scheduler: total_num_steps is {total_num_steps}, less than the {self.num_steps} steps of warm-up",
                stacklevel=4,
            )


_DEEPSPEED = {cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)}
_TORCH = classes_of(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)
_TORCH.pop("_LRScheduler", None)  # the base class's old name
_COMPOSITE = ("ChainedScheduler", "SequentialLR")
AnySchedule = Schedule | torch.optim.lr_scheduler.LRScheduler
_BY_LOWER_NAME: dict[str, Callable[..., AnySchedule]] = {
    name.lower(): cls for name, cls in [*_TORCH.items(), *_DEEPSPEED.items()]
}


def build_scheduler(name: str, optimizer: torch.optim.Optimizer, params: Mapping[str, Any]) -> AnySchedule:
    """Return the schedule that a configuration names, in any case, with its params.

    name: one of DeepSpeed's, or a class of torch.optim.lr_scheduler. Raises ConfigError for unknown names and params.
    """
    return call(scheduler_class(name), optimizer, params, f"scheduler.params of {name}")


def scheduler_class(name: str) -> Callable[..., AnySchedule]:
    """Return the class of the schedule that a configuration names. Raises ConfigError for an unknown name."""
    usable = [*_DEEPSPEED, *sorted(set(_TORCH) - set(_COMPOSITE))]
    if name.lower() in (composite.lower() for composite in _COMPOSITE):
        raise ConfigError(
            f"scheduler.type {name!r} is made of other schedules; pass it to initialize as "
            f"lr_scheduler=lambda optimizer: {name}(...)"
        )
    if name.lower() not in _BY_LOWER_NAME:
        raise ConfigError(
            f"scheduler.type {name!r} is not one of {', '.join(usable)}; give one of these, or pass your own as "
            f"lr_scheduler to initialize.{nearest(name, usable)}"
        )
    return _BY_LOWER_NAME[name.lower()]


def load_schedule(schedule: Any, state: Any, optimizer: torch.optim.Optimizer, sets_rates: bool) -> None:
    """Load a schedule's state. sets_rates: set its learning rates in the optimizer, whose own state is not loaded.

    torch's schedules leave these to the optimizer's state, and many compute the next ones from them.
    """
    schedule.load_state_dict(state)
    if sets_rates and hasattr(schedule, "get_last_lr"):
        for group, lr in zip(optimizer.param_groups, schedule.get_last_lr(), strict=False):
            _set_lr(group, lr)


def _set_lr(group: dict[str, Any], lr: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)  # a captured graph reads this very tensor
    else:
        group["lr"] = lr


def _own_lrs(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def _per_group(optimizer: torch.optim.Optimizer, name: str, value: PerGroup) -> list[float]:
    groups = len(optimizer.param_groups)
    if not isinstance(value, (list, tuple)):
        return [_number(name, value)] * groups
    if len(value) != groups:
        raise ConfigError(f"{name} has {len(value)} values for {groups} parameter groups; give {groups}, or one number")
    return [_number(name, each) for each in value]


def _number(name: str, value: Any, at_least: float | None = None, above: float | None = None) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{name} is {value!r}; give a number")
    if (at_least is not None and value < at_least) or (above is not None and value <= above):
        limit = f"of at least {at_least}" if at_least is not None else f"above {above}"
        raise ConfigError(f"{name} is {value!r}; give a number {limit}")
    return float(value)


def _whole(name: str, value: Any, at_least: int) -> int:
    number = _number(name, value, at_least)
    if not number.is_integer():
        raise ConfigError(f"{name} is {value!r}; give a whole number")
    return int(number)
