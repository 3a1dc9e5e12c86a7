"""Values for "auto": what the caller gives, then what is known of the caller's objects."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from parallel3d.errors import nearest

AUTO = "auto"
_FROM_OPTIMIZER = {"scheduler.params.warmup_max_lr": "optimizer.params.lr"}


@dataclass
class Filling:
    """A configuration whose "auto"s are filled; origins: path -> where the value comes from."""

    values: dict[str, Any]
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def fill(given: Mapping[str, Any], auto: Mapping[str, Any], known: Mapping[str, Any]) -> Filling:
    """`given` with each "auto" replaced where there is a value for it; those without one stay.

    auto: nested, or with dotted keys ("optimizer.params.lr"); each must stand where "auto" stands, or is a problem.
    known: dotted keys; a value is taken where one is asked for. scheduler.params.warmup_max_lr falls back to the
    optimizer's lr.
    """
    filling = Filling({})
    wanted = _nested(auto)
    filling.values = _filled(given, wanted, known, "", filling.origins)
    for path, source in _FROM_OPTIMIZER.items():
        if look_up(filling.values, path) == AUTO and isinstance(rate := look_up(filling.values, source), (int, float)):
            section, params, key = path.split(".")
            filling.values[section][params][key] = rate
            filling.origins[path] = f"filled from {source}"
    open_autos = [path for path, _ in autos(given, "")]
    for path, value in _leaves(wanted, ""):
        filling.problems.append(_explain_unused(path, value, look_up(given, path), open_autos))
    return filling


def autos(value: object, path: str) -> Iterator[tuple[str, object]]:
    """(path, "auto") for each place in a value at which "auto" stands."""
    if value == AUTO:
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from autos(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from autos(inner, f"{path}[{index}]")


def look_up(given: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, or None."""
    value: Any = given
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _nested(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys become mappings in mappings."""
    tree: dict[str, Any] = {}
    for key, value in mapping.items():
        *outer, last = str(key).split(".")
        level = tree
        for name in outer:
            level = level.setdefault(name, {})
        if isinstance(value, Mapping) and isinstance(level.get(last, {}), dict):
            level[last] = {**level.get(last, {}), **_nested(value)}
        else:
            level[last] = value
    return tree


def _filled(
    given: Mapping[str, Any], wanted: dict[str, Any], known: Mapping[str, Any], path: str, origins: dict[str, str]
) -> dict[str, Any]:
    """`given` filled; what was used is taken out of `wanted`."""
    values: dict[str, Any] = {}
    for key, value in given.items():
        where = f"{path}{key}"
        values[key] = value
        if isinstance(value, Mapping):
            inner = wanted.get(key)
            values[key] = _filled(value, inner if isinstance(inner, dict) else {}, known, f"{where}.", origins)
        elif value == AUTO and key in wanted:
            values[key], origins[where] = wanted.pop(key), "filled by auto"
        elif value == AUTO and where in known:
            values[key], origins[where] = known[where], "filled from what initialize was given"
    return values


def _leaves(tree: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        where = f"{path}{key}"
        if isinstance(value, dict):
            yield from _leaves(value, f"{where}.")
        else:
            yield where, value


def _explain_unused(path: str, value: object, there: object, open_autos: list[str]) -> str:
    shown = reprlib.repr(value)
    if there is not None:
        return (
            f'auto gives {path} = {shown}, but the configuration has {reprlib.repr(there)} there, not "auto"; drop one of '
            "the two"
        )
    hint = nearest(path, open_autos) or (f' "auto" stands at: {", ".join(open_autos)}.' if open_autos else "")
    return (
        f'auto gives {path} = {shown}, but the configuration has no "auto" there; write "auto" there or drop it.{hint}'
    )
