"""Which of a model's layers a setting is for."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from parallel3d.errors import ConfigError, nearest

# Class names, a regular expression that is searched in them, or a function of the layer's place in the list and the layer.
LayerChoice = Sequence[str] | str | Callable[[int, Any], bool]


def choice_rule(choice: LayerChoice | None, names: Sequence[str], key: str) -> Callable[[int, Any], bool]:
    """layer index, layer -> whether it is chosen. names: of all layers; choice None: all of them; key: what to call it.

    Raises ConfigError for what is no regular expression, and for one, or a class name, that no layer has.
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
