"""Which links a message between two GPUs takes: the shortest route, spread evenly over equal ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from heapq import heappop, heappush
from typing import NamedTuple

import networkx as nx
import numpy as np

from parallel3d.errors import ConfigError
from parallel3d.planner.network.fabric import Fabric, Floats, Integers, UnitClass

_SENDER, _NETWORK, _RECEIVER = range(3)  # whose links a hop's number counts from
_FAR = np.iinfo(np.int64).max // 4


class Hops(NamedTuple):
    """What messages cross, message by message: `link` carries `share` of message number `message`.

    first: where each message's hops begin (each has at least one); latency: seconds of each message.
    """

    message: Integers
    link: Integers
    share: Floats
    first: Integers
    latency: Floats


class _Hop(NamedTuple):
    side: int
    link: int
    share: float


class Routes:
    """Routes of a fabric, found on demand, one for all pairs of GPUs that lie alike in alike units."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        sizes = [fabric.classes[kind].gpus for kind, _ in fabric.attachments]
        self._first_place = np.cumsum([0, *sizes])
        self._keys = np.zeros(0, dtype=np.int64)  # sorted
        self._numbers = np.zeros(0, dtype=np.int64)  # of the routes of these keys
        self._found: list[list[_Hop]] = []
        self._local = [_LocalRoutes(unit_class) for unit_class in fabric.classes]

    def hops(self, source: Integers, target: Integers) -> Hops:
        """Of messages from GPUs to GPUs, by index. Raises ConfigError for two that no links connect."""
        fabric = self.fabric
        units = fabric.unit[source], fabric.unit[target]
        places = [
            self._first_place[fabric.attachment[u]] + fabric.slot[g]
            for u, g in zip(units, (source, target), strict=True)
        ]
        total = int(self._first_place[-1])
        # A key: the places of both ends, and whether they are of one unit.
        keys = places[0] * total + places[1] + total * total * (units[0] == units[1])
        route = self._lookup(keys, total, source, target)
        counts, starts, side, link, share = self._packed
        count = counts[route]
        first = np.cumsum(count) - count
        message = np.repeat(np.arange(len(route)), count)
        hop = np.arange(len(message)) + np.repeat(starts[route] - first, count)
        base = np.stack([fabric.first_link[units[0]], np.zeros_like(units[0]), fabric.first_link[units[1]]])
        links = link[hop] + base[side[hop], message]
        shares = share[hop]
        latency: Floats = np.bincount(message, weights=shares * fabric.latency[links], minlength=len(route)).astype(
            np.float64
        )
        return Hops(message, links, shares, first, latency)

    def _lookup(self, keys: Integers, total: int, source: Integers, target: Integers) -> Integers:
        at = np.searchsorted(self._keys, keys)
        known = np.zeros(len(keys), dtype=bool)
        if len(self._keys):
            known = self._keys[np.minimum(at, len(self._keys) - 1)] == keys
        if not known.all():
            new, example = np.unique(keys, return_index=True)
            unknown = ~known[example]
            new, example = new[unknown], example[unknown]
            numbers = np.arange(len(self._found), len(self._found) + len(new))
            for key, message in zip(new, example, strict=True):
                route = self._find(int(key), total)
                if not route:
                    raise self._unconnected(int(source[message]), int(target[message]))
                self._found.append(route)
            merged = np.concatenate([self._keys, new])
            order = np.argsort(merged)
            self._keys, self._numbers = merged[order], np.concatenate([self._numbers, numbers])[order]
            self.__dict__.pop("_packed", None)
            at = np.searchsorted(self._keys, keys)
        return self._numbers[at]

    @cached_property
    def _packed(self) -> tuple[Integers, Integers, Integers, Integers, Floats]:
        counts = np.array([len(route) for route in self._found], dtype=np.int64)
        side, link, share = zip(*(hop for route in self._found for hop in route), strict=True)
        starts = np.cumsum(counts) - counts
        return counts, starts, np.array(side), np.array(link), np.array(share, dtype=np.float64)

    def _find(self, key: int, total: int) -> list[_Hop]:
        same_unit, (source, target) = key // total**2, divmod(key % total**2, total)
        ends = []
        for place in (source, target):
            attachment = int(np.searchsorted(self._first_place, place, side="right")) - 1
            kind, switches = self.fabric.attachments[attachment]
            ends.append((self._local[kind], int(place - self._first_place[attachment]), switches))
        (a, i, from_switches), (b, j, to_switches) = ends
        if same_unit and i == j:
            return [_Hop(_NETWORK, len(self.fabric.bandwidth) - 1, 1.0)]
        if same_unit:
            return [_Hop(_SENDER, link, share) for link, share in a.between(i, j)]
        hops: list[_Hop] = []
        for p, q, part in self._best_ports(a.port_costs(i), from_switches, b.port_costs(j), to_switches):
            hops += [_Hop(_SENDER, link, share * part) for link, share in a.to_port(i, p)]
            hops += [
                _Hop(_NETWORK, x, share * part) for x, share in self._network.between(from_switches[p], to_switches[q])
            ]
            # The receiver's way in is its way out, backwards.
            hops += [_Hop(_RECEIVER, link ^ 1, share * part) for link, share in b.to_port(j, q)]
        return hops

    def _unconnected(self, source: int, target: int) -> ConfigError:
        a, b = (self.fabric.cluster.gpus[gpu] for gpu in (source, target))
        return ConfigError(
            f"cluster {self.fabric.cluster.name!r}: no links lead from {a.node} on {a.host} to {b.node} on {b.host}; "
            "connect their hosts' cards to switches that reach each other"
        )

    def _best_ports(
        self, leave: Integers, from_switches: Sequence[int], enter: Integers, to_switches: Sequence[int]
    ) -> list[tuple[int, int, float]]:
        """(port, port, share) of the shortest ways from unit to unit; none where no way leads."""
        if not from_switches or not to_switches:
            return []
        network = self._network.cost[np.ix_(from_switches, to_switches)]
        cost = leave[:, None] + network + enter[None, :]
        best = np.argwhere(cost == cost.min())
        if cost.min() >= _FAR:
            return []
        return [(int(p), int(q), 1 / len(best)) for p, q in best]

    @cached_property
    def _network(self) -> _Switches:
        return _Switches(self.fabric)


