"""The layers of a rank's chunks as they are called: their order, their callables, and which are chosen to be recomputed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, Literal, NamedTuple, TypeVar

from torch import nn

from parallel3d.config import RecomputationPolicy
from parallel3d.errors import ConfigError, nearest
from parallel3d.schedule.instructions import Op

# Class names, a regular expression that is searched in them, or a function (index in the list, layer) -> bool.
LayerChoice = Sequence[str] | str | Callable[[int, Any], bool]


def choice_rule(choice: LayerChoice | None, names: Sequence[str], key: str) -> Callable[[int, Any], bool]:
    """Return a function (layer index, layer) -> whether the layer is chosen.

    - choice: None chooses all layers. names: the names of all layers. key: the setting's name in errors.

    Raises ConfigError for an invalid regular expression, and for an expression or class name that no layer has.
    """
    if choice is None:
        return lambda k, layer: True
    if callable(choice):
        return choice
    if isinstance(choice, str):
        try:
            regex = re.compile(choice)
        except re.error as error:
            raise ConfigError(f"{key} {choice!r} is not a regular expression: {error}") from error
        chosen = {name for name in names if regex.search(name)}
        unknown = [] if chosen else [choice]
    else:
        chosen = set(choice)
        unknown = [name for name in choice if name not in names]
    if unknown:
        raise ConfigError(
            f"{key} names {unknown[0]!r}, which no layer has.{nearest(unknown[0], names)} The layers are "
            + ", ".join(dict.fromkeys(names))
        )
    return lambda k, layer: names[k] in chosen


# Policy of all layers, or policies by class names and indices, and "default".
Policies = RecomputationPolicy | Mapping[str, RecomputationPolicy]
PolicyRule = Callable[[int, Any], RecomputationPolicy]


def policy_rule(choice: LayerChoice | None, policies: Policies, names: Sequence[str]) -> PolicyRule:
    """Return a function (layer index, layer) -> its policy of recomputation, "none" for layers that aren't chosen.

    - choice: which layers are recomputed. names: the names of all layers.
    - policies: of these layers. The policy of an index comes before that of a class name; layers without either have that of
      "default", or else "none".

    Raises ConfigError as choice_rule does, and for an index that no layer has.
    """
    chosen = choice_rule(choice, names, "checkpointable_layers")
    if isinstance(policies, str):
        return lambda k, layer: policies if chosen(k, layer) else "none"
    key = "activation_checkpointing.policy"
    indices = [name for name in policies if name.isdecimal()]
    if unknown := [k for k in indices if k not in map(str, range(len(names)))]:
        raise ConfigError(f"{key} names layer {unknown[0]}, but the layers have the numbers 0 to {len(names) - 1}")
    choice_rule([name for name in policies if name not in ("default", *indices)] or None, names, key)
    default = policies.get("default", "none")
    return lambda k, layer: policies.get(str(k), policies.get(names[k], default)) if chosen(k, layer) else "none"


T = TypeVar("T")
K = TypeVar("K")


class Call(NamedTuple):
    """A layer as its chunk calls it: its index in the list, its module (None for a plain function), and the callable.

    policy: which of its results are recomputed.
    """

    layer: int
    module: nn.Module | None
    function: Callable[[Any], Any]
    policy: RecomputationPolicy

    @property
    def recomputed(self) -> RecomputationPolicy | Literal[""]:
        """The policy; "" if nothing is recomputed."""
        return "" if self.policy == "none" else self.policy


class Run(NamedTuple):
    """Layers that run as one, by their indices in the list, and the policy of their recomputation."""

    layers: tuple[int, ...]
    policy: RecomputationPolicy


# Calls, and the policy by which they are recomputed together, if they are.
Group = tuple[list[Call], RecomputationPolicy | Literal["", False]]


def in_groups(
    layers: Sequence[T], interval: int, recomputed: Callable[[T], K]
) -> list[tuple[list[T], K | Literal[False]]]:
    """Split layers into groups of neighbours that are recomputed alike; return (layers, their recomputation) of each group.

    - interval: the most layers of a recomputed group; 0: no layer is recomputed.
    - recomputed: returns how a layer is recomputed, a false value if it isn't. Neighbours that aren't are one group.
    """
    groups = []
    for again, neighbours in groupby(layers, key=lambda layer: interval > 0 and recomputed(layer)):
        run = list(neighbours)
        size = interval if again else len(run)
        groups += [(run[start : start + size], again) for start in range(0, len(run), size)]
    return groups


def backward_order(groups: Sequence[tuple[list[T], object]]) -> list[T]:
    """Return the layers in the order in which a backward runs them, from groups in the order of the forward.

    A recomputed group runs forward again, then backward. Its last layer, whose backward follows at once, is listed once.
    """
    order: list[T] = []
    for layers, again in reversed(groups):
        order += [*layers, *layers[-2::-1]] if again else layers[::-1]
    return order


class LayerCalls:
    """The calls of each of a rank's chunks.

    interval: number of neighbouring layers that are recomputed together in a backward; 0 if none are.
    """

    def __init__(self, interval: int):
        self._interval = interval
        self._calls: dict[int, list[Call]] = {}
        self._in_graphs: set[nn.Module] = set()
        self._reached: Callable[[Run | None], None] | None = None

    def recompute(self, interval: int, policy_of: PolicyRule) -> None:
        """Recompute neighbouring layers in groups of `interval`, and give each recomputed layer the policy of `policy_of`."""
        self._interval = interval
        for chunk, own in self._calls.items():
            self._calls[chunk] = [
                call._replace(policy=policy_of(call.layer, call.function)) if call.recomputed else call for call in own
            ]

    def policy_of(self, module: nn.Module) -> RecomputationPolicy:
        """Return the policy of a module's calls."""
        calls = [call for own in self._calls.values() for call in own if call.module is module]
        return calls[0].policy if calls and self._interval > 0 else "none"

    def leave_to_graph(self, module: nn.Module) -> None:
        """Leave the recomputation of a module to its compiled graph."""
        self._in_graphs.add(module)

    def add(self, chunk: int, calls: Sequence[Call]) -> None:
        """Add a chunk."""
        self._calls[chunk] = list(calls)

    def groups(self, chunk: int) -> Iterable[Group]:
        """Return the calls of a chunk in groups, and the policy by which each is recomputed in the backward, if it is."""
        return self._groups(chunk) if self._reached is None else self._noted(self._groups(chunk), self._reached)

    def _groups(self, chunk: int) -> list[Group]:
        return in_groups(
            self._calls[chunk], self._interval, lambda call: "" if call.module in self._in_graphs else call.recomputed
        )

    @contextmanager
    def noting(self, reached: Callable[[Run | None], None]) -> Iterator[None]:
        """In this context, call `reached` with the layers that run next in a forward, and with None at its end."""
        self._reached = reached
        try:
            yield
        finally:
            self._reached = None

    def _noted(self, groups: Iterable[Group], reached: Callable[[Run | None], None]) -> Iterator[Group]:
        for calls, again in groups:
            for part in [calls] if again else [[call] for call in calls]:
                policy = part[0].policy if self._interval > 0 else "none"
                reached(Run(tuple(call.layer for call in part), policy))
                yield part, again
        reached(None)

    def runs(self, chunk: int, op: Op) -> list[int]:
        """Return the layers (indices in the list) in the order in which a compute instruction on a chunk runs them.

        A BACKWARD_WEIGHT runs no layer.
        """
        if op is Op.BACKWARD_WEIGHT:
            return []
        calls = self._calls[chunk] if op is Op.FORWARD else backward_order(self._groups(chunk))
        return [call.layer for call in calls]

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
