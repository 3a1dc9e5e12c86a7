"""Reading a mapping against the schema: every problem is found, every key that is left out is noted."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from parallel3d.config.auto import AUTO, autos
from parallel3d.config.schema import Config
from parallel3d.config.section import KnownKey, Section, Support, section_of
from parallel3d.config.zero import STAGE_3_AS_2
from parallel3d.errors import nearest


@dataclass
class Review:
    """Findings while a mapping was read.

    ignored: path -> the key that was left out and its value, in the mapping's order; silent: the paths of those that ask for
    what is done anyway; kept: the paths of fields that were given; unset: those whose "auto" means not given.
    """

    problems: list[str] = field(default_factory=list)
    ignored: dict[str, tuple[KnownKey, Any]] = field(default_factory=dict)
    silent: list[str] = field(default_factory=list)
    kept: set[str] = field(default_factory=set)
    unset: list[str] = field(default_factory=list)

    def read(self, given: Mapping[str, Any]) -> Config | None:
        """The Config of `given`, or None if there is any problem."""
        supported = self._supported(given, Config)
        try:
            config = Config.model_validate(supported)
        except ValidationError as error:
            self.problems.extend(dict.fromkeys(map(_explain_value, error.errors())))
        return None if self.problems else config

    def _supported(self, given: Mapping[str, Any], section: type[Section], path: str = "") -> dict[str, Any]:
        """`given` without the keys that are unset, ignored or refused; these are noted with their path."""
        kept: dict[str, Any] = {}
        for key, value in given.items():
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
        inner = section_of(section.model_fields[key].annotation)
        if inner is not None and isinstance(value, Mapping):
            kept[key] = self._supported(value, inner, f"{where}.")
            return
        open_autos = [path for path, _ in autos(value, where)]
        if value == AUTO and key in section.auto_is_a_value:
            open_autos = []
        if open_autos and key not in section.unset_by_auto:
            self.problems.extend(_explain_auto(path, section.model_fields[key], where) for path in open_autos)
        elif open_autos:
            self.unset.append(where)
        else:
            kept[key] = value
            self.kept |= {where, *(f"{where}.{inner}" for inner in value)} if isinstance(value, Mapping) else {where}

    def _note(self, where: str, key: KnownKey, value: Any) -> None:
        if isinstance(value, Mapping) and key.keys:
            unknown = [name for name in value if name not in key.keys]
            for name in unknown:
                hint = nearest(str(name), key.keys) or f" Known here: {', '.join(key.keys)}."
                self.problems.append(f"unknown key '{where}.{name}'.{hint}")
        if key.support is Support.REMOVED:
            self.problems.append(f"{where} was removed: {key.reason}; remove the key")
        elif key.asks_nothing(value):
            self.silent.append(where)
        elif key.support is Support.REFUSED:
            self.problems.append(_explain_refused(where, value, key))
        else:
            self.ignored[where] = (key, value)


def warnings_of(config: Config, review: Review) -> list[str]:
    """Return warnings about keys that were left out: one line for all without effect, one for each other key."""
    lines = [f"{path}: {key.reason}" for path, (key, _) in review.ignored.items() if key.support is Support.LATER]
    stage = config.zero_optimization.stage
    if stage != config.zero_optimization.effective_stage:
        lines.insert(0, f"zero_optimization.stage {stage}: {STAGE_3_AS_2}")
    lines = [f"not yet supported: {line}" for line in lines]
    idle = [path for path, (key, _) in review.ignored.items() if key.support is Support.WITHOUT_EFFECT]
    return [*lines, *([f"without effect here: {', '.join(idle)}"] if idle else [])]


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


def _explain_auto(auto: str, field_info: FieldInfo, path: str) -> str:
    name = auto.rpartition(".")[2]
    if auto != path:
        what, default = _WHAT_TO_GIVE.get(name, "its value"), ", or leave the key out for the default"
    else:
        what = field_info.description or "its value"
        default = (
            ""
            if field_info.is_required()
            else f", or leave the key out for the default, {json.dumps(field_info.default)}"
        )
    # An element of a list has no key of its own.
    place = "there" if auto.endswith("]") else f'there or as auto={{"{auto}": ...}}'
    return f'{auto} is "auto", which nothing fills in: give {what}, {place}{default}'


def _explain_refused(path: str, value: object, key: KnownKey) -> str:
    remedies = ["remove it"]
    name = key.switch[0]
    if isinstance(value, Mapping) and name in value:
        remedies.append(f"set {path}.{name} to {json.dumps(key.switch[1][0])}")
    remedies.extend(f"set it to {json.dumps(same)}" for same in key.same)
    return (
        f"{path} is not yet supported ({key.reason}), and without it the results would differ: {' or '.join(remedies)}"
    )


def _explain_unknown(key: str, section: type[Section], path: str) -> str:
    vocabulary = [*section.model_fields, *sorted({*section.known_keys, *section.renamed})]
    hint = _home(key, section) or nearest(str(key), vocabulary)
    return f"unknown key {path!r}." + (hint or f" Known here: {', '.join(section.model_fields)}.")


def _home(key: str, section: type[Section]) -> str:
    """A hint at the section that has this key, or an empty string."""
    if section is not Config and key in {*Config.model_fields, *Config.known_keys}:
        return " It belongs at the top level."
    for name, field_info in Config.model_fields.items():
        inner = section_of(field_info.annotation)
        if inner is not None and key in {*inner.model_fields, *inner.known_keys}:
            return f" Did you mean '{name}.{key}'?"
    return ""


def _explain_value(error: ErrorDetails) -> str:
    names, field_info = _field_at(error["loc"])
    path = ".".join(names)
    cause = error.get("ctx", {}).get("error")
    if field_info is None or (cause is not None and section_of(field_info.annotation)):
        return f"{path}: {cause}" if path else str(cause)
    shown = "missing" if error["type"] == "missing" else reprlib.repr(error["input"])
    if cause is None:
        return f"{path} is {shown}: give {field_info.description}"
    return f"{path} is {shown}: {cause}"


def _field_at(loc: tuple[int | str, ...]) -> tuple[list[str], FieldInfo | None]:
    """The names of the fields that lead to an error, and the last of them; pydantic's own steps are left out."""
    section: type[Section] | None = Config
    names: list[str] = []
    found: FieldInfo | None = None
    for name in map(str, loc):
        if section is None or name not in section.model_fields:
            break
        names.append(name)
        found = section.model_fields[name]
        section = section_of(found.annotation)
    return names, found
