"""Charts of the memory of each stage's ranks against their devices, and of the parts of a step's time."""

from __future__ import annotations

from math import ceil

from markupsafe import Markup

from parallel3d.planner.report.drawing import WIDTH, place_legend, render, ticks
from parallel3d.planner.report.words import colours_of, duration, memory_unit, percent
from parallel3d.planner.search.result import Prediction

_LEFT, _RIGHT = 170, WIDTH - 150
_RESERVED = "reserved beyond (CUDA, NCCL, gaps)"


def memory_chart(prediction: Prediction, names: list[str], standalone: bool = False) -> Markup:
    """Draw a bar for each stage, its parts stacked at the peak, then what is reserved beyond; a line at the device's capacity.

    - names: of the stages. Rows get thinner, and names fewer, where there are many.
    - standalone: on a white ground.
    """
    stages = prediction.memory
    height = max(6.0, min(26.0, 900 / len(stages)))
    every = ceil(13 / height)
    full = 1.02 * max(max(stage.capacity, stage.reserved) for stage in stages)
    pixels = (_RIGHT - _LEFT) / full
    bottom = 8 + height * len(stages)
    colours = colours_of(part for stage in stages for part, nbytes in stage.parts.items() if nbytes)
    colours[_RESERVED] = "#aeb6bf"
    rows = []
    for k, (stage, name) in enumerate(zip(stages, names, strict=True)):
        held, bars, at = {**stage.parts, _RESERVED: max(0, stage.reserved - sum(stage.parts.values()))}, [], _LEFT + 0.0
        for part in (part for part in colours if held.get(part)):
            width = pixels * held[part]
            bars.append({"part": part, "nbytes": held[part], "x": at, "width": width, "colour": colours[part]})
            at += width
        top = 8 + height * k
        row = {"stage": stage, "name": name, "bars": bars, "top": top, "capacity": _LEFT + pixels * stage.capacity}
        rows.append({**row, "labelled_at": 0 if k % every else top + min(height, 13 * every) / 2 + 4})
    unit, unit_name = memory_unit(full)
    legend, below = place_legend(colours, _LEFT, bottom + 42, _RIGHT)
    return render(
        "memory.jinja",
        rows=rows,
        ticks=[(_LEFT + pixels * unit * tick, f"{tick:g} {unit_name}") for tick in ticks(0, full / unit)],
        legend=legend,
        left=_LEFT,
        right=_RIGHT,
        bottom=bottom,
        thickness=height - max(1.0, height / 6),
        height=bottom + 42 + below,
        label=f"Memory of each stage of {prediction.layout} against its device",
        standalone=standalone,
    )


def breakdown_chart(prediction: Prediction) -> Markup:
    """Draw the seconds of a step as one bar of the parts that they go to, the mean of ranks."""
    shown = {part: seconds for part, seconds in prediction.breakdown.items() if seconds > 0}
    whole, bars, at = sum(shown.values()) or 1.0, [], 0.0
    for part, colour in colours_of(shown).items():
        share = shown[part] / whole
        bars.append((at, WIDTH * share, f"{part} {duration(shown[part])} ({percent(share)})", colour))
        at += WIDTH * share
    legend, below = place_legend({words: colour for _, _, words, colour in bars}, 0, 46)
    label = f"Seconds of a step of {prediction.layout}: " + ", ".join(words for _, _, words, _ in bars)
    return render("breakdown.jinja", bars=bars, legend=legend, height=46 + below, label=label)