class _LocalRoutes:
    """Routes inside of units of one class: (local link, share) each."""

    def __init__(self, unit_class: UnitClass) -> None:
        self._class = unit_class
        self._graph: nx.Graph = nx.Graph()
        self._graph.add_nodes_from(range(unit_class.gpus))
        self._links: dict[tuple[int, int], int] = {}
        for number, edge in enumerate(unit_class.edges):
            if edge.b >= 0:
                self._graph.add_edge(edge.a, edge.b, cost=edge.cost)
                self._links |= {(edge.a, edge.b): 2 * number, (edge.b, edge.a): 2 * number + 1}
        self._shortest = cache(self._shortest_from)

    def _shortest_from(self, source: int) -> tuple[dict[int, list[int]], dict[int, int]]:
        before, distance = nx.dijkstra_predecessor_and_distance(self._graph, source, weight="cost")
        return before, {node: int(cost) for node, cost in distance.items()}

    def between(self, source: int, target: int) -> list[tuple[int, float]]:
        before, distance = self._shortest(source)
        return [(self._links[a, b], share) for a, b, share in _spread(target, before.__getitem__, distance.__getitem__)]

    def to_port(self, source: int, port: int) -> list[tuple[int, float]]:
        number = self._class.ports[port]
        return [*self.between(source, self._class.edges[number].a), (2 * number, 1.0)]

    def port_costs(self, source: int) -> Integers:
        _, distance = self._shortest(source)
        ports = [self._class.edges[number] for number in self._class.ports]
        return np.array([distance.get(port.a, _FAR) + port.cost for port in ports], dtype=np.int64)


class _Switches:
    """Routes between network switches: (link, share) each. cost: [switch, switch], in the routes' own unit."""

    def __init__(self, fabric: Fabric) -> None:
        self._links: list[dict[int, int]] = [{} for _ in fabric.switches]
        self._costs: list[dict[int, int]] = [{} for _ in fabric.switches]
        for a, b, edge in fabric.trunks:
            self._links[a][b], self._links[b][a] = 2 * edge, 2 * edge + 1
            self._costs[a][b] = self._costs[b][a] = fabric.edges[edge].cost
        self.cost = self._all_costs()
        self.between = cache(self._between)
        self._shortest = cache(self._shortest_from)

    def _all_costs(self) -> Integers:
        """All shortest ways at once: Bellman-Ford's rounds as min-plus products, a block of sources at a time."""
        count = len(self._costs)
        cost = np.full((count, count), _FAR, dtype=np.int64)
        np.fill_diagonal(cost, 0)
        ends = [(b, a, weight) for b, near in enumerate(self._costs) for a, weight in near.items()]
        if not ends:
            return cost
        into, out_of, weight = np.array(ends, dtype=np.int64).T
        targets, first = np.unique(into, return_index=True)
        block = max(1, (4 << 20) // len(ends))
        for start in range(0, count, block):
            rows = cost[start : start + block]
            changed = True
            while changed:
                better = np.minimum.reduceat(rows[:, out_of] + weight, first, axis=1)
                changed = bool((better < rows[:, targets]).any())
                rows[:, targets] = np.minimum(rows[:, targets], better)
        return cost

    def _between(self, source: int, target: int) -> list[tuple[int, float]]:
        before, distance = self._shortest(source)
        return [(self._links[a][b], share) for a, b, share in _spread(target, before, distance.__getitem__)]

    def _shortest_from(self, source: int) -> tuple[Callable[[int], list[int]], list[int]]:
        distance: list[int] = self.cost[source].tolist()

        def before(node: int) -> list[int]:
            reached = distance[node]
            return [other for other, cost in self._costs[node].items() if distance[other] + cost == reached]

        return cache(before), distance


def _spread(
    target: int, before: Callable[[int], list[int]], distance: Callable[[int], int]
) -> Iterator[tuple[int, int, float]]:
    """(node, next node, share) of all shortest routes to `target`, each node's traffic split evenly, as routers do."""
    share = {target: 1.0}
    farthest = [(-distance(target), target)]
    while farthest:
        _, node = heappop(farthest)
        previous = before(node)
        for other in previous:
            if other not in share:
                share[other] = 0.0
                heappush(farthest, (-distance(other), other))
            share[other] += share[node] / len(previous)
            yield other, node, share[node] / len(previous)
