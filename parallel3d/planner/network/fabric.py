"""A cluster's graph as arrays: units of GPUs that need no network between them, switches, and directed links."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from parallel3d.planner.cluster.cluster import Cluster, natural

# A route is the shortest one for a message of this size: bandwidth counts there, and latency decides between equal routes.
ROUTED_BYTES = 4 << 20

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


Node = TypeVar("Node", str, int)


class Edge(NamedTuple, Generic[Node]):
    """An edge of the cluster's graph, between nodes by their names, or of a part of it, between nodes by their numbers.

    message: bytes per second that a single message reaches.
    """

    a: Node
    b: Node
    kind: str
    bandwidth: float
    latency: float
    message: float

    @property
    def cost(self) -> int:
        """Picoseconds of a routed message; an integer, so that equal routes are equal in whatever order they are summed."""
        return max(1, round(1e12 * (self.latency + ROUTED_BYTES / self.bandwidth)))


@dataclass(frozen=True)
class UnitClass:
    """Structure that equal units share. GPUs are nodes 0 to gpus-1; the outer end of each port has a number of its own.

    ports: numbers of the edges that lead to a switch.
    """

    gpus: int
    nodes: int
    edges: tuple[Edge[int], ...]
    ports: tuple[int, ...]

    @cached_property
    def port_nodes(self) -> list[int]:
        """Number of each port's outer end."""
        return [self.edges[port].b for port in self.ports]


class _Unit(NamedTuple):
    gpus: list[int]
    edges: list[Edge[str]]  # in the order of the class, ports pointing outwards
    structure: UnitClass

    @property
    def switches(self) -> list[str]:
        """The switch of each port."""
        return [self.edges[port].b for port in self.structure.ports]


