"""Bytes of each stage's ranks against what their devices hold, and the seconds of a step by what takes them."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from parallel3d.planner.report import svg
from parallel3d.planner.report.words import colours_of, duration, memory, memory_unit, percent
from parallel3d.planner.search.result import Prediction, StageMemory

_LEFT, _RIGHT = 170, 150
_RESERVED = "reserved beyond (CUDA, NCCL, gaps)"
_RESERVED_COLOUR = "#aeb6bf"


def memory_chart(stages: Sequence[StageMemory], names: Sequence[str], label: str) -> str:
    """A bar for each stage, its parts stacked at the peak, then what is reserved beyond; a line at the device's capacity.

    names: of the stages' rows. Rows get thinner, and names fewer, where there are many.
    """
    row = max(6.0, min(26.0, 900 / len(stages)))
    every = ceil(13 / row)
    scale = _Scale(max(max(stage.capacity, stage.reserved) for stage in stages))
    bottom = 8 + row * len(stages)
    body = scale.grid(bottom)
    colours = colours_of(part for stage in stages for part, nbytes in stage.parts.items() if nbytes)
    for k, (stage, name) in enumerate(zip(stages, names, strict=True)):
        top = 8 + row * k
        body += _bar(stage, name, colours, scale, top, row)
        if k % every == 0:
            middle = top + min(row, 13 * every) / 2 + 4
            body.append(svg.text(_LEFT - 10, middle, name, text_anchor="end", font_size=11))
            words = f"{memory(stage.reserved)}, {percent(stage.reserved / stage.capacity)}"
            body.append(svg.text(svg.WIDTH - _RIGHT + 12, middle, words, font_size=11, font_weight=_weight(stage)))
    legend, height = svg.legend(colours | {_RESERVED: _RESERVED_COLOUR}, _LEFT, bottom + 42, svg.WIDTH - _RIGHT)
    key = svg.element(
        "path", d=f"M{svg.WIDTH - _RIGHT + 12} {bottom + 37}v12", stroke=svg.INK, stroke_width=2, class_="mark"
    )
    body += [*legend, key, svg.text(svg.WIDTH - _RIGHT + 20, bottom + 46, "capacity")]
    return svg.drawing(body, bottom + 42 + height, label)


def _weight(stage: StageMemory) -> str | None:
    return "bold" if stage.reserved > stage.capacity else None


class _Scale:
    """Bytes -> x."""

    def __init__(self, full: float) -> None:
        self.full = full * 1.02

    def x(self, nbytes: float) -> float:
        return _LEFT + (svg.WIDTH - _LEFT - _RIGHT) * nbytes / self.full

    def grid(self, bottom: float) -> list[str]:
        """Lines with their numbers, down to `bottom`."""
        unit, name = memory_unit(self.full)
        out = []
        for tick in svg.ticks(0, self.full / unit):
            x = self.x(tick * unit)
            out.append(svg.element("path", d=f"M{x:.1f} 6V{bottom + 4:.1f}", stroke=svg.LINE, class_="grid"))
            out.append(svg.text(x, bottom + 18, f"{tick:g} {name}", svg.FAINT, text_anchor="middle", font_size=11))
        return out


def _bar(stage: StageMemory, name: str, colours: dict[str, str], scale: _Scale, top: float, row: float) -> list[str]:
    height, at, out = row - max(1.0, row / 6), 0, []
    beyond = stage.reserved - sum(stage.parts.values())
    parts = [(part, stage.parts.get(part, 0), colour) for part, colour in colours.items()]
    for part, nbytes, colour in [*parts, (_RESERVED, max(beyond, 0), _RESERVED_COLOUR)]:
        if nbytes > 0:
            tip = svg.title(
                f"{name}\n{part}: {memory(nbytes)} ({percent(nbytes / stage.reserved)} of what is reserved)"
            )
            width = scale.x(at + nbytes) - scale.x(at)
            out.append(svg.element("rect", tip, x=scale.x(at), y=top, width=width, height=height, fill=colour))
        at += nbytes
    x = scale.x(stage.capacity)
    tip = svg.title(f"{name}\ncapacity: {memory(stage.capacity)}")
    line = f"M{x:.1f} {top - 1:.1f}V{top + height + 1:.1f}"
    return [*out, svg.element("path", tip, d=line, stroke=svg.INK, stroke_width=2, class_="mark")]


def breakdown_chart(prediction: Prediction) -> str:
    """One bar: the seconds of a step by what takes them, the mean of ranks."""
    taken = {part: seconds for part, seconds in prediction.breakdown.items() if seconds > 0}
    known = colours_of(taken)
    colours = {part: known[part] for part in taken}
    whole = sum(taken.values()) or 1.0
    entries = {
        f"{part} {duration(prediction.breakdown[part])} ({percent(prediction.breakdown[part] / whole)})": colour
        for part, colour in colours.items()
    }
    body, at = [], 0.0
    for (words, colour), part in zip(entries.items(), colours, strict=True):
        width = svg.WIDTH * prediction.breakdown[part] / whole
        body.append(svg.element("rect", svg.title(words), x=at, y=0, width=width, height=26, fill=colour))
        at += width
    legend, height = svg.legend(entries, 0, 46)
    return svg.drawing(body + legend, 46 + height, f"Seconds of a step of {prediction.layout}: " + ", ".join(entries))
