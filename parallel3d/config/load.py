"""Read a file, a mapping or a base64 text into a Config: one error lists all problems, and warnings name keys left out."""

from __future__ import annotations

import json
import os
import reprlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from parallel3d.config.files import MOST_LISTED, bounded, decode, read_mapping
from parallel3d.config.schema import Config
from parallel3d.config.section import KnownKey, Section, Support, section_of, shown_default, what_to_give
from parallel3d.errors import ConfigError, nearest

Source = str | Path | Mapping[str, Any] | Config | None
AUTO = "auto"
GIVEN = "given"
_RATE, _WARMUP = "optimizer.params.lr", "scheduler.params.warmup_max_lr"


def load(source: Source, auto: Mapping[str, Any] | None = None, known: Mapping[str, Any] | None = None) -> Config:
    """Return the Config that a file (JSON with comments, Hjson, YAML), a mapping, or the base64 of a JSON text describes.

    - source: None for all defaults; a Config is returned as it is.
    - auto: values for keys that are "auto", nested or with dotted keys ("optimizer.params.lr"); each must be for a
      key whose value is "auto".
    - known: further values by dotted key, for those that are still "auto". scheduler.params.warmup_max_lr falls back to the
      optimizer's lr.

    Raises ConfigError that lists all problems. Warns about the known keys that are left out, or raises if `strict`.
    """
    if isinstance(source, Config):
        if auto:
            raise ConfigError(f'auto gives {", ".join(auto)}, but a Config has no "auto" left; drop one of the two')
        return source
    reading = read(source, auto, known)
    if reading.config.strict and reading.warnings:
        raise ConfigError(f"{reading.name}: strict is true, and {'; '.join(reading.warnings)}")
    for line in reading.warnings:
        warnings.warn(f"{reading.name}: {line}", stacklevel=2)
    return reading.config


def load_sections(source: Source, *sections: str) -> Config:
    """Return a Config of only these sections, or of all if none is named. Values "auto" of other sections may stay open."""
    return source if isinstance(source, Config) else read(source, sections=sections).config


def read(
    source: str | Path | Mapping[str, Any] | None, auto: Any = None, known: Any = None, sections: Sequence[str] = ()
) -> Reading:
    """Read a configuration as `load` does, without warnings; the result records where its values come from.

    - sections: the only ones to read; all if none is named.
    """
    name, given = read_source(source)
    given = _nested(given)
    if not isinstance(auto or {}, Mapping):
        raise ConfigError(
            f'auto is {auto!r}; give a mapping of the keys that are "auto" to values, such as {{"optimizer.params.lr": 1e-4}}'
        )
    bounded(auto or {}, "auto")
    read_keys = set(sections or given) - {"$schema"}  # which is for editors
    reading = Reading(name, {key: value for key, value in given.items() if key in read_keys})
    reading.check(_fill(reading, auto or {}, known or {}))
    return reading


def read_source(source: object) -> tuple[str, Mapping[str, Any]]:
    """Return (name for messages, mapping) of a path, a base64 text, a mapping or None. Raises ConfigError for others."""
    if source is None or isinstance(source, Mapping):
        return "configuration", bounded(source or {}, "configuration")
    if isinstance(source, str) and (mapping := decode(source)) is not None:
        return "configuration in base64", mapping
    if isinstance(source, (str, os.PathLike)):
        return str(source), read_mapping(Path(source))
    raise ConfigError(f"a configuration is a path or a mapping, not {type(source).__name__}; give one of the two")


