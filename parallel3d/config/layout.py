"""A layout in words, "pp2,tp2,dp2,zero1,sp": how many processes work together, and how."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parallel3d.errors import ConfigError, nearest

# A word that ends in a number -> the field that it sets, and what it counts.
Numbered = Mapping[str, tuple[str, str]]
# A whole word -> the field, and its value.
Flags = Mapping[str, tuple[str, Any]]

AXES: Numbered = {
    "pp": ("stages", "pipeline stages"),
    "tp": ("slices", "tensor slices"),
    "dp": ("replicas", "data-parallel replicas"),
    "zero": ("zero", "the ZeRO stage"),
}
SHARING: Flags = {"sp": ("sequence_parallel", True)}
# Numbers that may be 0.
_FROM_ZERO = ("zero", "ckpt")


@dataclass(frozen=True)
class Layout:
    """A layout as its text gives it; zero: None if the text has none. sequence_parallel: with tensor parallelism."""

    stages: int = 1
    slices: int = 1
    replicas: int = 1
    zero: int | None = None
    sequence_parallel: bool = False

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.stages * self.slices * self.replicas


def parse_layout(text: str) -> Layout:
    """Read words separated by commas, in any order; an axis that isn't named has 1 rank. Raises as read_words does."""
    return Layout(**read_words(text, AXES, SHARING))


def read_words(text: str, numbered: Numbered, flags: Flags) -> dict[str, Any]:
    """The fields that a layout in these words sets.

    Raises ConfigError for a word that is unknown, sets a field a second time, or asks for 0 where that is nothing.
    """
    found: dict[str, Any] = {}
    for word in (part.strip() for part in text.split(",")):
        field, value = _read(word, text, numbered, flags)
        if field in found:
            raise ConfigError(f"layout {text!r}: {word!r} sets the {field} a second time; give one of them")
        found[field] = value
    return found


def _read(word: str, text: str, numbered: Numbered, flags: Flags) -> tuple[str, Any]:
    if word in flags:
        return flags[word]
    match = re.fullmatch(r"([a-z]+)([0-9]+)", word)
    if match is None or match[1] not in numbered:
        letters = word.rstrip("0123456789")
        near = [*flags, *(name + word[len(letters) :] for name in numbered)]
        hint = nearest(word, near) if letters else ""
        known = [f"{name}N ({meaning})" for name, (_, meaning) in numbered.items()]
        known += ["sp (sequence parallelism)" if flag == "sp" else flag for flag in flags]
        raise ConfigError(
            f"layout {text!r}: unknown word {word!r}.{hint} Known are {', '.join(known)}; separate them by commas"
        )
    name, number = match[1], int(match[2])
    field, meaning = numbered[name]
    if number < 1 and name not in _FROM_ZERO:
        raise ConfigError(f"layout {text!r}: {word!r} asks for no {meaning}; give {name}1 or more, or leave it out")
    return field, number
