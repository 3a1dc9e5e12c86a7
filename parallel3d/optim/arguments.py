"""Call classes with the arguments of a configuration; errors name an argument that doesn't fit, and the remedy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, TypeVar

from parallel3d.errors import ConfigError, nearest

T = TypeVar("T")


def classes_of(module: ModuleType, base: type[T]) -> dict[str, type[T]]:
    """Return a module's subclasses of `base`, by name, without `base` itself."""
    classes = {name: cls for name, cls in vars(module).items() if inspect.isclass(cls)}
    return {name: cls for name, cls in classes.items() if issubclass(cls, base) and cls is not base}


def call(
    make: Callable[..., T],
    first: Any,
    params: Mapping[str, Any],
    where: str,
    more: Iterable[str] = (),
    remedies: Mapping[str, str] | None = None,
) -> T:
    """Return make(first, **params).

    - where: description of the params, for errors.
    - more: further valid names, which the caller took out of params.
    - remedies: remedy for each of some invalid names.

    Raises ConfigError for names and values that don't fit.
    """
    parameters = list(inspect.signature(make).parameters.values())[1:]
    known = [*(p.name for p in parameters), *more]
    for key in params:
        if key not in known:
            remedy = (remedies or {}).get(key)
            hint = f": {remedy}" if remedy else f"; it takes {', '.join(known)}.{nearest(key, known)}"
            raise ConfigError(f"{where}: there is no {key!r}{hint}")
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in params]
    if missing:
        raise ConfigError(f"{where}: {', '.join(missing)} must be given; it takes {', '.join(known)}")
    try:
        return make(first, **params)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"{where} don't fit it: {error}{_hint_of_texts(params)}") from error


def _hint_of_texts(params: Mapping[str, Any]) -> str:
    """Return a hint about a number that was read as a text, as YAML reads 1e-3 without a dot."""
    for key, value in params.items():
        if isinstance(value, str):
            try:
                number = float(value)
            except ValueError:
                continue
            return f"; {key} is the text {value!r}, write the number {number}"
    return ""