def _nested(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the mapping with keys such as "zero_optimization.reduce_bucket_size" in their sections, as TRL writes them.

    A value that the section itself gives is kept. Sizes in dotted keys, which may be fractions, are rounded down.
    """
    nested = dict(given)
    for path in [key for key in given if isinstance(key, str) and key.partition(".")[2]]:
        name, _, key = path.partition(".")
        section = nested.get(name, {})
        if name in Config.model_fields and isinstance(section, Mapping):
            value = nested.pop(path)
            whole = int(value) if isinstance(value, float) and value > 1 else value
            nested[name] = {key: whole, **section}
    return nested


def without_removed(given: Mapping[str, Any], section: type[Section] = Config) -> dict[str, Any]:
    """Return a configuration that an earlier version wrote, without the keys that were removed since."""
    kept: dict[str, Any] = {}
    for name, value in given.items():
        key, field = section.known_keys.get(name), section.model_fields.get(name)
        inner = section_of(field.annotation) if field is not None else None
        if key is None or key.support is not Support.REMOVED:
            kept[name] = without_removed(value, inner) if inner is not None and isinstance(value, Mapping) else value
    return kept


@dataclass
class Reading:
    """Result of reading a configuration: its values, where they come from, and what was left out.

    - name: for messages; given: the mapping as given; config: set by `check`.
    - origins: path -> GIVEN, or where a value of "auto" comes from; the values of other paths are defaults.
    - left_out: path -> the known key that was left out and its value, in the mapping's order.
    """

    name: str
    given: Mapping[str, Any]
    config: Config = field(default_factory=Config)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    left_out: dict[str, tuple[KnownKey, Any]] = field(default_factory=dict)

    @property
    def warnings(self) -> list[str]:
        """Warnings about keys that ask for something and were left out: one for all without effect, one for each other."""
        asked = {path: key for path, (key, value) in self.left_out.items() if not key.asks_nothing(value)}
        lines = [f"{path}: {key.reason}" for path, key in asked.items() if key.support is Support.LATER]
        idle = [path for path, key in asked.items() if key.support is Support.WITHOUT_EFFECT]
        warned = [f"not yet supported: {line}" for line in lines]
        return [*warned, f"without effect here: {', '.join(idle)}"] if idle else warned

    def check(self, filled: Mapping[str, Any]) -> None:
        """Set `config` to what the filled mapping describes. Raises ConfigError that lists all problems."""
        supported = self._supported(filled, Config)
        try:
            self.config = Config.model_validate(supported)
        except ValidationError as error:
            self.problems.extend(dict.fromkeys(_explain_value(e, supported) for e in error.errors()[:MOST_LISTED]))
        zero = self.config.zero_optimization
        if zero.stage < 3 and zero.offload_param.device not in ("none", None):
            why = f"it needs stage 3, but the stage is {zero.stage}: each rank holds the weights of its pipeline stage"
            device = zero.offload_param.device
            self.left_out["zero_optimization.offload_param"] = KnownKey(Support.LATER, why), device
        if self.problems:
            count = f"{len(self.problems)} problems" + " or more" * (len(self.problems) >= MOST_LISTED)
            lines = self.problems if len(self.problems) == 1 else [count, *self.problems]
            raise ConfigError(f"{self.name}: " + "\n  - ".join(lines))

    def _supported(self, given: Mapping[str, Any], section: type[Section], path: str = "") -> dict[str, Any]:
        """Return `given` without the keys that are ignored or refused, which are noted, and those unset by "auto"."""
        kept: dict[str, Any] = {}
        for key, value in given.items():
            if len(self.problems) >= MOST_LISTED:
                break
            name = section.renamed.get(key, key)
            if name != key and name in given:
                self.problems.append(
                    f"{path}{key} is the old name of {path}{name}, and both are given; keep {path}{name}"
                )
            elif name in section.model_fields:
                self._keep(name, value, section, f"{path}{name}", kept)
            elif name in section.known_keys:
                self._note(f"{path}{key}", section.known_keys[name], value)
            else:
                self.problems.append(_explain_unknown(key, section, f"{path}{key}"))
        return kept

    def _keep(self, key: str, value: Any, section: type[Section], where: str, kept: dict[str, Any]) -> None:
        annotation = section.model_fields[key].annotation
        inner = section_of(annotation)
        if inner is not None and isinstance(value, Mapping):
            kept[key] = self._supported(value, inner, f"{where}.")
            return
        open_autos = [] if AUTO in _words(annotation) else list(autos(value, where))
        if open_autos and key not in section.unset_by_auto:
            self.problems.extend(_explain_auto(path, section.model_fields[key], where) for path in open_autos)
        elif not open_autos:
            kept[key] = value
            paths = [where, *(f"{where}.{name}" for name in value)] if isinstance(value, Mapping) else [where]
            self.origins = dict.fromkeys(paths, GIVEN) | self.origins

    def _note(self, where: str, key: KnownKey, value: Any) -> None:
        if isinstance(value, Mapping) and key.inner:
            unknown = [name for name in value if name not in key.inner]
            for name in unknown:
                hint = nearest(str(name), key.inner) or f" Known here: {', '.join(key.inner)}."
                self.problems.append(f"unknown key '{where}.{name}'.{hint}")
        if key.support is Support.REMOVED:
            self.problems.append(f"{where} was removed: {key.reason}; remove the key")
        elif key.support is Support.REFUSED and not key.asks_nothing(value):
            self.problems.append(_explain_refused(where, value, key))
        else:
            self.left_out[where] = key, value


def autos(value: object, path: str) -> Iterator[str]:
    """Yield the path of each "auto" inside a value."""
    if value == AUTO:
        yield path
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


_WHAT_TO_GIVE = {
    "lr": "a learning rate, such as 1e-4",
    "betas": "two numbers, such as [0.9, 0.999]",
    "eps": "a small number, such as 1e-8",
    "weight_decay": "a number >= 0, such as 0.01",
    "warmup_min_lr": "the first learning rate, such as 0",
    "warmup_max_lr": "the learning rate after the warm-up, such as the optimizer's",
    "warmup_num_steps": "a whole number of steps",
    "total_num_steps": "the whole number of steps of the training",
}
_REQUIRED = ("total_num_steps", "cycle_min_lr", "cycle_max_lr")  # of a schedule's params


def _explain_auto(auto: str, field: FieldInfo, path: str) -> str:
    """Explain an "auto" that nothing fills in. path: of the field that contains it."""
    what, default = _WHAT_TO_GIVE.get(auto.rpartition(".")[2], "its value"), "the default"
    if auto == path:
        what, default = what_to_give(field), f"the default, {shown_default(field)}"
    # An element of a list has no key of its own.
    place = "there" if auto.endswith("]") else f'there or as auto={{"{auto}": ...}}'
    is_required = field.is_required() if auto == path else auto.rpartition(".")[2] in _REQUIRED
    leave = "" if is_required else f", or leave the key out for {default}"
    return f'{auto} is "auto", which nothing fills in: give {what}, {place}{leave}'


def _explain_refused(path: str, value: object, key: KnownKey) -> str:
    remedies = ["remove it"]
    name = key.switch
    if isinstance(value, Mapping) and name in value:
        remedies.append(f"set {path}.{name} to {json.dumps(key.off_values[0])}")
    remedies.extend(f"set it to {json.dumps(same)}" for same in key.same)
    return (
        f"{path} is not yet supported ({key.reason}), and without it the results would differ: {' or '.join(remedies)}"
    )


def _explain_unknown(key: str, section: type[Section], path: str) -> str:
    vocabulary = [*section.model_fields, *sorted({*section.known_keys, *section.renamed})]
    hint = _home(key, section) or nearest(str(key), vocabulary)
    return f"unknown key {path!r}." + (hint or f" Known here: {', '.join(section.model_fields)}.")


def _home(key: str, section: type[Section]) -> str:
    """Return a hint at the section that has this key, or an empty text."""
    if section is not Config and key in {*Config.model_fields, *Config.known_keys}:
        return " It belongs at the top level."
    for name, info in Config.model_fields.items():
        inner = section_of(info.annotation)
        if inner is not None and key in {*inner.model_fields, *inner.known_keys}:
            return f" Did you mean '{name}.{key}'?"
    return ""


def _explain_value(error: ErrorDetails, values: Mapping[str, Any]) -> str:
    """Explain an error of pydantic. values: those that were validated."""
    section: type[Section] | None = Config
    names: list[str] = []
    found: FieldInfo | None = None
    for name in map(str, error["loc"]):  # pydantic's own steps come after the last field
        if section is None or name not in section.model_fields:
            break
        names.append(name)
        found = section.model_fields[name]
        section = section_of(found.annotation)
    path, cause = ".".join(names), error.get("ctx", {}).get("error")
    if found is None or (cause is not None and section is not None):
        return f"{path}: {cause}" if path else str(cause)
    value = look_up(values, path)
    shown = "missing" if error["type"] == "missing" else reprlib.repr(value)
    if cause is not None:
        return f"{path} is {shown}: {cause}"
    hint = nearest(value.lower(), list(_words(found.annotation))) if isinstance(value, str) else ""
    return f"{path} is {shown}: give {what_to_give(found)}" + (f".{hint}" if hint else "")


def _words(annotation: object) -> Iterator[str]:
    """Yield the words of a closed vocabulary anywhere in a type."""
    if isinstance(annotation, str):
        yield annotation
    for inner in get_args(annotation):
        yield from _words(inner)
