"""Charts of a plan: memory of each stage, the parts of a step's time, memory against time, and the loads of links."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from operator import itemgetter
from typing import NamedTuple

import networkx as nx
from markupsafe import Markup

from parallel3d.planner.cluster.cluster import natural
from parallel3d.planner.formats import MEMORY_UNITS, duration, unit_of
from parallel3d.planner.report.drawing import WIDTH, colours_of, place_legend, render
from parallel3d.planner.search.result import LinkLoad, PlanResult, StageMemory
from parallel3d.schedule.draw import ticks

_RESERVED = "reserved beyond (CUDA, NCCL, gaps)"


def memory_chart(stages: Sequence[StageMemory], names: Sequence[str], layout: str, standalone: bool = False) -> Markup:
    """Draw a bar for each stage, its parts stacked at the peak, then what is reserved beyond; a line at the device's capacity.

    - stages: without a line where the capacity is 0, as on a CPU. layout: in words.
    - names: of the stages. Rows get thinner, and names fewer, where there are many.
    - standalone: on a white ground.
    """
    left, right = 170, WIDTH - 150
    height = max(6.0, min(26.0, 900 / len(stages)))
    full = 1.02 * max(max(stage.capacity, stage.reserved) for stage in stages)
    pixels = (right - left) / full
    bottom = 8 + height * len(stages)
    colours = colours_of(part for stage in stages for part, nbytes in stage.parts.items() if nbytes)
    if any(stage.reserved > sum(stage.parts.values()) for stage in stages):
        colours[_RESERVED] = "#aeb6bf"
    rows = []
    for stage in stages:
        held = {**stage.parts, _RESERVED: max(0, stage.reserved - sum(stage.parts.values()))}
        parts = [part for part in colours if held.get(part)]
        below = accumulate((held[part] for part in parts), initial=0)
        rows.append([(part, held[part], nbytes) for part, nbytes in zip(parts, below, strict=False)])
    unit, unit_name = unit_of(full / 2, MEMORY_UNITS)
    legend, legend_height = place_legend(colours, left, bottom + 42, right)
    return render(
        "memory.jinja",
        rows=zip(stages, names, rows, strict=True),
        colours=colours,
        pixels=pixels,
        row_height=height,
        ticks=[(left + pixels * unit * tick, f"{tick:g} {unit_name}") for tick in ticks(0, full / unit)],
        legend=legend,
        left=left,
        right=right,
        bottom=bottom,
        height=bottom + 42 + legend_height,
        with_capacity=any(stage.capacity for stage in stages),
        label=f"Memory of each stage of {layout} against its device",
        standalone=standalone,
    )


def breakdown_chart(breakdown: Mapping[str, float], layout: str) -> Markup:
    """Draw the seconds of a step as one bar of the parts that they go to, the mean of ranks. layout: in words."""
    shown = {part: seconds for part, seconds in breakdown.items() if seconds > 0}
    whole, bars, at = sum(shown.values()) or 1.0, [], 0.0
    for part, colour in colours_of(shown).items():
        share = shown[part] / whole
        bars.append((at, WIDTH * share, f"{part} {duration(shown[part])} ({share:.1%})", colour))
        at += WIDTH * share
    legend, below = place_legend({words: colour for _, _, words, colour in bars}, 0, 46)
    label = f"Seconds of a step of {layout}: " + ", ".join(words for _, _, words, _ in bars)
    return render("breakdown.jinja", bars=bars, legend=legend, height=46 + below, label=label)


_FRONTIER, _BEATEN, _WINNER = "#2f69b4", "#8c959f", "#c8413b"


class _Axis:
    """Numbers -> pixels from `start` to `end`, over the range of `numbers` with a margin."""

    def __init__(self, numbers: Sequence[float], start: float, end: float) -> None:
        low, high = min(numbers), max(numbers)
        margin = 0.06 * (high - low) or 0.1 * high or 1.0
        self.low, self.high = low - margin if low < 0 else max(low - margin, 0.0), high + margin
        self.start, self.end = start, end

    def at(self, number: float) -> float:
        return self.start + (self.end - self.start) * (number - self.low) / (self.high - self.low)

    def holds(self, number: float) -> bool:
        return self.low <= number <= self.high


def trade_off_chart(result: PlanResult, standalone: bool = False) -> Markup | None:
    """Draw the frontier as a stepped line through its points, other layouts paler, the winner marked.

    Points hold their layout as data-layout. Layouts that lost and lie beyond the range of the others are left out. None where
    no layout has a time. standalone: on a white ground.
    """
    ranked = [(p.peak, p.seconds, p.layout) for p in result.best]
    frontier = sorted(result.trade_off)
    if not frontier + ranked:
        return None
    peaks, seconds, _ = zip(*frontier, *ranked, strict=True)
    x, y = _Axis(peaks, 80, WIDTH - 40), _Axis(seconds, 330, 24)
    lost = [(r.peak, r.seconds, r.layout) for r in result.rejected if r.peak is not None and r.seconds is not None]
    inside = [one for one in [*lost, *ranked] if x.holds(one[0]) and y.holds(one[1])]
    best = {layout for _, _, layout in frontier}
    winners = [layout for _, _, layout in ranked[:1]]
    points = [(3, _BEATEN, *one) for one in inside if one[2] not in best]
    points += [(5, _FRONTIER, *one) for one in frontier if one[2] not in winners]
    points += [(7, _WINNER, *one) for one in ranked[:1]]
    colours = {"not beaten in both": _FRONTIER, "beaten": _BEATEN, "the winner": _WINNER}
    unit, unit_name = unit_of(x.high / 2, MEMORY_UNITS)
    return render(
        "trade_off.jinja",
        x=x,
        y=y,
        peaks=[(x.at(tick * unit), f"{tick:g} {unit_name}") for tick in ticks(x.low / unit, x.high / unit)],
        times=list(ticks(y.low, y.high, 6)),
        points=points,
        winners=ranked[:1],
        frontier=frontier,
        legend=place_legend(colours, x.start, y.start + 38)[0],
        standalone=standalone,
    )


# Points of a line are thinned out to the least and the most of each part of its x axis, of this number.
_PARTS = 500


def line_chart(
    name: str, segments: Sequence[Sequence[tuple[float, float]]], shown: Callable[[float], str], colour: str
) -> Markup | None:
    """Draw points (samples, value), a line for each segment, as of a restarted training; None without a finite value.

    shown: formats a value.
    """
    finite = [[(x, y) for x, y in segment if math.isfinite(y)] for segment in segments]
    points = list(chain.from_iterable(finite))
    if not points:
        return None
    x = _Axis([samples for samples, _ in points], 80, WIDTH - 20)
    y = _Axis([value for _, value in points], 210, 32)
    return render(
        "lines.jinja",
        label=f"{name}: from {shown(points[0][1])} to {shown(points[-1][1])}",
        name=name,
        x=x,
        y=y,
        samples=[(x.at(tick), f"{tick:,.0f}") for tick in ticks(x.low, x.high)],
        values=[(y.at(tick), shown(tick)) for tick in ticks(y.low, y.high, 5)],
        lines=[[(x.at(a), y.at(b)) for a, b in _thinned(segment)] for segment in finite if segment],
        last=points[-1],
        shown=shown(points[-1][1]),
        colour=colour,
    )


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    size = max(1, math.ceil(len(points) / _PARTS))
    if size < 3:
        return list(points)
    parts = [points[k : k + size] for k in range(0, len(points), size)]
    ends = [sorted({min(part, key=itemgetter(1)), max(part, key=itemgetter(1))}) for part in parts]
    return [point for part in ends for point in part]


_AXIS_COLOURS = {"pipe": "#2f69b4", "data": "#2e8752", "model": "#b8671a"}
_LAYER, _MARGIN = 110, 60


class _Box(NamedTuple):
    """A node of the topology. x, y: of its centre."""

    name: str
    label: str
    x: float
    y: float
    width: float


def topology_chart(links: Sequence[LinkLoad], step: float) -> Markup:
    """Draw the graph in rows, each node by its distance from the nodes that are the farthest from any GPU.

    A line's width is its seconds, its colour the axis that moves most. step: seconds of a step, which loads are shares of.
    """
    graph: nx.Graph[str] = nx.Graph()
    for link in links:
        graph.add_nodes_from((link.a, link.b))
        if link.a != link.b:
            graph.add_edge(link.a, link.b)
    outermost = [node for part in nx.connected_components(graph) for node in _outermost(graph.subgraph(part))]
    layers = [sorted(layer, key=natural) for layer in nx.bfs_layers(graph, outermost)]
    rows = [_boxes(names, _MARGIN / 2 + _LAYER * k + 10.0) for k, names in enumerate(layers)]
    height = _MARGIN + _LAYER * (len(rows) - 1) + 10.0
    legend, below = place_legend({f"mostly {axis}": colour for axis, colour in _AXIS_COLOURS.items()}, 10, height + 16)
    return render(
        "topology.jinja",
        links=sorted(links, key=lambda link: -link.seconds),
        widest=max(link.seconds for link in links) or 1.0,
        step=step,
        colours=_AXIS_COLOURS,
        rows=rows,
        boxes={box.name: box for row in rows for box in row},
        legend=legend,
        key_y=height + 16,
        height=height + 16 + below,
    )


def _outermost(graph: nx.Graph) -> list[str]:
    """Return the nodes that are the farthest from any GPU."""
    gpus = [node for node in graph if re.search(r"/gpu[\d-]*$", node)]
    *_, farthest = nx.bfs_layers(graph, gpus or graph)
    return farthest


def _boxes(names: Sequence[str], y: float) -> list[_Box]:
    """Place a row of boxes, each with as much of its name as has room: all, its last part, or that part's number."""
    boxes = []
    for k, name in enumerate(names):
        room, short = WIDTH / len(names) - 4, name.rpartition("/")[2]
        labels = (name, short, "".join(re.findall(r"\d+", short)[-1:]))
        label = next((words for words in labels if 6.2 * len(words) + 8 <= room), "")
        width = min(room, max(6.2 * len(label) + 10, 14))
        boxes.append(_Box(name, label, WIDTH * (k + 0.5) / len(names), y, width))
    return boxes
