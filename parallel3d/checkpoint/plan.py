"""Which rank writes what: of copies one, so that all ranks write about as much."""

from __future__ import annotations

from collections.abc import Sequence

# A box for the plan: the tensor's name, the box's start and shape, its bytes.
Offer = tuple[str, Sequence[int], Sequence[int], int]


def assign(offers: Sequence[Sequence[Offer]]) -> list[list[int]]:
    """For each rank, which of its offers (by place) it writes: of equal boxes of one tensor one, of the least laden rank."""
    holders: dict[tuple[str, tuple[int, ...], tuple[int, ...]], dict[int, int]] = {}
    size: dict[tuple[str, tuple[int, ...], tuple[int, ...]], int] = {}
    for rank, own in enumerate(offers):
        for place, (name, start, shape, num_bytes) in enumerate(own):
            key = (name, tuple(start), tuple(shape))
            holders.setdefault(key, {}).setdefault(rank, place)
            size[key] = num_bytes
    load = [0] * len(offers)
    chosen: list[list[int]] = [[] for _ in offers]
    # Those without a choice first, then the largest first.
    for key in sorted(holders, key=lambda key: (len(holders[key]) > 1, -size[key], key)):
        rank = min(holders[key], key=lambda rank: (load[rank], rank))
        load[rank] += size[key]
        chosen[rank].append(holders[key][rank])
    return [sorted(own) for own in chosen]