class Fabric:
    """Links, units and switches of a cluster. Independent of the order in which its GPUs, nodes and edges were given.

    A unit is a connected component of NVLink and PCIe edges, with its network cards: usually a host. Links are edges with a
    direction: link 2e leads from edges[e].a to edges[e].b, link 2e+1 back. One more link, the last, is free and stands for a
    GPU's way to itself.

    - edges; bandwidth, latency, message: [links].
    - unit, slot, island, position: [GPUs], by their index in the cluster. slot: number in the unit; position: order by
      locality (switches, then units and hosts by name, then index).
    - first_link, attachment: [units]. attachments: (class, switches of its ports); units with an equal pair have equal routes.
    - switches: names; trunks: the last edges, between switches by their index.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.island: Integers = np.array([gpu.island for gpu in cluster.gpus], dtype=np.int64)
        adjacent: dict[str, list[Edge[str]]] = {node: [] for node in cluster.graph}
        for a, b, edge in cluster.graph.edges(data=True):
            bandwidth: float = edge["bandwidth"]
            rest = edge["kind"], bandwidth, edge["latency"], edge.get("message_bandwidth", bandwidth)
            adjacent[a].append(Edge(a, b, *rest))
            adjacent[b].append(Edge(b, a, *rest))
        owner = _owners(cluster, adjacent)
        self.switches = sorted((node for node in adjacent if node not in owner), key=natural)
        number = {name: index for index, name in enumerate(self.switches)}
        members: dict[int, list[int]] = {}
        for index, gpu in enumerate(cluster.gpus):
            members.setdefault(owner[gpu.node], []).append(index)
        units = [_unit(cluster, self._by_locality(gpus), adjacent, owner) for gpus in members.values()]
        units.sort(key=lambda unit: ([number[s] for s in unit.switches], natural(cluster.gpus[unit.gpus[0]].node)))
        self.edges = [edge for unit in units for edge in unit.edges]
        self._number_units(units, number)
        trunks = [edge for name in self.switches for edge in adjacent[name] if number[name] < number.get(edge.b, -1)]
        trunks.sort(key=lambda edge: (number[edge.a], number[edge.b]))
        self.edges += trunks
        self.trunks = [Edge(number[edge.a], number[edge.b], *edge[2:]) for edge in trunks]
        both = np.repeat(np.array([edge[3:] for edge in self.edges], dtype=np.float64).reshape(-1, 3), 2, axis=0)
        self.bandwidth, self.latency, self.message = np.vstack([both, [np.inf, 0.0, np.inf]]).T.copy()

    def _by_locality(self, unit: list[int]) -> list[int]:
        """Sort the GPUs of a unit by host and index, with the GPUs of an island next to each other."""
        gpus = self.cluster.gpus
        unit = sorted(unit, key=lambda i: (natural(gpus[i].host), gpus[i].index, gpus[i].node))
        first: dict[int, int] = {}
        return sorted(unit, key=lambda i: first.setdefault(gpus[i].island, len(first)))

    def _number_units(self, units: list[_Unit], number: dict[str, int]) -> None:
        count = len(self.cluster.gpus)
        self.unit, self.slot, self.position = (np.zeros(count, dtype=np.int64) for _ in range(3))
        classes: dict[UnitClass, int] = {}
        attachments: dict[tuple[int, tuple[int, ...]], int] = {}
        attached, placed = [], 0
        for index, unit in enumerate(units):
            kind = classes.setdefault(unit.structure, len(classes))
            key = kind, tuple(number[switch] for switch in unit.switches)
            attached.append(attachments.setdefault(key, len(attachments)))
            self.unit[unit.gpus] = index
            self.slot[unit.gpus] = range(len(unit.gpus))
            self.position[unit.gpus] = range(placed, placed + len(unit.gpus))
            placed += len(unit.gpus)
        self.first_link: Integers = 2 * np.cumsum([0, *(len(unit.edges) for unit in units[:-1])])
        self.attachment: Integers = np.array(attached, dtype=np.int64)
        self.classes, self.attachments = list(classes), list(attachments)


def _owners(cluster: Cluster, adjacent: dict[str, list[Edge[str]]]) -> dict[str, int]:
    """Return the unit of each node in one: GPUs, nodes that NVLink and PCIe connect to them, and their network cards."""
    joined: nx.Graph = nx.Graph()
    joined.add_nodes_from(adjacent)
    joined.add_edges_from(edge[:2] for near in adjacent.values() for edge in near if edge.kind in ("nvlink", "pcie"))
    gpus = {gpu.node for gpu in cluster.gpus}
    with_gpus = [nodes for nodes in nx.connected_components(joined) if not gpus.isdisjoint(nodes)]
    owner = {node: unit for unit, nodes in enumerate(with_gpus) for node in nodes}
    cards = {}
    for node, edges in adjacent.items():
        beside = {owner[edge.b] for edge in edges if edge.b in owner}
        if node not in owner and len(beside) == 1:
            cards[node] = beside.pop()
    # A node between the cards of two units may look like a card of one of them: then all of these count as switches.
    return owner | {
        node: unit for node, unit in cards.items() if all(cards.get(edge.b, unit) == unit for edge in adjacent[node])
    }


def _unit(cluster: Cluster, gpus: list[int], adjacent: dict[str, list[Edge[str]]], owner: dict[str, int]) -> _Unit:
    """Number a unit's nodes and edges breadth-first from its GPUs, equally in equal units."""
    number = {cluster.gpus[gpu].node: slot for slot, gpu in enumerate(gpus)}
    mine = owner[cluster.gpus[gpus[0]].node]
    edges: list[Edge[str]] = []
    local: list[Edge[int]] = []
    ports: list[int] = []
    walked: set[str] = set()
    queue = deque(number)
    while queue:
        node = queue.popleft()
        walked.add(node)
        for edge in sorted(adjacent[node], key=lambda edge: (edge[2:], natural(edge.b))):
            if edge.b in walked:
                continue
            new = len(number) + len(ports)
            if owner.get(edge.b) != mine:
                ports.append(len(edges))
            elif edge.b not in number:
                number[edge.b] = new
                queue.append(edge.b)
            local.append(Edge(number[node], number.get(edge.b, new), *edge[2:]))
            edges.append(edge)
    return _Unit(gpus, edges, UnitClass(len(gpus), len(number) + len(ports), tuple(local), tuple(ports)))
