"""Classes by the names and arguments of a configuration: what doesn't fit is named, with what would."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from parallel3d.errors import ConfigError, nearest

T = TypeVar("T")


def accepted(make: Callable[..., Any]) -> list[str]:
    """The names of the arguments of a class or function, without the first, which no configuration can give."""
    return list(inspect.signature(make).parameters)[1:]


def call(
    make: Callable[..., T],
    first: Any,
    params: Mapping[str, Any],
    where: str,
    more: Iterable[str] = (),
    remedies: Mapping[str, str] | None = None,
) -> T:
    """make(first, **params).

    where: what the params are, for errors. more: names that the caller took out of params, which were right too.
    remedies: what to do instead about a name that isn't. Raises ConfigError for names and values that don't fit.
    """
    known = [*accepted(make), *more]
    for key in params:
        if key not in known:
            remedy = (remedies or {}).get(key)
            hint = f": {remedy}" if remedy else f"; it takes {', '.join(known)}.{nearest(key, known)}"
            raise ConfigError(f"{where}: there is no {key!r}{hint}")
    parameters = list(inspect.signature(make).parameters.values())[1:]
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in params]
    if missing:
        raise ConfigError(f"{where}: {', '.join(missing)} must be given; it takes {', '.join(known)}")
    try:
        return make(first, **params)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"{where} don't fit it: {error}{_hint_of_texts(params)}") from error


def _hint_of_texts(params: Mapping[str, Any]) -> str:
    """YAML reads 1e-3, without a dot, as a text."""
    for key, value in params.items():
        if isinstance(value, str):
            try:
                number = float(value)
            except ValueError:
                continue
            return f"; {key} is the text {value!r}, write the number {number}"
    return ""
