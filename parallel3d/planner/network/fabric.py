"""A cluster's graph as arrays: units of GPUs that need no network between them, switches, and directed links."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from parallel3d.planner.cluster.cluster import Cluster

# A route is the shortest for a message of this size; bandwidth counts there, and latency decides between equal ones.
ROUTED_BYTES = 4 << 20

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


class Edge(NamedTuple):
    """An edge of the graph, between two nodes. message: bytes a second that one message alone reaches."""

    a: str
    b: str
    kind: str
    bandwidth: float
    latency: float
    message: float

    @property
    def cost(self) -> int:
        """Picoseconds of a routed message; whole, so that equal routes are equal in whatever order they are summed."""
        return max(1, round(1e12 * (self.latency + ROUTED_BYTES / self.bandwidth)))


class LocalEdge(NamedTuple):
    """An edge of a unit, between nodes by their number in the unit; b is OUTSIDE where it leads to a switch."""

    a: int
    b: int
    edge: tuple[str, float, float, float]
    cost: int


OUTSIDE = -1


@dataclass(frozen=True)
class UnitClass:
    """What units of one structure share: GPUs are nodes 0 to gpus-1. ports: which edges lead outside."""

    gpus: int
    edges: tuple[LocalEdge, ...]

    @cached_property
    def ports(self) -> tuple[int, ...]:
        """Numbers of the edges that lead to a switch."""
        return tuple(number for number, edge in enumerate(self.edges) if edge.b == OUTSIDE)


@dataclass(frozen=True)
class _Unit:
    gpus: list[int]
    edges: list[Edge]  # as the class numbers them, ports pointing outwards
    local: tuple[LocalEdge, ...]
    switches: tuple[str, ...]  # of the ports


def by_name(name: str) -> tuple[int, str]:
    """Sort key that puts host2 before host10."""
    return len(name), name


class Fabric:
    """The arrays. Nothing here depends on the order in which the cluster's GPUs, nodes and edges were given.

    A unit is what nvlink and pcie connect, with its network cards: usually a host. An island is what nvlink connects. Links are
    edges with a direction: link 2e leads from edges[e].a to edges[e].b, link 2e+1 back; one more link, the last, is free and
    stands for a GPU's way to itself. position orders GPUs by locality: switches, then units and hosts by name, then index.
    attachments: pairs of a class and the switches of its ports; units with an equal pair are alike to all routes.
    """

    edges: list[Edge]
    bandwidth: Floats  # of links
    latency: Floats
    message: Floats
    unit: Integers  # of GPUs, by their index in the cluster
    slot: Integers  # a GPU's number in its unit
    island: Integers
    position: Integers
    first_link: Integers  # of units
    attachment: Integers  # of units
    attachments: list[tuple[int, tuple[int, ...]]]
    classes: list[UnitClass]
    switches: list[str]
    trunks: list[tuple[int, int, int]]  # (switch, switch, edge)

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        adjacent = _adjacency(cluster.graph)
        owner = _owners(cluster, adjacent)
        self.switches = sorted((node for node in adjacent if node not in owner), key=by_name)
        number = {name: index for index, name in enumerate(self.switches)}
        gpus: dict[int, list[int]] = {}
        for index, gpu in enumerate(cluster.gpus):
            gpus.setdefault(owner[gpu.node], []).append(index)
        islands = _components(adjacent, ("nvlink",))
        self.island = np.array([islands[gpu.node] for gpu in cluster.gpus])
        units = [_unit(cluster, self._by_locality(members), adjacent, owner) for members in gpus.values()]
        units.sort(key=lambda unit: ([number[s] for s in unit.switches], by_name(cluster.gpus[unit.gpus[0]].node)))
        self._number_units(units, number)
        self._number_trunks(adjacent, number)
        both = np.repeat(np.array([edge[3:] for edge in self.edges], dtype=np.float64).reshape(-1, 3), 2, axis=0)
        self.bandwidth, self.latency, self.message = np.vstack([both, [np.inf, 0.0, np.inf]]).T.copy()

    def _by_locality(self, unit: list[int]) -> list[int]:
        """GPUs of a unit by host and index, islands in one piece."""
        gpus = self.cluster.gpus
        unit = sorted(unit, key=lambda i: (by_name(gpus[i].host), gpus[i].index, gpus[i].node))
        first: dict[int, int] = {}
        return sorted(unit, key=lambda i: first.setdefault(int(self.island[i]), len(first)))

    def _number_units(self, units: list[_Unit], number: dict[str, int]) -> None:
        count = len(self.cluster.gpus)
        self.unit, self.slot, self.position = (np.zeros(count, dtype=np.int64) for _ in range(3))
        self.edges, self.classes, self.attachments = [], [], []
        classes: dict[tuple[int, tuple[LocalEdge, ...]], int] = {}
        attachments: dict[tuple[int, tuple[int, ...]], int] = {}
        first_link, attachment, placed = [], [], 0
        for index, unit in enumerate(units):
            kind = classes.setdefault((len(unit.gpus), unit.local), len(classes))
            attached = kind, tuple(number[switch] for switch in unit.switches)
            attachment.append(attachments.setdefault(attached, len(attachments)))
            first_link.append(2 * len(self.edges))
            self.edges += unit.edges
            self.unit[unit.gpus] = index
            self.slot[unit.gpus] = range(len(unit.gpus))
            self.position[unit.gpus] = range(placed, placed + len(unit.gpus))
            placed += len(unit.gpus)
        self.first_link, self.attachment = np.array(first_link), np.array(attachment)
        self.classes = [UnitClass(*key) for key in classes]
        self.attachments = list(attachments)

    def _number_trunks(self, adjacent: dict[str, list[Edge]], number: dict[str, int]) -> None:
        self.trunks = []
        for name in self.switches:
            for edge in sorted(adjacent[name], key=lambda edge: by_name(edge.b)):
                if number[name] < number.get(edge.b, -1):
                    self.trunks.append((number[name], number[edge.b], len(self.edges)))
                    self.edges.append(edge)


def _adjacency(graph: nx.Graph) -> dict[str, list[Edge]]:
    adjacent: dict[str, list[Edge]] = {node: [] for node in graph}
    attributes: dict[str, Any]
    for a, b, attributes in graph.edges(data=True):
        bandwidth = attributes["bandwidth"]
        rest = attributes["kind"], bandwidth, attributes["latency"], attributes.get("message_bandwidth", bandwidth)
        adjacent[a].append(Edge(a, b, *rest))
        adjacent[b].append(Edge(b, a, *rest))
    return adjacent


def _components(adjacent: dict[str, list[Edge]], kinds: tuple[str, ...]) -> dict[str, int]:
    """For each node a number that it shares with all that edges of these kinds connect to it."""
    component: dict[str, int] = {}
    for number, start in enumerate(adjacent):
        if start not in component:
            component[start] = number
            reached = [start]
            for node in reached:
                for edge in adjacent[node]:
                    if edge.kind in kinds and edge.b not in component:
                        component[edge.b] = number
                        reached.append(edge.b)
    return component


def _owners(cluster: Cluster, adjacent: dict[str, list[Edge]]) -> dict[str, int]:
    """The unit of each node that is in one: of GPUs, what nvlink and pcie connect to them, and cards next to it alone."""
    inside = _components(adjacent, ("nvlink", "pcie"))
    with_gpus = {inside[gpu.node] for gpu in cluster.gpus}
    owner = {node: unit for node, unit in inside.items() if unit in with_gpus}
    cards = {}
    for node, edges in adjacent.items():
        beside = {owner[edge.b] for edge in edges if edge.b in owner}
        if node not in owner and len(beside) == 1:
            cards[node] = beside.pop()
    # Of a switch between two units' cards that looks like a card itself, nothing is taken: all of them count as switches.
    return owner | {
        node: unit for node, unit in cards.items() if all(cards.get(edge.b, unit) == unit for edge in adjacent[node])
    }


def _unit(cluster: Cluster, gpus: list[int], adjacent: dict[str, list[Edge]], owner: dict[str, int]) -> _Unit:
    """Numbers a unit's nodes and edges: GPUs as given, then what is next to them, alike in alike units."""
    number = {cluster.gpus[gpu].node: slot for slot, gpu in enumerate(gpus)}
    mine = owner[cluster.gpus[gpus[0]].node]
    edges: list[Edge] = []
    local: list[LocalEdge] = []
    switches: list[str] = []
    walked: set[str] = set()
    queue = deque(number)
    while queue:
        node = queue.popleft()
        walked.add(node)
        for edge in sorted(adjacent[node], key=lambda edge: (edge[2:], by_name(edge.b))):
            if edge.b in walked:
                continue
            outside = owner.get(edge.b) != mine
            if outside:
                switches.append(edge.b)
            elif edge.b not in number:
                number[edge.b] = len(number)
                queue.append(edge.b)
            edges.append(edge)
            local.append(LocalEdge(number[node], OUTSIDE if outside else number[edge.b], edge[2:], edge.cost))
    return _Unit(gpus, edges, tuple(local), tuple(switches))
