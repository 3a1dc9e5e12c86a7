"""Formats of bytes and seconds."""

from __future__ import annotations

from collections.abc import Sequence

MEMORY_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
_TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def unit_of(number: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """Return (size, name) of the largest unit of which the number holds one or more; else the smallest unit."""
    return next((unit for unit in units if abs(number) >= unit[0]), units[-1])


def memory(nbytes: float) -> str:
    """Format bytes: 1610612736 -> "1.50 GiB"."""
    return _in_unit(nbytes, MEMORY_UNITS)


def duration(seconds: float) -> str:
    """Format seconds: 0.0123 -> "12.3 ms"."""
    return _in_unit(seconds, _TIME_UNITS)


def _in_unit(number: float, units: Sequence[tuple[float, str]]) -> str:
    """Format a number to three digits, in the unit that suits it."""
    size, unit = unit_of(number, units)
    value = number / size
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f} {unit}" if round(value, digits) else f"0 {unit}"
