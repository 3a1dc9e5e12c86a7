"""From a file or a dict to a Config: all problems of the source in one error, all ignored keys in one warning."""

from __future__ import annotations

import reprlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from parallel3d.config.files import read_mapping
from parallel3d.config.schema import Config, Section, section_of
from parallel3d.errors import ConfigError, nearest


def load(source: str | Path | Mapping[str, Any] | Config | None) -> Config:
    """The Config that a JSON or YAML file, or a mapping, describes; None is all defaults, a Config is itself.

    Raises ConfigError that lists all problems. Warns once of the known keys that have no effect.
    """
    if isinstance(source, Config):
        return source
    if isinstance(source, (str, Path)):
        name, given = str(source), read_mapping(Path(source))
    elif source is None or isinstance(source, Mapping):
        name, given = "configuration", source or {}
    else:
        raise ConfigError(f"a configuration is a path or a mapping, not {type(source).__name__}; give one of the two")
    review = _Review()
    config = review.validated(review.supported(given, Config))
    if config is None:
        lines = review.problems
        raise ConfigError(
            f"{name}: " + (lines[0] if len(lines) == 1 else "\n  - ".join([f"{len(lines)} problems", *lines]))
        )
    if review.ignored:
        warnings.warn(f"{name}: without effect here: {', '.join(review.ignored)}", stacklevel=2)
    return config


@dataclass
class _Review:
    """What came up while a source was read."""

    problems: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    def supported(self, given: Mapping[str, Any], section: type[Section], path: str = "") -> dict[str, Any]:
        """`given` without the keys that are unset, ignored or refused; the latter two are noted with their path."""
        kept = {}
        for key, value in given.items():
            where = f"{path}{key}"
            if key in section.model_fields:
                inner = section_of(section.model_fields[key].annotation)
                if inner is not None and isinstance(value, Mapping):
                    kept[key] = self.supported(value, inner, f"{where}.")
                elif autos := list(_autos(value, where)):
                    if key not in section.unset_by_auto:
                        self.problems.extend(_explain_auto(auto, section.model_fields[key], where) for auto in autos)
                else:
                    kept[key] = value
            elif key in section.without_effect:
                self.ignored.extend([] if _is_off(value) else [where])
            elif key in section.unsupported:
                same = section.unsupported[key]
                self.problems.extend(
                    [] if _is_off(value) or value in same else [_explain_unsupported(where, value, same)]
                )
            else:
                self.problems.append(_explain_unknown(key, section, where))
        return kept

    def validated(self, given: dict[str, Any]) -> Config | None:
        """The Config of `given`, or None if there is any problem."""
        try:
            config = Config.model_validate(given)
        except ValidationError as error:
            self.problems.extend(map(_explain_value, error.errors()))
        return None if self.problems else config


def _is_off(value: object) -> bool:
    """Whether a key asks for nothing: null, false, 0, an empty mapping, or a section with "enabled": false."""
    return not value or (isinstance(value, Mapping) and value.get("enabled") is False)


def _autos(value: object, path: str) -> Iterator[str]:
    """The paths in a field's value at which "auto" stands."""
    if value == "auto":
        yield path
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _autos(inner, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _autos(inner, f"{path}[{index}]")


def _explain_auto(auto: str, field_info: FieldInfo, path: str) -> str:
    if auto != path:
        return f'{auto} is "auto", which nothing fills in: give its value, or leave the key out for the default'
    default = "" if field_info.is_required() else f", or leave the key out for the default, {field_info.default!r}"
    return f'{auto} is "auto", which nothing fills in: give {field_info.description}{default}'


def _explain_unsupported(path: str, value: object, same: tuple[object, ...]) -> str:
    remedies = ["remove it"]
    if isinstance(value, Mapping) and "enabled" in value:
        remedies.append(f"set {path}.enabled to false")
    remedies.extend(f"set it to {value!r}" for value in same)
    return f"{path} is not yet supported, and without it the results would differ: {' or '.join(remedies)}"


def _explain_unknown(key: str, section: type[Section], path: str) -> str:
    hint = _home(key, section) or nearest(
        str(key), [*section.model_fields, *sorted(section.without_effect | set(section.unsupported))]
    )
    return f"unknown key {path!r}." + (hint or f" Known here: {', '.join(section.model_fields)}.")


def _home(key: str, section: type[Section]) -> str:
    """A hint at the section that has this key, or an empty string."""
    if section is not Config and key in Config.model_fields:
        return " It belongs at the top level."
    for name, field_info in Config.model_fields.items():
        inner = section_of(field_info.annotation)
        if inner is not None and key in inner.model_fields:
            return f" Did you mean '{name}.{key}'?"
    return ""


def _explain_value(error: ErrorDetails) -> str:
    path = ".".join(map(str, error["loc"]))
    shown = "missing" if error["type"] == "missing" else reprlib.repr(error["input"])
    cause = error.get("ctx", {}).get("error")
    if cause is None:
        return f"{path} is {shown}: give {_field_at(error['loc']).description}"
    return f"{path}: {cause}" if section_of(_field_at(error["loc"]).annotation) else f"{path} is {shown}: {cause}"


def _field_at(loc: tuple[int | str, ...]) -> FieldInfo:
    *outer, last = map(str, loc)
    section: type[Section] | None = Config
    for name in outer:
        assert section is not None
        section = section_of(section.model_fields[name].annotation)
    assert section is not None
    return section.model_fields[last]
