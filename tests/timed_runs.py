"""Runs on a clock that only the layers and the messages move: every time is known exactly."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from layouts import make_engine, own_iterator
from reference import Item
from torch import Tensor, nn

from parallel3d import DeepSpeedEngine as Engine
from parallel3d.comm.collectives import Group, Work, all_gather_object, all_reduce
from parallel3d.comm.transport import Incoming, Transport

HIDDEN, MICRO_BATCHES = 4, 6
LATENCY = 0.25  # of a message


class VirtualClock:
    """Each process's own; messages carry the sender's."""

    def __init__(self) -> None:
        self.now, self.reads = 0.0, 0

    def mark(self) -> float:
        return self.now

    def read(self, marks: Sequence[float]) -> list[float]:
        self.reads += 1
        return list(marks)


CLOCK = VirtualClock()


class Timed(nn.Linear):
    """A forward takes `cost` seconds, a backward twice that."""

    def __init__(self, cost: float):
        super().__init__(HIDDEN, HIDDEN)
        self.cost = cost

    def forward(self, x: Tensor) -> Tensor:
        CLOCK.now += self.cost
        return _Timed.apply(super().forward(x), 2 * self.cost)


class _Timed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cost: float) -> Tensor:
        ctx.cost = cost
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        CLOCK.now += ctx.cost
        return gradient, None


class _Arrival:
    """The last tensor of a message, with when it was sent."""

    def __init__(self, last: Incoming, stamp: Incoming):
        self.last, self.stamp = last, stamp

    def wait(self) -> Tensor:
        tensor = self.last.wait()
        CLOCK.now = max(CLOCK.now, float(self.stamp.wait().numpy()[0]) + LATENCY)
        return tensor

    def is_completed(self) -> bool:
        return self.last.is_completed() and self.stamp.is_completed()


class TimedTransport(Transport):
    def send(self, tensors: Sequence[Tensor], stage: int) -> None:
        super().send([*tensors, torch.tensor([CLOCK.now], dtype=torch.float64)], stage)

    def receive(self, buffers: Sequence[Tensor], stage: int) -> Sequence[Incoming]:
        *others, last, stamped = super().receive([*buffers, torch.empty(1, dtype=torch.float64)], stage)
        return [*others, _Arrival(last, stamped)]


def timed_all_reduce(tensor: Tensor, group: Group) -> Work:
    """The engine's: of the loss and the norm. Everybody leaves it when the last one has come, a second later."""
    CLOCK.now = max(all_gather_object(CLOCK.now, group)) + 1.0
    return all_reduce(tensor, group)


def squares(output: Tensor, labels: Tensor) -> Tensor:
    return (output - labels).square().mean()


def timed_engine(stack: ExitStack, costs: Sequence[float], schedule: str, **config: Any) -> Engine:
    """One layer a stage, with these costs."""
    global CLOCK
    CLOCK = VirtualClock()
    stack.enter_context(mock.patch("parallel3d.engine.step.Transport", TimedTransport))
    stack.enter_context(mock.patch("parallel3d.engine.update.all_reduce", timed_all_reduce))
    stack.enter_context(mock.patch("parallel3d.monitor.steps.clock_of", return_value=CLOCK))
    pipeline = {"stages": len(costs), "schedule": schedule, "partition": "uniform"}
    items = [Item(Timed, (cost,)) for cost in costs]
    return make_engine(items, squares, accumulation=MICRO_BATCHES, pipeline=pipeline, **config)


def train(engine: Engine, steps: int) -> None:
    dp = engine.grid.get_data_parallel_world_size()
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(2, 2, HIDDEN, generator=generator).unbind() for _ in range(steps * MICRO_BATCHES * dp)]
    iterator = own_iterator(engine, batches)
    for _ in range(steps):
        engine.train_batch(iterator)
