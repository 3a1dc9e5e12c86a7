"""Choice of a model's layers by class name, regular expression or function."""

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
            f"{key} names {unknown[0]!r}, which no layer has;{nearest(unknown[0], names)} the layers are "
            + ", ".join(dict.fromkeys(names))
        )
    return lambda k, layer: names[k] in chosen


# Policy of all layers, or by their class names.
Policies = RecomputationPolicy | Mapping[str, RecomputationPolicy]
PolicyRule = Callable[[int, Any], RecomputationPolicy]


def policy_rule(choice: LayerChoice | None, policies: Policies, names: Sequence[str]) -> PolicyRule:
    """Return a function (layer index, layer) -> its policy of recomputation, "none" for layers that aren't chosen.

    choice: which layers are recomputed. policies: of these; those without an entry have that of "default", or else "none".
    names: the names of all layers. Raises ConfigError as choice_rule does.
    """
    chosen = choice_rule(choice, names, "checkpointable_layers")
    if isinstance(policies, str):
        return lambda k, layer: policies if chosen(k, layer) else "none"
    choice_rule([name for name in policies if name != "default"] or None, names, "activation_checkpointing.policy")
    default = policies.get("default", "none")
    return lambda k, layer: policies.get(names[k], default) if chosen(k, layer) else "none"
