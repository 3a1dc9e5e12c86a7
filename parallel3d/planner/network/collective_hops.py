"""What members of a collective send each other: ring, hierarchical and tree, as messages between places in a group."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from parallel3d.costs.work import CollectiveKind
from parallel3d.planner.network.fabric import Floats, Integers

# Members by locality: of each unit the size of each of its islands. ((4, 4), (4,)): two islands in a host, one in another.
Shape = tuple[tuple[int, ...], ...]

# Of a ring's bandwidth, what a tree reaches: NCCL's own tuning reckons with this when it chooses.
_TREE_EFFICIENCY = 0.92


@dataclass(frozen=True)
class Phase:
    """Messages that a group sends at once. source, target: members' places in the group.

    share: bytes of each message over those of the collective's tensor; steps: how often the message's latency counts;
    lanes: where each series of messages that wait for each other begins: the latency of a phase is its slowest lane's.
    """

    source: Integers
    target: Integers
    share: Floats
    steps: Floats
    lanes: Integers


class _Message(NamedTuple):
    source: int
    target: int
    share: float
    steps: float


@lru_cache(maxsize=1024)
def algorithms(kind: CollectiveKind, shape: Shape) -> tuple[tuple[Phase, ...], ...]:
    """The ways in which a group of `shape` can do it, as NCCL has them; each is a series of phases.

    ring: through all members; over as many rails between units (and between islands of a unit) as each has members, as NCCL's
    channels are laid. hierarchical: reduce-scatter in the unit, then across on all rails, then all-gather in the unit. tree:
    a double binary tree over units (Sanders, Speck, Träff 2009), for all_reduce. A ring has the fewest bytes, the others
    fewer steps. A group that lacks an island's or unit's level gets the ring in place of all.
    """
    passes = 2 if kind == "all_reduce" else 1
    ring = _ring(shape, passes)
    if len(shape) == 1:
        return (ring, ring, ring)
    hierarchical = _hierarchical(shape, passes) if max(map(sum, shape)) > 1 else ring
    return (ring, hierarchical, _tree(shape) if kind == "all_reduce" else ring)


def _ring(shape: Shape, passes: int) -> tuple[Phase, ...]:
    members = sum(map(sum, shape))
    units = _units(shape)
    messages = [message for unit in units for message in _inside(unit)] + _across([_members(unit) for unit in units])
    return (_phase([messages], passes * (members - 1) / members, passes),)


def _hierarchical(shape: Shape, passes: int) -> tuple[Phase, ...]:
    units = _units(shape)
    sizes = [sum(sizes) for sizes in shape]
    local = [
        [_Message(m.source, m.target, m.share * (size - 1) / size, m.steps) for m in _inside(unit)]
        for unit, size in zip(units, sizes, strict=True)
        if size > 1
    ]
    across = _across([_members(unit) for unit in units])
    rails = min(sizes)
    lanes = [
        [message._replace(steps=message.steps * rails) for message in across[rail::rails]] for rail in range(rails)
    ]
    return (_phase(local, passes, passes), _phase(lanes, passes * (len(units) - 1) / len(units), passes))


def _tree(shape: Shape) -> tuple[Phase, ...]:
    """Every tensor's half goes up one tree and down again; what is a leaf in one tree is inside in the other."""
    units = _units(shape)
    members = sum(map(sum, shape))
    local = [message for unit in units for message in _inside(unit)]
    local = [m._replace(share=2 * m.share * (members - 1) / members, steps=2 * m.steps / len(units)) for m in local]
    places = [_members(unit) for unit in units]
    rails, last = min(map(len, places)), len(units) - 1
    depth = max(_depth(node, len(units)) for node in range(len(units)))
    pairs = [(node, _parent(node, len(units))) for node in range(1, len(units))]
    pairs += [(last - child, last - parent) for child, parent in pairs]
    pairs += [(parent, child) for child, parent in pairs]
    steps = 2 * depth / (len(pairs) * rails)
    between = [
        _Message(_rail(places[a], rail, rails), _rail(places[b], rail, rails), 0.5 / rails, steps)
        for a, b in pairs
        for rail in range(rails)
    ]
    return (_phase([local + between], 1 / _TREE_EFFICIENCY, 1),)


def _units(shape: Shape) -> list[list[range]]:
    """Places of members, by unit and island."""
    starts = iter(accumulate((size for unit in shape for size in unit), initial=0))
    return [[range(start := next(starts), start + size) for size in unit] for unit in shape]


def _members(unit: list[range]) -> range:
    return range(unit[0].start, unit[-1].stop)


def _inside(unit: list[range]) -> list[_Message]:
    """A ring through the members of a unit: through each island, and from island to island."""
    return [message for island in unit for message in _across([range(i, i + 1) for i in island])] + _across(unit)


def _across(blocks: list[range]) -> list[_Message]:
    """A ring from block to block, on as many rails as each block has members."""
    if len(blocks) == 1:
        return []
    rails = min(map(len, blocks))
    steps = (len(blocks) - 1) / (len(blocks) * rails)
    return [
        _Message(_rail(block, rail, rails), _rail(following, rail, rails), 1 / rails, steps)
        for block, following in zip(blocks, [*blocks[1:], blocks[0]], strict=True)
        for rail in range(rails)
    ]


def _rail(block: range, rail: int, rails: int) -> int:
    return block[rail * len(block) // rails]


def _parent(node: int, count: int) -> int:
    """In the tree whose root is 0 and whose odd nodes are leaves."""
    bit = node & -node
    parent = (node ^ bit) | (bit << 1)
    return parent if parent < count else node ^ bit


def _depth(node: int, count: int) -> int:
    depth = 0
    while node:
        node, depth = _parent(node, count), depth + 1
    return depth


def _phase(lanes: list[list[_Message]], bytes_factor: float, steps_factor: float) -> Phase:
    messages = [message for lane in lanes for message in lane]
    first = list(accumulate(map(len, lanes[:-1]), initial=0))
    source, target, share, steps = (np.array(column) for column in zip(*messages, strict=True))
    return Phase(source, target, bytes_factor * share, steps_factor * steps, np.array(first))
