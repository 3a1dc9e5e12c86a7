"""Quantities with units, as a YAML gives them, and the base of what it describes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from parallel3d.errors import nearest

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30}
# A unit's last part, by what it makes of the number. Bits are written with a small b, as data sheets do.
_UNITS: Mapping[str, Mapping[str, float]] = {
    "bytes a second": {"": 1.0, "B/s": 1.0, "Bps": 1.0, "b/s": 0.125, "bps": 0.125, "bit/s": 0.125},
    "bytes": {"": 1.0, "B": 1.0},
    "FLOP/s": {"": 1.0, "FLOP/s": 1.0, "FLOPS": 1.0, "flops": 1.0, "flop/s": 1.0},
    "seconds": {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9},
}


def _quantity(text: str, unit: str) -> float | None:
    """Read '400 Gb/s' as 50e9 bytes a second; return None for what is no such quantity."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)(e[-+]?\d+)?\s*([^\d\s].*)?", text.strip(), re.IGNORECASE)
    if match is None:
        return None
    number, rest = float(match[1] + (match[2] or "")), match[3] or ""
    prefixes = {"": 1.0} if unit == "seconds" else _PREFIXES
    for word, factor in _UNITS[unit].items():
        if rest.endswith(word) and (prefix := rest.removesuffix(word).lower()) in prefixes:
            return number * factor * prefixes[prefix]
    return None


def _reads(unit: str, example: str, *, zero: bool = False) -> BeforeValidator:
    def read(value: object) -> float:
        number = _quantity(value, unit) if isinstance(value, str) else value
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise ValueError(f"{value!r} are no {unit}; give a number, or one with its unit such as {example}")
        if not (0 <= number < float("inf")) or (number == 0 and not zero):
            raise ValueError(f"{value!r} is not {'at least' if zero else 'above'} 0; give {unit}, such as {example}")
        return int(number) if unit == "bytes" else float(number)

    return BeforeValidator(read)


Bandwidth = Annotated[float, _reads("bytes a second", "48e9, '48 GB/s' or '400 Gb/s'")]
Seconds = Annotated[float, _reads("seconds", "2e-6 or '2 us'", zero=True)]
Flops = Annotated[float, _reads("FLOP/s", "989e12 or '989 TFLOP/s'")]
Bytes = Annotated[int, _reads("bytes", "80e9 or '80 GB'")]


class Described(BaseModel):
    """Part of a cluster's description. Unknown keys are refused with the nearest known one."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known_keys_only(cls, given: object) -> object:
        if isinstance(given, Mapping):
            unknown = [str(key) for key in given if key not in cls.model_fields]
            if unknown:
                keys = ", ".join(cls.model_fields)
                raise ValueError(
                    f"unknown key {unknown[0]!r}.{nearest(unknown[0], cls.model_fields)} Known here: {keys}"
                )
        return given

    @cached_property
    def given(self) -> dict[str, Any]:
        """The fields that are not None."""
        return {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}
