"""What the links carry, on the cluster's graph."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import chain

import networkx as nx

from parallel3d.planner.report import svg
from parallel3d.planner.report.words import duration, memory, natural, percent, runs
from parallel3d.planner.search.result import LinkLoad

_AXIS_COLOURS = {"pipe": "#2f69b4", "data": "#2e8752", "model": "#b8671a"}
_BETWEEN_HOSTS = {"nic", "network"}
_LAYER, _MARGIN, _BOX = 110, 60, 24
_MOST_NODES = 100


def grouped(links: Sequence[LinkLoad], most: int = _MOST_NODES) -> list[LinkLoad]:
    """Links between nodes drawn as one where there are more than `most`, each with the busiest load of those it stands for.

    First the leading number of names is taken together ("host0–127/nic3"), of the commonest beginning first; where that is
    not enough, every number.
    """
    names = {name for link in links for name in (link.a, link.b)}
    group = {name: name for name in names}
    beginnings = Counter(_beginning(name) for name in names)
    taken: set[str] = set()
    for beginning in sorted(beginnings, key=lambda word: (-beginnings[word], word)):
        if len(set(group.values())) <= most:
            break
        taken.add(beginning)
        group = _named({name: _form(name, 1 if _beginning(name) in taken else None) for name in names})
    if len(set(group.values())) > most:
        group = _named({name: _form(name, 0) for name in names})
    busiest: dict[tuple[str, str, str], LinkLoad] = {}
    for link in links:
        a, b = sorted((group[link.a], group[link.b]), key=natural)
        known = busiest.get((a, b, link.kind))
        if known is None or link.seconds > known.seconds:
            busiest[a, b, link.kind] = link.model_copy(update={"a": a, "b": b})
    return list(busiest.values())


def _beginning(name: str) -> str:
    return re.split(r"\d", name, maxsplit=1)[0]


def _form(name: str, numbers: int | None) -> str:
    """The name with its first `numbers` numbers open, all for 0, none for None."""
    return name if numbers is None else re.sub(r"\d+", "\0", name, count=numbers)


def _named(form_of: dict[str, str]) -> dict[str, str]:
    """name -> its form, with the range of the numbers of all names of that form where it is open."""
    held: dict[str, list[set[int]]] = {}
    for name, form in form_of.items():
        numbers = held.setdefault(form, [set() for _ in range(form.count("\0"))])
        for known, number in zip(numbers, re.findall(r"\d+", name), strict=False):
            known.add(int(number))
    filled = {form: _filled(form, numbers) for form, numbers in held.items()}
    return {name: filled[form] for name, form in form_of.items()}


def _filled(form: str, numbers: list[set[int]]) -> str:
    left = iter(numbers)
    return re.sub("\0", lambda _: runs(next(left)), form)


def topology_chart(links: Sequence[LinkLoad], step: float) -> str:
    """The graph in rows from the outermost switches down. A line's width is its seconds, its colour the axis that moves most.

    step: seconds of a step, which loads are shares of. `links`: few enough to draw, see `grouped`.
    """
    names = sorted({name for link in links for name in (link.a, link.b)}, key=natural)
    graph: nx.Graph[str] = nx.Graph()
    graph.add_nodes_from(names)
    graph.add_edges_from((link.a, link.b, {"kind": link.kind}) for link in links if link.a != link.b)
    place, height = _places(graph)
    most = max((link.seconds for link in links), default=0.0) or 1.0
    body = [_line(link, place, most, step) for link in sorted(links, key=lambda link: link.seconds)]
    body += _nodes(place)
    axes = {f"mostly {axis}": colour for axis, colour in _AXIS_COLOURS.items()}
    legend, below = svg.legend(axes, 10, height + 16)
    body += [*legend, svg.text(380, height + 16, f"width: time in a step, the widest {duration(most)}", svg.FAINT)]
    words = "; ".join(
        _words(link, step).replace("\n", ", ") for link in sorted(links, key=lambda link: -link.seconds)[:6]
    )
    return svg.drawing(body, height + 16 + below, f"What links carry in a step, the busiest first. {words}")


def _places(graph: nx.Graph) -> tuple[dict[str, tuple[float, float]], float]:
    """node -> (x, y), and the height: by distance from the top in rows, or around a circle where all nodes are alike."""
    parts = sorted((sorted(part, key=natural) for part in nx.connected_components(graph)), key=lambda p: natural(p[0]))
    if len(parts) == 1 and len(parts[0]) > 2 and not _switches(graph) and len(nx.center(graph)) == len(graph):
        circle = nx.circular_layout(graph, scale=150)
        return {n: (svg.WIDTH / 2 + 2.4 * float(x), 190 + float(y)) for n, (x, y) in circle.items()}, 380
    rows: list[list[str]] = []
    for part in parts:
        for k, layer in enumerate(nx.bfs_layers(graph, _top(graph.subgraph(part)))):
            rows += [[]] * (k + 1 - len(rows))
            rows[k] = rows[k] + sorted(layer, key=natural)
    place = {
        node: (svg.WIDTH * (i + 0.5) / len(row), _MARGIN / 2 + _LAYER * k + 10.0)
        for k, row in enumerate(rows)
        for i, node in enumerate(row)
    }
    return place, _MARGIN + _LAYER * (len(rows) - 1) + 10.0


def _top(graph: nx.Graph) -> list[str]:
    """The switches farthest from any host; the centre where all links are inside of one."""
    switches = _switches(graph)
    if 0 < len(switches) < len(graph):
        *_, farthest = nx.bfs_layers(graph, graph.nodes - switches)
        return farthest
    middle = sorted(nx.center(graph), key=natural)
    return middle if graph.subgraph(middle).number_of_edges() == 0 else middle[:1]


def _switches(graph: nx.Graph) -> set[str]:
    """Nodes without a link inside of a host."""
    inside = [(a, b) for a, b, held in graph.edges(data=True) if held["kind"] not in _BETWEEN_HOSTS]
    return set(graph.nodes) - set(chain.from_iterable(inside))


def _nodes(place: dict[str, tuple[float, float]]) -> list[str]:
    """Boxes; where the whole name has no room in its row, its last part or number, and the row's names above it."""
    out = []
    rows: dict[float, list[str]] = {}
    for node, (_, y) in place.items():
        rows.setdefault(y, []).append(node)
    for node, (x, y) in place.items():
        room = svg.WIDTH / len(rows[y]) - 4
        short = node.rpartition("/")[2]
        labels = (node, short, "".join(re.findall(r"\d+", short)[-1:]))
        label = next((words for words in labels if 6.2 * len(words) + 8 <= room), "")
        if label != node and node == rows[y][0]:
            out.append(svg.text(4, y - 20, f"{node} … {rows[y][-1]}", svg.FAINT, font_size=11))
        width = min(room, max(6.2 * len(label) + 10, 14))
        box = svg.element(
            "rect", x=x - width / 2, y=y - _BOX / 2, width=width, height=_BOX, rx=4, fill=svg.LANE, stroke=svg.FAINT,
            class_="node",
        )  # fmt: skip
        words = svg.text(x, y + 4, label, text_anchor="middle", font_size=10.5, pointer_events="none") if label else ""
        out.append(svg.element("g", svg.title(node) + box + words))
    return out


