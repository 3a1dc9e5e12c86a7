"""Seconds of messages and collectives on a cluster's links: latency and bandwidth, and what others send at the same time."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from parallel3d.costs.work import CollectiveKind
from parallel3d.planner.cluster.cluster import Cluster
from parallel3d.planner.network.collective_hops import Phase, Shape, algorithms
from parallel3d.planner.network.fabric import Fabric, Floats, Integers
from parallel3d.planner.network.routes import Routes
from parallel3d.planner.search.result import LinkLoad

Groups = Sequence[Sequence[int]] | npt.NDArray[np.integer]
Bytes = float | Sequence[float] | Floats

_REMEMBERED, _TRIALS = 256, 8  # sets of groups
_LISTED_LINKS = 128  # up to here each link is reported by itself


class _Line(NamedTuple):
    """Seconds as a line in bytes, for each group: alpha + beta * nbytes."""

    alpha: Floats
    beta: Floats


class _Alike(NamedTuple):
    """Groups of one shape. rows: which; members: [row, member] by locality."""

    rows: Integers
    members: Integers
    shape: Shape


class Network:
    """Times what GPUs, named by their index in `cluster.gpus`, send each other.

    All that one call is given happens at once. A link shares its bandwidth among all that cross it, so a message takes its
    latency and as long as the busiest link of its route, or what the edge's `message_bandwidth` allows one message, where the
    graph says so (copies between two GPUs may not reach what all channels of a collective do). Messages take the shortest
    route, spread over equally short ones; by way of another GPU's card where that is shorter (NCCL's PXN). Groups of a
    collective are ordered by locality, not as given. All sizes are in bytes, of the whole tensor for a collective; all results
    in seconds, the same for any order of hosts. Raises ConfigError for GPUs that no links connect.

    The each_ methods take several trials, [trial, ...], which don't disturb each other.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.fabric = Fabric(cluster)
        # The kinds of device, and of each GPU which of them it is.
        kinds = {gpu.device: k for k, gpu in enumerate({gpu.device: gpu for gpu in cluster.gpus}.values())}
        self.devices = list(kinds)
        self.device_of = np.array([kinds[gpu.device] for gpu in cluster.gpus], dtype=np.int64)
        self._routes = Routes(self.fabric)
        self._lines: OrderedDict[tuple[object, ...], list[_Line]] = OrderedDict()
        self._of_trials: OrderedDict[tuple[object, ...], list[_Line]] = OrderedDict()

    def transfers(self, pairs: Groups, nbytes: Bytes) -> float:
        """The slowest of messages from pairs[i][0] to pairs[i][1]. nbytes: of each, or one for all."""
        return float(self.each_transfer(pairs, nbytes).max(initial=0.0))

    def each_transfer(self, pairs: Groups, nbytes: Bytes) -> Floats:
        """pairs: [pairs, 2] or [trials, pairs, 2]; seconds of each: [pairs] or [trials, pairs]."""
        ends = np.asarray(pairs, dtype=np.int64)
        ends = ends.reshape(*ends.shape[:-1], 2) if ends.size else ends.reshape(0, 2)
        source, target = ends.reshape(-1, 2).T
        size = np.broadcast_to(np.asarray(nbytes, dtype=np.float64), ends.shape[:-1]).ravel()
        per_trial = ends.shape[-2] if ends.ndim == 3 else max(1, len(source))
        trial = np.arange(len(source)) // max(1, per_trial)
        if not len(source):
            return np.zeros(ends.shape[:-1])
        latency, seconds, _ = self._send(source, target, size, trial, message=True)
        return (latency + seconds).reshape(ends.shape[:-1])

    def collective(self, kind: CollectiveKind, groups: Groups, nbytes: Bytes) -> float:
        """The slowest group. nbytes: of each group's whole tensor, or one for all."""
        return float(self.each_collective(kind, groups, nbytes).max(initial=0.0))

    def each_collective(self, kind: CollectiveKind, groups: Groups, nbytes: Bytes) -> Floats:
        """groups: [groups][members], sizes may differ, or an array [trials, groups, members]; seconds: [(trials,) groups].

        All groups of a trial use the algorithm by which the slowest is done first.
        """
        if not isinstance(groups, np.ndarray) or groups.ndim < 3:
            return self._shortest(kind, groups, len(groups), nbytes)[0] if len(groups) else np.zeros(0)
        trials, count, members = groups.shape
        if not trials * count:
            return np.zeros((trials, count))
        return self._shortest(kind, groups.reshape(-1, members), count, nbytes)

    def transfer_bytes(self, pairs: Groups, nbytes: Bytes) -> Floats:
        """Bytes on each link, [links], in `fabric`'s order."""
        ends = np.asarray(pairs, dtype=np.int64).reshape(-1, 2)
        size = np.broadcast_to(np.asarray(nbytes, dtype=np.float64), len(ends))
        return self._send(ends[:, 0], ends[:, 1], size, np.zeros(len(ends), dtype=np.int64), message=True)[2]

    def collective_bytes(self, kind: CollectiveKind, groups: Groups, nbytes: Bytes) -> Floats:
        """Bytes on each link, [links], in `fabric`'s order, by the algorithm that `collective` takes."""
        carried = np.zeros(len(self.fabric.bandwidth))
        if not len(groups):
            return carried
        alike = self._alike(groups)
        shortest = self._by_algorithm(kind, groups, len(groups), nbytes).max(axis=1).argmin()
        weights = np.broadcast_to(np.asarray(nbytes, dtype=np.float64), len(groups))
        for sent in _phases(kind, alike, int(shortest)):
            source, target, size, _ = _messages(sent, weights)
            carried += self._send(source, target, size, np.zeros_like(source))[2]
        return carried

    def loads(self, by_axis: Mapping[str, Floats]) -> tuple[LinkLoad, ...]:
        """What links carry in a step, the slowest first. by_axis: bytes on each link, as the _bytes methods give and add up.

        Where few links are used each is listed, in its busier direction; else, links whose ends' names differ in numbers alone
        are one entry with the ranges of these numbers, and the bytes of the busiest.
        """
        total = sum(by_axis.values(), np.zeros(len(self.fabric.bandwidth)))
        busier = np.argmax(total[:-1].reshape(-1, 2), axis=1) + np.arange(0, len(total) - 1, 2)
        used = [int(link) for link in busier if total[link] > 0]
        alike: dict[object, list[int]] = {}
        for link in used:
            edge = self.fabric.edges[link // 2]
            names = (edge.a, edge.b) if len(used) <= _LISTED_LINKS else (_numberless(edge.a), _numberless(edge.b))
            alike.setdefault((names, *edge[2:]), []).append(link)
        loads = []
        for links in alike.values():
            busiest = max(links, key=lambda link: total[link])
            edges = [self.fabric.edges[link // 2] for link in links]
            loads.append(
                LinkLoad(
                    a=_ranges([edge.a for edge in edges]),
                    b=_ranges([edge.b for edge in edges]),
                    kind=edges[0].kind,
                    nbytes=float(total[busiest]),
                    seconds=float(total[busiest] / self.fabric.bandwidth[busiest]),
                    by_axis={axis: float(carried[busiest]) for axis, carried in by_axis.items()},
                )
            )
        return tuple(sorted(loads, key=lambda load: (-load.seconds, load.kind, load.a, load.b)))

    def _shortest(self, kind: CollectiveKind, groups: Groups, per_trial: int, nbytes: Bytes) -> Floats:
        """Seconds: [trial, group]."""
        seconds = self._by_algorithm(kind, groups, per_trial, nbytes).reshape(3, -1, per_trial)
        algorithm = seconds.max(axis=2).argmin(axis=0)
        return seconds[algorithm, np.arange(seconds.shape[1])]

    def _by_algorithm(self, kind: CollectiveKind, groups: Groups, per_trial: int, nbytes: Bytes) -> Floats:
        """Seconds: [algorithm, group]."""
        if not isinstance(nbytes, (int, float)):  # contention depends on how the sizes are to each other: no line
            sizes = np.tile(np.asarray(nbytes, dtype=np.float64), len(groups) // np.size(nbytes))
            lines = self._measure(kind, self._alike(groups), per_trial, sizes)
            return np.array([line.alpha + line.beta for line in lines])
        lines = self._remembered(kind, groups, per_trial)
        return np.array([line.alpha + line.beta * nbytes for line in lines])

    def _remembered(self, kind: CollectiveKind, groups: Groups, per_trial: int) -> list[_Line]:
        """Lines in bytes, of groups that all have as many."""
        # Trials are repeated for the collectives of one step alone.
        several = per_trial != len(groups)
        known, most = (self._of_trials, _TRIALS) if several else (self._lines, _REMEMBERED)
        whose = (groups.shape, groups.tobytes()) if isinstance(groups, np.ndarray) else tuple(map(tuple, groups))
        key = (kind, per_trial, whose)
        if key not in known:
            known[key] = self._measure(kind, self._alike(groups), per_trial, np.ones(len(groups)))
            if len(known) > most:
                known.popitem(last=False)
        return known[key]

    def _measure(self, kind: CollectiveKind, alike: list[_Alike], per_trial: int, weights: Floats) -> list[_Line]:
        """A line for each algorithm; weights: bytes of each group's tensor, in units of the line's."""
        lines: list[_Line] = []
        single = all(len(group.shape) == 1 for group in alike)
        started = np.zeros(len(weights))
        for group in alike:
            started[group.rows] = self.cluster.collective_seconds
        for algorithm in range(1 if single else 3):
            line = _Line(started.copy(), np.zeros(len(weights)))
            for sent in _phases(kind, alike, algorithm):
                source, target, size, row = _messages(sent, weights)
                latency, seconds, _ = self._send(source, target, size, row // per_trial)
                done = 0
                for group, phase in sent:
                    shape = len(group.rows), len(phase.source)
                    part = slice(done, done + shape[0] * shape[1])
                    lanes = np.add.reduceat(latency[part].reshape(shape) * phase.steps, phase.lanes, axis=1)
                    line.alpha[group.rows] += lanes.max(axis=1)
                    line.beta[group.rows] += seconds[part].reshape(shape).max(axis=1)
                    done = part.stop
            lines.append(line)
        return lines * 3 if single else lines

    def _send(
        self, source: Integers, target: Integers, size: Floats, trial: Integers, message: bool = False
    ) -> tuple[Floats, Floats, Floats]:
        """Of each message seconds of latency, and on its busiest link; bytes on each link of all trials, [trials * links].

        message: sent by itself, not on the channels of a collective.
        """
        links = len(self.fabric.bandwidth)
        if not len(source):
            return np.zeros(0), np.zeros(0), np.zeros(links)
        hops = self._routes.hops(source, target)
        carried_on = hops.link + trial[hops.message] * links
        part = size[hops.message] * hops.share
        carried: Floats = np.bincount(carried_on, weights=part, minlength=(int(trial.max()) + 1) * links).astype(
            np.float64
        )
        seconds = carried[carried_on] / self.fabric.bandwidth[hops.link]
        if message:
            seconds = np.maximum(seconds, part / self.fabric.message[hops.link])
        return hops.latency, np.maximum.reduceat(seconds, hops.first), carried

    def _alike(self, groups: Groups) -> list[_Alike]:
        if isinstance(groups, np.ndarray):
            of_size = [(np.arange(len(groups)), groups.astype(np.int64))]
        else:
            sizes = sorted({len(group) for group in groups})
            chosen_rows = [[row for row, group in enumerate(groups) if len(group) == size] for size in sizes]
            of_size = [
                (np.array(chosen), np.array([groups[row] for row in chosen], dtype=np.int64)) for chosen in chosen_rows
            ]
        return [alike for rows, members in of_size if members.shape[1] > 1 for alike in self._by_shape(rows, members)]

    def _by_shape(self, rows: Integers, members: Integers) -> list[_Alike]:
        fabric = self.fabric
        order = np.argsort(fabric.position[members], axis=1)
        members = np.take_along_axis(members, order, axis=1)
        # By what each member is cut off from the one before: 0 nothing, 1 another island, 2 another unit.
        unit, island = fabric.unit[members], fabric.island[members]
        cuts = np.where(np.diff(unit, axis=1) != 0, 2, np.diff(island, axis=1) != 0).astype(np.uint8)
        if (cuts == cuts[0]).all():
            return [_Alike(rows, members, _shape(cuts[0]))]
        patterns, which = np.unique(cuts, axis=0, return_inverse=True)
        chosen = [np.flatnonzero(which.ravel() == pattern) for pattern in range(len(patterns))]
        return [_Alike(rows[c], members[c], _shape(cuts)) for c, cuts in zip(chosen, patterns, strict=True)]


def _shape(cuts: npt.NDArray[np.uint8]) -> Shape:
    shape = [[1]]
    for cut in cuts.tolist():
        if cut == 2:
            shape.append([1])
        elif cut == 1:
            shape[-1].append(1)
        else:
            shape[-1][-1] += 1
    return tuple(map(tuple, shape))


def _phases(kind: CollectiveKind, alike: list[_Alike], algorithm: int) -> list[list[tuple[_Alike, Phase]]]:
    """What is sent at once, phase by phase."""
    ways = [(group, algorithms(kind, group.shape)[algorithm]) for group in alike]
    count = max((len(phases) for _, phases in ways), default=0)
    return [[(group, phases[i]) for group, phases in ways if i < len(phases)] for i in range(count)]


def _messages(sent: list[tuple[_Alike, Phase]], weights: Floats) -> tuple[Integers, Integers, Floats, Integers]:
    """(source, target, bytes, group) of each message."""
    source = [group.members[:, phase.source].ravel() for group, phase in sent]
    target = [group.members[:, phase.target].ravel() for group, phase in sent]
    size = [np.outer(weights[group.rows], phase.share).ravel() for group, phase in sent]
    row = [np.repeat(group.rows, len(phase.source)) for group, phase in sent]
    return np.concatenate(source), np.concatenate(target), np.concatenate(size), np.concatenate(row)


def _numberless(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _ranges(names: list[str]) -> str:
    """One name for names that differ in numbers: host3.gpu0, host4.gpu1 -> host3-4.gpu0-1."""
    fields = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)
    merged = []
    for number, field in enumerate(fields):
        low, high = (min(field, key=int), max(field, key=int)) if number % 2 else (field[0], field[0])
        merged.append(low if low == high else f"{low}-{high}")
    return "".join(merged)
