"""Reading of a file, a mapping or a base64 text to a Config: all problems in one error, what is left out in warnings."""

from __future__ import annotations

import reprlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from parallel3d.config.files import decode, read_mapping
from parallel3d.config.known_keys import Support
from parallel3d.config.review import AUTO, Reading, autos, look_up
from parallel3d.config.schema import Config
from parallel3d.config.section import Section, section_of
from parallel3d.errors import ConfigError, nearest

Source = str | Path | Mapping[str, Any] | Config | None
_RATE, _WARMUP = "optimizer.params.lr", "scheduler.params.warmup_max_lr"


def load(source: Source, auto: Mapping[str, Any] | None = None, known: Mapping[str, Any] | None = None) -> Config:
    """Return the Config that a file (JSON with comments, Hjson, YAML), a mapping, or the base64 of a JSON text describes.

    - source: None for all defaults; a Config is returned as it is.
    - auto: values for keys that are "auto", nested or with dotted keys ("optimizer.params.lr"); each must stand where "auto"
      stands.
    - known: further values by dotted key, for those that are still "auto". scheduler.params.warmup_max_lr falls back to the
      optimizer's lr.

    Raises ConfigError that lists all problems. Warns of the known keys that are left out.
    """
    if isinstance(source, Config):
        if auto:
            raise ConfigError(f'auto gives {", ".join(auto)}, but a Config has no "auto" left; drop one of the two')
        return source
    reading = read(source, auto, known)
    for line in reading.warnings:
        warnings.warn(f"{reading.name}: {line}", stacklevel=2)
    return reading.config


def load_sections(source: Source, *sections: str) -> Config:
    """Return a Config of these sections alone, whatever the others are: their "auto"s may be filled later."""
    return source if isinstance(source, Config) else read(source, sections=sections).config


def read(
    source: str | Path | Mapping[str, Any] | None, auto: Any = None, known: Any = None, sections: Sequence[str] = ()
) -> Reading:
    """Read a configuration as `load` does, without warnings; the result tells how its values came about.

    - sections: the only ones to read; all if none is named.
    """
    name, given = read_source(source)
    if not isinstance(auto or {}, Mapping):
        raise ConfigError(
            f'auto is {auto!r}; give a mapping of the keys that are "auto" to values, such as {{"optimizer.params.lr": 1e-4}}'
        )
    reading = Reading(name, {key: value for key, value in given.items() if not sections or key in sections})
    reading.check(_fill(reading, auto or {}, known or {}))
    return reading


def read_source(source: object) -> tuple[str, Mapping[str, Any]]:
    """Return (name for messages, mapping) of a path, a base64 text, a mapping or None. Raises ConfigError for others."""
    if source is None or isinstance(source, Mapping):
        return "configuration", source or {}
    if isinstance(source, str) and (mapping := decode(source)) is not None:
        return "configuration in base64", mapping
    if isinstance(source, (str, Path)):
        return str(source), read_mapping(Path(source))
    raise ConfigError(f"a configuration is a path or a mapping, not {type(source).__name__}; give one of the two")


def without_removed(given: Mapping[str, Any], section: type[Section] = Config) -> dict[str, Any]:
    """Return a configuration that an earlier version wrote, without the keys that were removed since."""
    kept: dict[str, Any] = {}
    for name, value in given.items():
        key, field = section.known_keys.get(name), section.model_fields.get(name)
        inner = section_of(field.annotation) if field is not None else None
        if key is None or key.support is not Support.REMOVED:
            kept[name] = without_removed(value, inner) if inner is not None and isinstance(value, Mapping) else value
    return kept


def _fill(reading: Reading, auto: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given mapping with each "auto" replaced where there is a value for it; note origins and problems."""
    unused = dict(_leaves(auto, reading.given))

    def filled(given: Mapping[str, Any], path: str) -> dict[str, Any]:
        values = dict(given)
        for key, value in given.items():
            where = f"{path}{key}"
            if isinstance(value, Mapping):
                values[key] = filled(value, f"{where}.")
            elif value == AUTO and where in unused:
                values[key], reading.origins[where] = unused.pop(where), "filled by auto"
            elif value == AUTO and where in known:
                values[key], reading.origins[where] = known[where], "filled from what initialize was given"
        return values

    values = filled(reading.given, "")
    if look_up(values, _WARMUP) == AUTO and isinstance(rate := look_up(values, _RATE), (int, float)):
        values["scheduler"]["params"]["warmup_max_lr"], reading.origins[_WARMUP] = rate, f"filled from {_RATE}"
    open_autos = list(autos(reading.given, ""))
    for path, value in unused.items():
        reading.problems.append(_explain_unused(path, value, look_up(reading.given, path), open_autos))
    return values


def _leaves(auto: Mapping[str, Any], given: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of each value for an "auto", some of which may be mappings."""
    for key, value in auto.items():
        where = f"{path}{key}"
        if isinstance(value, Mapping) and look_up(given, where) != AUTO:
            yield from _leaves(value, given, f"{where}.")
        else:
            yield where, value


def _explain_unused(path: str, value: object, there: object, open_autos: list[str]) -> str:
    gives = f"auto gives {path} = {reprlib.repr(value)}, but the configuration has"
    if there is not None:
        return f'{gives} {reprlib.repr(there)} there, not "auto"; drop one of the two'
    hint = nearest(path, open_autos) or (f' "auto" stands at: {", ".join(open_autos)}.' if open_autos else "")
    return f'{gives} no "auto" there; write "auto" there or drop it.{hint}'
