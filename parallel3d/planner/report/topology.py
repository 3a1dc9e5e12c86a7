"""Chart of what the links carry, on the cluster's graph."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import networkx as nx
from markupsafe import Markup

from parallel3d.planner.report.drawing import WIDTH, place_legend, render
from parallel3d.planner.report.words import duration, memory, natural, percent
from parallel3d.planner.search.result import LinkLoad

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
