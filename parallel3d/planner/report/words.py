"""Numbers, ranges of numbers, and colours of the report."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

_MEMORY_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))

# In a chart's order. Two neighbours differ in lightness too, for readers who see few colours and for grey print.
PART_COLOURS = {
    "weights": "#2f69b4",
    "gradients": "#6fb1c9",
    "masters": "#6b4ea3",
    "optimizer": "#b39ad9",
    "activations": "#b8671a",
    "workspace": "#e0b44c",
    "transient": "#8b5e4b",
    "messages": "#d98880",
    "update": "#2e8752",
    "forward": "#2f69b4",
    "backward": "#2e8752",
    "exposed communication": "#c8413b",
    "host": "#d4a017",
    "bubble": "#9aa5b1",
}
_FURTHER_COLOURS = ("#93c58f", "#5c6b7a", "#c77fb5", "#4d9a94", "#a8a03c", "#7f8fd0")


def colours_of(parts: Iterable[str]) -> dict[str, str]:
    """Return part -> colour in a chart's order: the parts known above, then others by name, whose colours repeat after six."""
    given = set(parts)
    further = sorted(given - PART_COLOURS.keys())
    known = {part: colour for part, colour in PART_COLOURS.items() if part in given}
    return known | {part: _FURTHER_COLOURS[k % len(_FURTHER_COLOURS)] for k, part in enumerate(further)}


def memory_unit(full: float) -> tuple[int, str]:
    """Return (bytes, name) of the largest unit of which `full` holds two or more, to label an axis with."""
    return next(((size, unit) for size, unit in _MEMORY_UNITS if full >= 2 * size), (1, "B"))


def memory(nbytes: float) -> str:
    """Format bytes: 1610612736 -> "1.50 GiB"."""
    size, unit = next(((size, unit) for size, unit in _MEMORY_UNITS if abs(nbytes) >= size), (1, "B"))
    return f"{_three_digits(nbytes / size)} {unit}"


def duration(seconds: float) -> str:
    """Format seconds: 0.0123 -> "12.3 ms"."""
    size, unit = next(((size, unit) for size, unit in _TIME_UNITS if abs(seconds) >= size), _TIME_UNITS[-1])
    return f"{_three_digits(seconds / size)} {unit}"


def _three_digits(value: float) -> str:
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}" if value else "0"


def percent(share: float) -> str:
    """Format a share: 0.4213 -> "42.1%"."""
    return f"{share:.1%}"


def count(number: float) -> str:
    """Format a number: 12345.6 -> "12,346"."""
    return f"{number:,.0f}"


def natural(name: str) -> tuple[tuple[str, int], ...]:
    """Return a key to sort names by that puts "host2" before "host10"."""
    return tuple((text, int(digits or -1)) for text, digits in re.findall(r"(\D*)(\d*)", name))


def by_stage(ranks: Iterable[tuple[int, int]], num_stages: int) -> list[str]:
    """Name each stage from pairs (stage, rank): "stage 3 · ranks 24–31", without ranks where none are given.

    The ranks of a stage follow each other.
    """
    names = [f"stage {stage}" for stage in range(num_stages)]
    held: dict[int, list[int]] = defaultdict(list)
    for stage, rank in ranks:
        held[stage].append(rank)
    for stage, own in held.items():
        names[stage] += f" · ranks {min(own)}–{max(own)}" if len(own) > 1 else f" · rank {own[0]}"
    return names
