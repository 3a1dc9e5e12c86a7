"""The layers of a rank's chunks as they are called: their order, which are recomputed, and their callables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from torch import nn

from parallel3d.schedule.instructions import Op


class Call(NamedTuple):
    """A layer as its chunk calls it: its index in the list, its module (None for a plain function), and the callable."""

    layer: int
    module: nn.Module | None
    function: Callable[[Any], Any]
    recomputed: bool


class LayerCalls:
    """The calls of each of a rank's chunks.

    interval: number of neighbouring layers that are recomputed together in a backward; 0 if none are.
    """

    def __init__(self, interval: int):
        self._interval = interval
        self._calls: dict[int, list[Call]] = {}

    def recompute_every(self, interval: int) -> None:
        """Recompute neighbouring layers in groups of `interval`."""
        self._interval = interval

    def recompute_nothing(self, module: nn.Module) -> bool:
        """Recompute no call of a module any more; return whether one was recomputed."""
        calls = [call for own in self._calls.values() for call in own if call.module is module]
        for chunk, own in self._calls.items():
            self._calls[chunk] = [call._replace(recomputed=False) if call.module is module else call for call in own]
        return self._interval > 0 and any(call.recomputed for call in calls)

    def add(self, chunk: int, calls: Sequence[Call]) -> None:
        """Add a chunk."""
        self._calls[chunk] = list(calls)

    def groups(self, chunk: int) -> list[tuple[list[Call], bool]]:
        """Return the calls of a chunk in groups, and whether each is recomputed in the backward."""
        calls = self._calls[chunk]
        if not self._interval:
            return [(calls, False)]
        groups = []
        for recomputed, neighbours in groupby(calls, key=lambda call: call.recomputed):
            run = list(neighbours)
            size = self._interval if recomputed else len(run)
            groups += [(run[start : start + size], recomputed) for start in range(0, len(run), size)]
        return groups

    def runs(self, chunk: int, op: Op) -> list[int]:
        """Return the layers (indices in the list) in the order in which a compute instruction on a chunk runs them.

        A backward runs a group of recomputed layers forward, and then their backwards, the first of which follows at once. A
        BACKWARD_WEIGHT runs no layer.
        """
        if op is Op.FORWARD:
            return [call.layer for call in self._calls[chunk]]
        order: list[int] = []
        for calls, recomputed in reversed(self.groups(chunk) if op is not Op.BACKWARD_WEIGHT else []):
            layers = [call.layer for call in calls]
            order += [*layers, *layers[-2::-1]] if recomputed else layers[::-1]
        return order

    def with_modules(self) -> Iterator[tuple[int, nn.Module]]:
        """Yield (index in the list, module) of each call of a layer that has a module."""
        for calls in self._calls.values():
            for call in calls:
                if call.module is not None:
                    yield call.layer, call.module

    def modules(self) -> list[tuple[int, nn.Module]]:
        """Return (index in the list, module) of the layers that are called as modules, each module once."""
        calls = (call for calls in self._calls.values() for call in calls)
        return list({id(c.module): (c.layer, c.module) for c in calls if c.module is c.function and c.module}.values())

    def watch(self, watch: Callable[[int, Callable[[Any], Any]], Callable[[Any], Any]]) -> None:
        """Replace each layer's callable by watch(index in the list, callable)."""
        for chunk, calls in self._calls.items():
            self._calls[chunk] = [call._replace(function=watch(call.layer, call.function)) for call in calls]
