"""Charts of a plan: memory of each stage, the parts of a step's time, memory against time, and the loads of links."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from math import ceil
from typing import NamedTuple

import networkx as nx
from markupsafe import Markup

from parallel3d.planner.report.drawing import WIDTH, place_legend, render
from parallel3d.planner.report.words import colours_of, duration, memory, memory_unit, natural, percent
from parallel3d.planner.search.result import LinkLoad, PlanResult, Prediction
from parallel3d.schedule.draw import ticks

_RESERVED = "reserved beyond (CUDA, NCCL, gaps)"


def memory_chart(prediction: Prediction, names: list[str], standalone: bool = False) -> Markup:
    """Draw a bar for each stage, its parts stacked at the peak, then what is reserved beyond; a line at the device's capacity.

    - names: of the stages. Rows get thinner, and names fewer, where there are many.
    - standalone: on a white ground.
    """
    stages, left, right = prediction.memory, 170, WIDTH - 150
    height = max(6.0, min(26.0, 900 / len(stages)))
    every = ceil(13 / height)
    full = 1.02 * max(max(stage.capacity, stage.reserved) for stage in stages)
    pixels = (right - left) / full
    bottom = 8 + height * len(stages)
    colours = colours_of(part for stage in stages for part, nbytes in stage.parts.items() if nbytes)
    colours[_RESERVED] = "#aeb6bf"
    rows = []
    for k, (stage, name) in enumerate(zip(stages, names, strict=True)):
        held, bars, at = {**stage.parts, _RESERVED: max(0, stage.reserved - sum(stage.parts.values()))}, [], left + 0.0
        for part in (part for part in colours if held.get(part)):
            width = pixels * held[part]
            bars.append({"part": part, "nbytes": held[part], "x": at, "width": width, "colour": colours[part]})
            at += width
        top = 8 + height * k
        row = {"stage": stage, "name": name, "bars": bars, "top": top, "capacity": left + pixels * stage.capacity}
        rows.append({**row, "labelled_at": 0 if k % every else top + min(height, 13 * every) / 2 + 4})
    unit, unit_name = memory_unit(full)
    legend, below = place_legend(colours, left, bottom + 42, right)
    return render(
        "memory.jinja",
        rows=rows,
        ticks=[(left + pixels * unit * tick, f"{tick:g} {unit_name}") for tick in ticks(0, full / unit)],
        legend=legend,
        left=left,
        right=right,
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


_LEFT, _RIGHT, _TOP, _BOTTOM = 80, WIDTH - 40, 24, 330
_ON, _OFF, _WINNER = "#2f69b4", "#8c959f", "#c8413b"


class _Axis:
    """Numbers -> pixels from `start` to `end`, over the range of `numbers` with a margin."""

    def __init__(self, numbers: list[float], start: float, end: float) -> None:
        low, high = min(numbers), max(numbers)
        margin = 0.06 * (high - low) or 0.1 * high or 1.0
        self.low, self.high = max(low - margin, 0.0), high + margin
        self._start, self._pixels = start, (end - start) / (self.high - self.low)

    def at(self, number: float) -> float:
        return self._start + self._pixels * (number - self.low)

    def holds(self, number: float) -> bool:
        return self.low <= number <= self.high


def trade_off_chart(result: PlanResult, standalone: bool = False) -> Markup | None:
    """Draw the frontier as a stepped line through its points, other layouts paler, the winner marked.

    Points hold their layout as data-layout. Layouts that lost and lie beyond the range of the others are left out. None where
    no layout has a time. standalone: on a white ground.
    """
    ranked = [(p.peak, p.seconds, p.layout) for p in result.best]
    frontier = sorted(result.trade_off)
    shown = [*frontier, *ranked]
    if not shown:
        return None
    x = _Axis([peak for peak, _, _ in shown], _LEFT, _RIGHT)
    y = _Axis([seconds for _, seconds, _ in shown], _BOTTOM, _TOP)

    def point(radius: int, colour: str, peak: int, seconds: float, layout: str) -> dict[str, object]:
        at = {"x": x.at(peak), "y": y.at(seconds), "radius": radius, "colour": colour}
        return {**at, "peak": peak, "seconds": seconds, "layout": layout}

    lost = [(r.peak, r.seconds, r.layout) for r in result.rejected if r.peak is not None and r.seconds is not None]
    inside = [one for one in [*lost, *ranked] if x.holds(one[0]) and y.holds(one[1])]
    on = {layout for _, _, layout in frontier}
    points = [point(3, _OFF, *one) for one in inside if one[2] not in on]
    points += [point(5, _ON, *one) for one in frontier if one[2] not in [p.layout for p in result.best[:1]]]
    points += [point(7, _WINNER, *one) for one in ranked[:1]]
    corners = [(f"{x.at(peak):.1f}", f"{y.at(seconds):.1f}") for peak, seconds, _ in frontier]
    unit, unit_name = memory_unit(x.high)
    words = "; ".join(f"{layout}: {memory(peak)}, {duration(seconds)}" for peak, seconds, layout in frontier)
    return render(
        "trade_off.jinja",
        peaks=[(x.at(tick * unit), f"{tick:g} {unit_name}") for tick in ticks(x.low / unit, x.high / unit)],
        times=[(y.at(tick), duration(tick)) for tick in ticks(y.low, y.high, 6)],
        points=points,
        winner=points[-1] if ranked else None,
        frontier=corners,
        legend=place_legend({"not beaten in both": _ON, "beaten": _OFF, "the winner": _WINNER}, _LEFT, _BOTTOM + 38)[0],
        label=f"Peak memory against the time of a step. {words}",
        left=_LEFT,
        right=_RIGHT,
        top=_TOP,
        bottom=_BOTTOM,
        standalone=standalone,
    )


_AXIS_COLOURS = {"pipe": "#2f69b4", "data": "#2e8752", "model": "#b8671a"}
_OTHER_AXIS, _UNUSED = "#57606a", "#d8dee4"
_BETWEEN_HOSTS = {"nic", "network"}
_LAYER, _MARGIN = 110, 60


class _Box(NamedTuple):
    """A node. x, y: of its centre."""

    name: str
    label: str
    x: float
    y: float
    width: float


def topology_chart(links: Sequence[LinkLoad], step: float) -> Markup:
    """Draw the graph in rows from the outermost switches down.

    A line's width is its seconds, its colour the axis that moves most. step: seconds of a step, which loads are shares of.
    """
    names = sorted({name for link in links for name in (link.a, link.b)}, key=natural)
    graph: nx.Graph[str] = nx.Graph()
    graph.add_nodes_from(names)
    graph.add_edges_from((link.a, link.b, {"kind": link.kind}) for link in links if link.a != link.b)
    rows = [_boxes(names, _MARGIN / 2 + _LAYER * k + 10.0) for k, names in enumerate(_rows(graph))]
    height = _MARGIN + _LAYER * (len(rows) - 1) + 10.0
    place = {box.name: (box.x, box.y) for row in rows for box in row}
    most = max((link.seconds for link in links), default=0.0) or 1.0
    widest = sorted(links, key=lambda link: -link.seconds)
    legend, below = place_legend({f"mostly {axis}": colour for axis, colour in _AXIS_COLOURS.items()}, 10, height + 16)
    busiest = "; ".join(_words(link, step).replace("\n", ", ") for link in widest[:6])
    return render(
        "topology.jinja",
        lines=[_line(link, place, most, step) for link in reversed(widest)],
        boxes=chain(*rows),
        rows=[(row[0].y - 20, f"{row[0].name} … {row[-1].name}") for row in rows if row[0].label != row[0].name],
        legend=legend,
        widest=most,
        key_y=height + 16,
        height=height + 16 + below,
        label=f"What links carry in a step, the busiest first. {busiest}",
    )


def _rows(graph: nx.Graph) -> list[list[str]]:
    """Return the nodes by their distance from the outermost switches."""
    rows: list[list[str]] = []
    parts = sorted((sorted(part, key=natural) for part in nx.connected_components(graph)), key=lambda p: natural(p[0]))
    for part in parts:
        for k, layer in enumerate(nx.bfs_layers(graph, _top(graph.subgraph(part)))):
            rows += [[]] * (k + 1 - len(rows))
            rows[k] = rows[k] + sorted(layer, key=natural)
    return rows


def _top(graph: nx.Graph) -> list[str]:
    """Return the switches farthest from any host; the centre where all links are inside of one."""
    inside = [(a, b) for a, b, held in graph.edges(data=True) if held["kind"] not in _BETWEEN_HOSTS]
    switches = set(graph.nodes) - set(chain.from_iterable(inside))
    if 0 < len(switches) < len(graph):
        *_, farthest = nx.bfs_layers(graph, graph.nodes - switches)
        return farthest
    middle = sorted(nx.center(graph), key=natural)
    return middle if graph.subgraph(middle).number_of_edges() == 0 else middle[:1]


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


def _line(link: LinkLoad, place: dict[str, tuple[float, float]], most: float, step: float) -> dict[str, object]:
    """Return a straight line between rows, one bent below within a row, a loop under a node that stands for both ends."""
    (ax, ay), (bx, by) = place[link.a], place[link.b]
    if link.a == link.b:
        path = f"M{ax - 12:.1f} {ay:.1f}c-16 44 40 44 24 0"
    elif ay == by:
        path = f"M{ax:.1f} {ay:.1f}Q{(ax + bx) / 2:.1f} {ay + min(70, 20 + abs(bx - ax) / 6):.1f} {bx:.1f} {by:.1f}"
    else:
        path = f"M{ax:.1f} {ay:.1f}L{bx:.1f} {by:.1f}"
    axis = max(link.by_axis, key=lambda axis: link.by_axis[axis], default="")
    colour = _AXIS_COLOURS.get(axis, _OTHER_AXIS) if link.nbytes else _UNUSED
    return {"path": path, "colour": colour, "width": 1 + 7 * link.seconds / most, "words": _words(link, step)}


def _words(link: LinkLoad, step: float) -> str:
    axes = ", ".join(f"{axis} {memory(nbytes)}" for axis, nbytes in link.by_axis.items() if nbytes)
    share = f"{duration(link.seconds)} ({percent(link.seconds / step)} of the step)" if step else duration(link.seconds)
    return f"{link.a} – {link.b} ({link.kind})\n{memory(link.nbytes)}: {axes or 'nothing'}\n{share}"
