"""Seconds of messages and collectives on a cluster's links, with contention between all that is sent at the same time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from parallel3d.costs.work import CollectiveKind
from parallel3d.planner.cluster.cluster import Cluster
from parallel3d.planner.network.fabric import Fabric, Floats, Integers, Routes
from parallel3d.planner.search.result import LinkLoad

# Sizes of the islands in each unit; members are ordered by locality. ((4, 4), (4,)): two islands in one host, one in another.
Shape = tuple[tuple[int, ...], ...]

# Share of a ring's bandwidth that a tree reaches, as in NCCL's own tuning.
_TREE_EFFICIENCY = 0.92


@dataclass(frozen=True)
class Phase:
    """Messages that a group sends at the same time.

    - source, target: places of members in the group.
    - share: bytes of each message over those of the collective's tensor; steps: how often the message's latency counts.
    - lanes: where each series of messages that wait for each other begins. The latency of a phase is its slowest lane's.
    """

    source: Integers
    target: Integers
    share: Floats
    steps: Floats
    lanes: Integers


# [messages, 4]: places of the sender and of the receiver, share and steps, see Phase.
_Messages = Floats


@lru_cache(maxsize=1024)
def algorithms(kind: CollectiveKind | Literal["send"], shape: Shape) -> tuple[tuple[Phase, ...], ...]:
    """Return NCCL's algorithms for a group of `shape`: ring, hierarchical and tree, each a series of phases.

    - ring: through all members; between units (and between islands of a unit) over as many rails as each has members, as
      NCCL's channels are laid. It has the fewest bytes; the others have fewer steps.
    - hierarchical: reduce-scatter in the unit, then across on all rails, then all-gather in the unit.
    - tree: a double binary tree over units (Sanders, Speck, Träff 2009), for all_reduce.

    A group in one unit has only a ring; a "send" is one message.
    """
    if kind == "send":
        return ((_phase([np.array([[0.0, 1.0, 1.0, 1.0]])], 1, 1),),)
    passes = 2 if kind == "all_reduce" else 1
    sizes = [sum(unit) for unit in shape]
    members, start = sum(sizes), 0
    inside: list[tuple[int, _Messages]] = []
    for unit, alike in groupby(shape):
        count, size = len(list(alike)), sum(unit)
        starts = np.arange(start, start + count * size, size)[:, None, None]
        inside.append((size, _inside(unit) + starts * (1, 1, 0, 0)))
        start += count * size
    whole = [own.reshape(-1, 4) for _, own in inside]
    ring = (_phase([np.concatenate([*whole, _across(sizes)])], passes * (members - 1) / members, passes),)
    if len(shape) == 1:
        return (ring,)
    hierarchical = _hierarchical(inside, sizes, passes) if max(sizes) > 1 else ring
    return (ring, hierarchical, _tree(np.concatenate(whole), sizes) if kind == "all_reduce" else ring)


def _hierarchical(inside: list[tuple[int, _Messages]], sizes: list[int], passes: int) -> tuple[Phase, ...]:
    """Return the phases of the hierarchical algorithm.

    inside: members of a unit, and messages of neighbouring units that are alike, [units, messages, 4].
    """
    local = [unit for n, own in inside if n > 1 for unit in own * (1, 1, n - 1, 1) / (1, 1, n, 1)]
    across, rails = _across(sizes), min(sizes)
    lanes = [across[rail::rails] * (1, 1, 1, rails) for rail in range(rails)]
    return (_phase(local, passes, passes), _phase(lanes, passes * (len(sizes) - 1) / len(sizes), passes))


def _tree(inside: _Messages, sizes: list[int]) -> tuple[Phase, ...]:
    """Return the phases of a double tree: each half of the tensor goes up one tree and down again.

    The leaves of one tree are inner nodes of the other.
    """
    members, count, at = sum(sizes), len(sizes), _rails(sizes)
    local = inside * (1, 1, 2 * (members - 1), 2) / (1, 1, members, count)
    depth = (count - 1).bit_length()  # on each way up the lowest bit of a node's number rises
    # The tree whose root is 0 and whose odd nodes are leaves; the other one counts from the other end.
    node = np.arange(1, count)
    bit = node & -node
    parent = (node ^ bit) | (bit << 1)
    parent = np.where(parent < count, parent, node ^ bit)
    up = np.concatenate([np.stack([node, parent]), count - 1 - np.stack([node, parent])], axis=1)
    a, b = np.concatenate([up, up[::-1]], axis=1)
    between = _messages(at[a], at[b], 0.5 / min(sizes), 2 * depth / at[a].size)
    return (_phase([np.concatenate([local, between])], 1 / _TREE_EFFICIENCY, 1),)


def _inside(unit: tuple[int, ...]) -> _Messages:
    """Return a ring through the members of a unit: through each island, and from island to island."""
    islands = [_across([1] * size) + (start, start, 0, 0) for size, start in zip(unit, _starts(unit), strict=True)]
    return np.concatenate([*islands, _across(unit)])


def _across(sizes: Sequence[int]) -> _Messages:
    """Return rings over blocks (islands, units or members), on as many rails as each block has members."""
    if len(sizes) == 1:
        return np.zeros((0, 4))
    at = _rails(sizes)
    return _messages(at, np.roll(at, -1, axis=0), 1 / min(sizes), (len(sizes) - 1) / at.size)


def _starts(sizes: Sequence[int]) -> list[int]:
    return list(accumulate(sizes[:-1], initial=0))


def _rails(sizes: Sequence[int]) -> Integers:
    """Return the member of each block on each rail, [blocks, rails]."""
    rails, length = min(sizes), np.array(sizes)[:, None]
    return np.array(_starts(sizes))[:, None] + np.arange(rails) * length // rails


def _messages(source: Integers, target: Integers, share: float, steps: float) -> _Messages:
    return np.stack(np.broadcast_arrays(source.ravel(), target.ravel(), share, steps), axis=1)


def _phase(lanes: list[_Messages], bytes_factor: float, steps_factor: float) -> Phase:
    source, target, share, steps = np.concatenate(lanes).T.copy()
    first = np.array(_starts(list(map(len, lanes))))
    return Phase(source.astype(np.int64), target.astype(np.int64), bytes_factor * share, steps_factor * steps, first)


Kind = CollectiveKind | Literal["send"]
Groups = Sequence[Sequence[int]] | npt.NDArray[np.integer]

_REMEMBERED = 128  # sets of groups
_LISTED_LINKS = 128  # up to here each link is reported by itself


class _Alike(NamedTuple):
    """Groups of one shape. rows: their numbers; members: [row, member] by locality."""

    rows: Integers
    members: Integers
    shape: Shape


class _Sent(NamedTuple):
    """Messages that are sent at the same time by the groups in one phase of an algorithm; size: per byte of the tensor."""

    phases: list[tuple[_Alike, Phase]]
    source: Integers
    target: Integers
    size: Floats
    group: Integers


class Network:
    """Times what GPUs send each other, named by their index in `cluster.gpus`.

    A kind is a collective, or "send": a message from the first to the second member of each group. All groups of one call
    run at the same time. A link shares its bandwidth among all that cross it, so a message takes its latency and as long as
    the busiest link of its route; a "send" also no less than the edge's `message_bandwidth` allows a single message. Messages
    take the shortest route, spread over equally short ones; through another GPU's card if that is shorter (NCCL's PXN). The
    members of a collective are ordered by locality, not as given.

    groups: [groups, members], or [trials, groups, members], whose trials don't disturb each other. nbytes: of each group's
    whole tensor, or of each message. Results are in seconds, and the same for any order of hosts. Raises ConfigError for GPUs
    that no links connect.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.fabric = Fabric(cluster)
        # The kinds of device, and which of them each GPU is.
        kinds = {gpu.device: k for k, gpu in enumerate({gpu.device: gpu for gpu in cluster.gpus}.values())}
        self.devices = list(kinds)
        self.device_of = np.array([kinds[gpu.device] for gpu in cluster.gpus], dtype=np.int64)
        self._at = np.argsort(self.fabric.position)  # GPUs by position, and the unit of each
        self._unit_at = self.fabric.unit[self._at]
        self._routes = Routes(self.fabric)
        self._lines = lru_cache(_REMEMBERED)(self._measure)

    def each(self, kind: Kind, groups: Groups, nbytes: float) -> Floats:
        """Return the seconds of each group, [(trials,) groups].

        All groups of a trial use the algorithm by which the slowest of them is done first.
        """
        seconds = self._by_algorithm(kind, groups, nbytes)
        fastest = seconds.max(axis=2).argmin(axis=0)
        return seconds[fastest, np.arange(seconds.shape[1])].reshape(np.shape(groups)[:-1])

    def link_bytes(self, kind: Kind, groups: Groups, nbytes: float) -> Floats:
        """Return the bytes on each link, [links] in the order of `fabric`, of the algorithm that each() uses."""
        fastest = int(self._by_algorithm(kind, groups, nbytes).max(axis=2).argmin())
        carried = np.zeros(len(self.fabric.bandwidth))
        for sent in _rounds(kind, self._alike(kind, np.array(groups)), fastest):
            carried += nbytes * self._send(kind, sent, np.zeros_like(sent.group))[2]
        return carried

    def loads(self, by_axis: Mapping[str, Floats]) -> tuple[LinkLoad, ...]:
        """Return the load of the links in a step, the slowest first. by_axis: bytes on each link, sums of link_bytes().

        If few links are used, each is listed, in its busier direction. Otherwise links whose ends' names differ only in numbers
        are one entry, with the ranges of these numbers and the bytes of the busiest link.
        """
        total = sum(by_axis.values(), np.zeros(len(self.fabric.bandwidth)))
        busier = np.argmax(total[:-1].reshape(-1, 2), axis=1) + np.arange(0, len(total) - 1, 2)
        used = [int(link) for link in busier if total[link] > 0]
        kind_of = cache(lambda name: re.sub(r"\d+", "#", name) if len(used) > _LISTED_LINKS else name)
        alike: dict[object, list[int]] = {}
        for link in used:
            a, b, *rest = self.fabric.edges[link // 2]
            alike.setdefault((kind_of(a), kind_of(b), *rest), []).append(link)
        loads = []
        for links in alike.values():
            busiest = max(links, key=lambda link: total[link])
            edges = [self.fabric.edges[link // 2] for link in links]
            loads.append(
                LinkLoad(
                    a=_ranges({edge.a: None for edge in edges}),
                    b=_ranges({edge.b: None for edge in edges}),
                    kind=edges[0].kind,
                    nbytes=float(total[busiest]),
                    seconds=float(total[busiest] / self.fabric.bandwidth[busiest]),
                    by_axis={axis: float(carried[busiest]) for axis, carried in by_axis.items()},
                )
            )
        return tuple(sorted(loads, key=lambda load: (-load.seconds, load.kind, load.a, load.b)))

    def _by_algorithm(self, kind: Kind, groups: Groups, nbytes: float) -> Floats:
        """Return seconds, [algorithm, trial, group]."""
        latency, per_byte = self.lines(kind, groups)
        return (latency + per_byte * nbytes).reshape(len(latency), -1, np.shape(groups)[-2])

    def lines(self, kind: Kind, groups: Groups) -> tuple[Floats, Floats]:
        """Return seconds of latency, and seconds per byte, [algorithm, group]: see `each`."""
        members = self._first_alike(np.asarray(groups, dtype=np.int64))
        return self._lines(kind, members.shape, members.tobytes())

    def _first_alike(self, members: Integers) -> Integers:
        """Return the first GPUs of the cluster that have the same links as these, in the same order."""
        fabric = self.fabric
        unit = fabric.unit[members]
        used = np.zeros(len(fabric.attachment), dtype=np.int64)
        used[unit] = 1
        attachments = set(fabric.attachment[used > 0].tolist())
        if len(attachments) > 1:
            return members
        # The n-th of the used units becomes the n-th of all that are like it.
        alike = np.flatnonzero(fabric.attachment == attachments.pop())[(np.cumsum(used) - 1)[unit]]
        return self._at[np.searchsorted(self._unit_at, alike) + fabric.slot[members]]

    def _measure(self, kind: Kind, shape: tuple[int, ...], data: bytes) -> tuple[Floats, Floats]:
        """Return seconds of latency, and seconds per byte, [algorithm, group]. data: of the members, an int64 array."""
        members = np.frombuffer(data, dtype=np.int64).reshape(-1, shape[-1])
        alike = self._alike(kind, members)
        count = max((len(algorithms(kind, group.shape)) for group in alike), default=1)
        latency, per_byte = np.zeros((2, count, len(members)))
        for group in alike if kind != "send" else ():
            latency[:, group.rows] = self.cluster.collective_seconds
        for algorithm in range(count):
            for sent in _rounds(kind, alike, algorithm):
                waited, seconds, _ = self._send(kind, sent, sent.group // shape[-2])
                done = 0
                for group, phase in sent.phases:
                    size = len(group.rows), len(phase.source)
                    part = slice(done, done + size[0] * size[1])
                    lanes = np.add.reduceat(waited[part].reshape(size) * phase.steps, phase.lanes, axis=1)
                    latency[algorithm, group.rows] += lanes.max(axis=1)
                    per_byte[algorithm, group.rows] += seconds[part].reshape(size).max(axis=1)
                    done = part.stop
        return latency, per_byte

    def _send(self, kind: Kind, sent: _Sent, trial: Integers) -> tuple[Floats, Floats, Floats]:
        """Return each message's seconds of latency, and on its busiest link; and the bytes on each link, [trials * links]."""
        links = len(self.fabric.bandwidth)
        hops = self._routes.hops(sent.source, sent.target)
        link = hops.link + trial[hops.message] * links
        part = sent.size[hops.message] * hops.share
        carried: Floats = np.bincount(link, weights=part, minlength=links).astype(float)
        seconds = carried[link] / self.fabric.bandwidth[hops.link]
        if kind == "send":
            seconds = np.maximum(seconds, part / self.fabric.message[hops.link])
        return hops.latency, np.maximum.reduceat(seconds, hops.first), carried

    def _alike(self, kind: Kind, members: Integers) -> list[_Alike]:
        if kind == "send":
            return [_Alike(np.arange(len(members)), members, ((2,),))]
        if members.shape[1] == 1:
            return []
        fabric = self.fabric
        members = np.take_along_axis(members, np.argsort(fabric.position[members], axis=1), axis=1)
        # How each member is cut off from the one before: 0 not at all, 1 in another island, 2 in another unit.
        unit, island = fabric.unit[members], fabric.island[members]
        cuts = np.where(np.diff(unit, axis=1) != 0, 2, np.diff(island, axis=1) != 0).astype(np.uint8)
        # As bytes, rows are compared in little time.
        patterns = np.ascontiguousarray(cuts).view(f"V{cuts.shape[1]}").ravel()
        _, first, which = np.unique(patterns, return_index=True, return_inverse=True)
        chosen = [(row, np.flatnonzero(which == pattern)) for pattern, row in enumerate(first)]
        return [_Alike(rows, members[rows], _shape(unit[row], island[row])) for row, rows in chosen]


def _shape(unit: Integers, island: Integers) -> Shape:
    """Return the sizes of the islands in each unit. unit, island: of the members of a group, by locality."""
    units = groupby(zip(unit.tolist(), island.tolist(), strict=True), key=itemgetter(0))
    return tuple(tuple(len(list(members)) for _, members in groupby(own)) for _, own in units)


def _rounds(kind: Kind, alike: list[_Alike], algorithm: int) -> Iterator[_Sent]:
    """Yield what is sent at the same time, phase by phase. Groups with fewer algorithms use their last one."""
    ways = [(group, algorithms(kind, group.shape)) for group in alike]
    series = [(group, way[min(algorithm, len(way) - 1)]) for group, way in ways]
    for k in range(max((len(phases) for _, phases in series), default=0)):
        sent = [(group, phases[k]) for group, phases in series if k < len(phases)]
        yield _Sent(
            sent,
            np.concatenate([group.members[:, phase.source].ravel() for group, phase in sent]),
            np.concatenate([group.members[:, phase.target].ravel() for group, phase in sent]),
            np.concatenate([np.tile(phase.share, len(group.rows)) for group, phase in sent]),
            np.concatenate([np.repeat(group.rows, len(phase.source)) for group, phase in sent]),
        )


def _ranges(names: Iterable[str]) -> str:
    """Return one name for names that differ only in numbers: host3.gpu0, host4.gpu1 -> host3-4.gpu0-1."""
    fields = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)
    merged = []
    for number, field in enumerate(fields):
        low, high = (min(field, key=int), max(field, key=int)) if number % 2 else (field[0], field[0])
        merged.append(low if low == high else f"{low}-{high}")
    return "".join(merged)
