"""Which links a message between two GPUs takes: the shortest route, spread evenly over equal ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import networkx as nx
import numpy as np

from parallel3d.errors import ConfigError
from parallel3d.planner.network.fabric import Edge, Fabric, Floats, Integers

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
        self._first_place = np.cumsum([0, *(fabric.classes[kind].gpus for kind, _ in fabric.attachments)])
        self._units = [_ShortestRoutes(kind.nodes, kind.edges) for kind in fabric.classes]
        first = len(fabric.edges) - len(fabric.trunks)
        self._switches = _ShortestRoutes(len(fabric.switches), fabric.trunks, first)
        self._known: dict[int, Floats] = {}  # [3, hops] of a route by its key: side, link from the side's first, share

    def hops(self, source: Integers, target: Integers) -> Hops:
        """Return the hops of messages between GPUs, by index. Raises ConfigError for two that no links connect."""
        fabric = self.fabric
        units = fabric.unit[source], fabric.unit[target]
        places = [
            self._first_place[fabric.attachment[u]] + fabric.slot[g]
            for u, g in zip(units, (source, target), strict=True)
        ]
        total = int(self._first_place[-1])
        # A key: the places of both ends, and whether they are of one unit.
        keys = places[0] * total + places[1] + total * total * (units[0] == units[1])
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
        latency: Floats = np.bincount(message, weights=share * fabric.latency[links], minlength=len(count)).astype(
            float
        )
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
        exits, entries = (fabric.classes[kind].port_nodes for kind in (kind_a, kind_b))
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
