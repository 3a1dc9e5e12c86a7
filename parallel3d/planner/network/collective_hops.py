"""Messages between the members of a collective: ring, hierarchical and tree."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np

from parallel3d.costs.work import CollectiveKind
from parallel3d.planner.network.fabric import Floats, Integers

# Sizes of the islands in each unit; members are ordered by locality. ((4, 4), (4,)): two islands in one host, one in another.
Shape = tuple[tuple[int, ...], ...]

# Share of a ring's bandwidth that a tree reaches, as NCCL's own tuning has it.
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


class _Message(NamedTuple):
    source: int
    target: int
    share: float
    steps: float


# The members of a unit, by island. A block is the members of an island, or of a unit.
Unit = list[range]


@lru_cache(maxsize=1024)
def algorithms(kind: CollectiveKind | Literal["send"], shape: Shape) -> tuple[tuple[Phase, ...], ...]:
    """Return NCCL's algorithms for a group of `shape`: ring, hierarchical and tree, each a series of phases.

    - ring: through all members; between units (and between islands of a unit) over as many rails as each has members, as
      NCCL's channels are laid. It has the fewest bytes; the others have fewer steps.
    - hierarchical: reduce-scatter in the unit, then across on all rails, then all-gather in the unit.
    - tree: a double binary tree over units (Sanders, Speck, Träff 2009), for all_reduce.

    A group in one unit has a ring alone; a "send" is one message.
    """
    if kind == "send":
        return ((_phase([[_Message(0, 1, 1.0, 1.0)]], 1, 1),),)
    passes = 2 if kind == "all_reduce" else 1
    starts = iter(accumulate((size for unit in shape for size in unit), initial=0))
    units = [[range(start := next(starts), start + size) for size in unit] for unit in shape]
    blocks = [range(unit[0].start, unit[-1].stop) for unit in units]
    inside = [message for unit in units for message in _inside(unit)]
    members = blocks[-1].stop
    ring = (_phase([inside + _across(blocks)], passes * (members - 1) / members, passes),)
    if len(units) == 1:
        return (ring,)
    hierarchical = _hierarchical(units, blocks, passes) if max(map(len, blocks)) > 1 else ring
    return (ring, hierarchical, _tree(inside, blocks) if kind == "all_reduce" else ring)


def _hierarchical(units: list[Unit], blocks: list[range], passes: int) -> tuple[Phase, ...]:
    local = [
        [message._replace(share=message.share * (len(block) - 1) / len(block)) for message in _inside(unit)]
        for unit, block in zip(units, blocks, strict=True)
        if len(block) > 1
    ]
    across = _across(blocks)
    rails = min(map(len, blocks))
    lanes = [
        [message._replace(steps=message.steps * rails) for message in across[rail::rails]] for rail in range(rails)
    ]
    return (_phase(local, passes, passes), _phase(lanes, passes * (len(units) - 1) / len(units), passes))


def _tree(inside: list[_Message], blocks: list[range]) -> tuple[Phase, ...]:
    """Each half of the tensor goes up one of two trees and down again; the leaves of one tree are inner nodes of the other."""
    members, count = blocks[-1].stop, len(blocks)
    local = [m._replace(share=2 * m.share * (members - 1) / members, steps=2 * m.steps / count) for m in inside]
    rails = min(map(len, blocks))
    depth = (count - 1).bit_length()  # on each way up the lowest bit of a node's number rises
    pairs = [(node, _parent(node, count)) for node in range(1, count)]
    pairs += [(count - 1 - child, count - 1 - parent) for child, parent in pairs]
    pairs += [(parent, child) for child, parent in pairs]
    steps = 2 * depth / (len(pairs) * rails)
    between = [
        _Message(_rail(blocks[a], rail, rails), _rail(blocks[b], rail, rails), 0.5 / rails, steps)
        for a, b in pairs
        for rail in range(rails)
    ]
    return (_phase([local + between], 1 / _TREE_EFFICIENCY, 1),)


def _inside(unit: Unit) -> list[_Message]:
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
    """Return a node's parent in the tree whose root is 0 and whose odd nodes are leaves."""
    bit = node & -node
    parent = (node ^ bit) | (bit << 1)
    return parent if parent < count else node ^ bit


def _phase(lanes: list[list[_Message]], bytes_factor: float, steps_factor: float) -> Phase:
    messages = [message for lane in lanes for message in lane]
    first = list(accumulate(map(len, lanes[:-1]), initial=0))
    source, target, share, steps = (np.array(column) for column in zip(*messages, strict=True))
    return Phase(source, target, bytes_factor * share, steps_factor * steps, np.array(first))
