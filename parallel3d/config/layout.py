"""A layout in words, "pp2,tp2,dp2,zero1,sp": how many processes work together, and how."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from parallel3d.errors import ConfigError, nearest

# Word: the field that its number sets, and what it counts.
_NUMBERED = {
    "pp": ("stages", "pipeline stages"),
    "tp": ("slices", "tensor slices"),
    "dp": ("replicas", "data-parallel replicas"),
    "zero": ("zero", "the ZeRO stage"),
}
_KNOWN = ", ".join(f"{word}N ({meaning})" for word, (_, meaning) in _NUMBERED.items()) + ", sp (sequence parallelism)"


@dataclass(frozen=True)
class Layout:
    """What words say; zero: None where they don't. sequence_parallel: shares sequences over the slices."""

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
    """Read words separated by commas, in any order; an axis that isn't named has 1 rank.

    Raises ConfigError for a word that is unknown, given twice, or asks for 0 ranks.
    """
    found: dict[str, Any] = {}
    for word in (part.strip() for part in text.split(",")):
        field, value = _read(word, text)
        if field in found:
            raise ConfigError(f"layout {text!r}: {word!r} sets the {field} a second time; give one of them")
        found[field] = value
    return Layout(**found)


def _read(word: str, text: str) -> tuple[str, Any]:
    if word == "sp":
        return "sequence_parallel", True
    match = re.fullmatch(r"([a-z]+)([0-9]+)", word)
    if match is None or match[1] not in _NUMBERED:
        letters = word.rstrip("0123456789")
        hint = nearest(word, [name + word[len(letters) :] for name in _NUMBERED]) if letters else ""
        raise ConfigError(f"layout {text!r}: unknown word {word!r}.{hint} Known are {_KNOWN}; separate them by commas")
    name, number = match[1], int(match[2])
    field, meaning = _NUMBERED[name]
    if number < 1 and name != "zero":
        raise ConfigError(f"layout {text!r}: {word!r} asks for no {meaning}; give {name}1 or more, or leave it out")
    return field, number
