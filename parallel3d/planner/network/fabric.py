"""A cluster's graph as arrays, units of GPUs, switches and directed links, and the routes of messages over its links."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Generic, NamedTuple, TypeVar

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from parallel3d.errors import ConfigError
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
    - unit, slot, island, position, place: [GPUs], by their index in the cluster. slot: number in the unit; position: order by
      locality (switches, then units and hosts by name, then index); place: the same for equal slots of units with equal routes.
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
        first_place = np.cumsum([0, *(self.classes[kind].gpus for kind, _ in attachments)])
        self.place: Integers = first_place[self.attachment[self.unit]] + self.slot


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
    # A node between the cards of two units may look like a card of one of them. Such nodes count as switches.
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


_SENDER, _NETWORK, _RECEIVER = range(3)  # whose first link a hop's link is counted from
_FAR = np.iinfo(np.int64).max // 4


class Hops(NamedTuple):
    """Links that messages cross, message by message: `link` carries `share` of message number `message`.

    first: where each message's hops begin (each has at least one); latency: seconds of each message.
    """

    message: Integers
    link: Integers
    share: Floats
    first: Integers
    latency: Floats


class Routes:
    """Routes of a fabric, found on demand, one for all pairs of GPUs in equal places of units with equal attachments."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self._units = [_ShortestRoutes(kind.nodes, kind.edges) for kind in fabric.classes]
        first = len(fabric.edges) - len(fabric.trunks)
        self._switches = _ShortestRoutes(len(fabric.switches), fabric.trunks, first)
        self._known: dict[int, Floats] = {}  # [3, hops] of a route by its key: side, link from the side's first, share

    def hops(self, source: Integers, target: Integers) -> Hops:
        """Return the hops of messages between GPUs, by index. Raises ConfigError for two that no links connect."""
        fabric = self.fabric
        units = fabric.unit[source], fabric.unit[target]
        total = int(fabric.place.max()) + 1
        # A key combines the places of both ends, and whether they are in one unit. Small integers are sorted much faster.
        keys = fabric.place[source] * total + fabric.place[target] + total * total * (units[0] == units[1])
        keys = keys.astype(np.min_scalar_type(2 * total * total))
        different, example, which = np.unique(keys, return_index=True, return_inverse=True)
        for key, message in zip(different.tolist(), example.tolist(), strict=True):
            if key not in self._known:
                self._known[key] = self._find(int(source[message]), int(target[message]))
        routes = [self._known[key] for key in different.tolist()]
        counts = np.array([route.shape[1] for route in routes])
        count = counts[which.ravel()]
        first = np.cumsum(count) - count
        message = np.repeat(np.arange(len(count)), count)
        hop = np.arange(len(message)) + np.repeat((np.cumsum(counts) - counts)[which.ravel()] - first, count)
        side, link, share = np.concatenate(routes, axis=1)[:, hop]
        base = np.stack([fabric.first_link[units[0]], np.zeros_like(units[0]), fabric.first_link[units[1]]])
        links = link.astype(np.int64) + base[side.astype(np.int64), message]
        latency: Floats = np.bincount(message, share * fabric.latency[links], len(count)).astype(float)
        return Hops(message, links, share, first, latency)

    def _find(self, source: int, target: int) -> Floats:
        fabric = self.fabric
        if source == target:
            return np.array([[_NETWORK], [len(fabric.bandwidth) - 1], [1.0]])
        (i, j), units = fabric.slot[[source, target]].tolist(), fabric.unit[[source, target]]
        (kind_a, from_switches), (kind_b, to_switches) = (fabric.attachments[k] for k in fabric.attachment[units])
        a, b = self._units[kind_a], self._units[kind_b]
        if units[0] == units[1]:
            return np.array([(_SENDER, *hop) for hop in a.between(i, j)]).T
        classes = (fabric.classes[kind] for kind in (kind_a, kind_b))
        exits, entries = ([kind.edges[port].b for port in kind.ports] for kind in classes)
        network = np.array([self._switches.costs(switch, to_switches) for switch in from_switches])
        cost = a.costs(i, exits)[:, None] + network + b.costs(j, entries)
        if cost.min(initial=_FAR) >= _FAR:
            near, far = (fabric.cluster.gpus[gpu] for gpu in (source, target))
            raise ConfigError(
                f"cluster {fabric.cluster.name!r}: no links lead from {near.node} on {near.host} to {far.node} on {far.host}; "
                "connect their hosts' cards to switches that reach each other"
            )
        best = np.argwhere(cost == cost.min()).tolist()
        hops: list[tuple[int, int, float]] = []
        for p, q in best:
            hops += [(_SENDER, *hop) for hop in a.between(i, exits[p])]
            hops += [(_NETWORK, *hop) for hop in self._switches.between(from_switches[p], to_switches[q])]
            # The receiver's way in is its way out, backwards.
            hops += [(_RECEIVER, link ^ 1, share) for link, share in b.between(j, entries[q])]
        return np.array(hops).T * [[1.0], [1.0], [1 / len(best)]]


class _ShortestRoutes:
    """Shortest routes between the nodes of a graph of a few hundred nodes.

    The edges are numbered from `first` on; link 2n leads along edge n, link 2n+1 back.
    """

    def __init__(self, nodes: int, edges: Sequence[Edge[int]], first: int = 0) -> None:
        graph: nx.DiGraph[int] = nx.DiGraph()
        graph.add_nodes_from(range(nodes))
        for number, edge in enumerate(edges, start=first):
            graph.add_edge(edge.a, edge.b, link=2 * number, cost=edge.cost)
            graph.add_edge(edge.b, edge.a, link=2 * number + 1, cost=edge.cost)
        self._graph = graph
        self._search = cache(lambda source: nx.dijkstra_predecessor_and_distance(graph, source, weight="cost"))
        self.between = cache(self._between)

    def costs(self, source: int, targets: Sequence[int]) -> Integers:
        """Return the cost of the way to each target, _FAR where there is none."""
        _, distance = self._search(source)
        return np.array([distance.get(target, _FAR) for target in targets], dtype=np.int64)

    def _between(self, source: int, target: int) -> list[tuple[int, float]]:
        """Return (link, share) of all shortest routes. The traffic of each node is split evenly, as routers do."""
        before, distance = self._search(source)
        share = defaultdict(float, {target: 1.0})
        hops = []
        for node in sorted(distance, key=lambda node: (-distance[node], node)):
            for other in before[node] if share[node] else ():
                part = share[node] / len(before[node])
                share[other] += part
                hops.append((self._graph.edges[other, node]["link"], part))
        return hops