def _line(link: LinkLoad, place: dict[str, tuple[float, float]], most: float, step: float) -> str:
    """Straight between rows, bent below within one, a loop under a node that stands for both ends."""
    (ax, ay), (bx, by) = place[link.a], place[link.b]
    if link.a == link.b:
        path = f"M{ax - 12:.1f} {ay:.1f}c-16 44 40 44 24 0"
    elif ay == by:
        path = f"M{ax:.1f} {ay:.1f}Q{(ax + bx) / 2:.1f} {ay + min(70, 20 + abs(bx - ax) / 6):.1f} {bx:.1f} {by:.1f}"
    else:
        path = f"M{ax:.1f} {ay:.1f}L{bx:.1f} {by:.1f}"
    axis = max(link.by_axis, key=lambda axis: link.by_axis[axis], default="")
    colour = _AXIS_COLOURS.get(axis, svg.FAINT) if link.nbytes else svg.LINE
    width = 1 + 7 * link.seconds / most
    tip = svg.title(_words(link, step))
    return svg.element("path", tip, d=path, fill="none", stroke=colour, stroke_width=width, class_="link")


def _words(link: LinkLoad, step: float) -> str:
    axes = ", ".join(f"{axis} {memory(nbytes)}" for axis, nbytes in link.by_axis.items() if nbytes)
    share = f"{duration(link.seconds)} ({percent(link.seconds / step)} of the step)" if step else duration(link.seconds)
    return f"{link.a} – {link.b} ({link.kind})\n{memory(link.nbytes)}: {axes or 'nothing'}\n{share}"
