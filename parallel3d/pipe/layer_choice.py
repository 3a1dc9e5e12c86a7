"""Choice of layers by class name, pattern, index or function: which are recomputed, and how; which are compiled."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from parallel3d.config import RecomputationPolicy
from parallel3d.errors import ConfigError, nearest

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
            raise ConfigError(f"{key} {choice!r} is no regular expression: {error}") from error
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
