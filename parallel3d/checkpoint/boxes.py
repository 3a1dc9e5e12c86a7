"""Axis-aligned boxes of tensors: what a flat range is made of, and what one box has in common with others. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parallel3d.parameters import Slicing


@dataclass(frozen=True)
class Box:
    """Elements start[d] to start[d] + shape[d] along each dim d of a tensor. The box of a 0-dim tensor is its one element."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def stop(self) -> tuple[int, ...]:
        """Behind the last element along each dim."""
        return tuple(start + size for start, size in zip(self.start, self.shape, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def common(self, other: Box) -> Box | None:
        """Return the intersection with another box, or None if it is empty."""
        start = tuple(map(max, self.start, other.start))
        shape = tuple(min(a, b) - s for a, b, s in zip(self.stop, other.stop, start, strict=True))
        return Box(start, shape) if all(size > 0 for size in shape) else None

    def without(self, other: Box) -> list[Box]:
        """Disjoint boxes that hold the rest of this one: at most two for each dim."""
        common = self.common(other)
        if common is None:
            return [self]
        rest, start, shape = [], list(self.start), list(self.shape)
        for d in range(len(shape)):
            end = start[d] + shape[d]
            for low, high in ((start[d], common.start[d]), (common.stop[d], end)):
                if low < high:
                    rest.append(Box((*start[:d], low, *start[d + 1 :]), (*shape[:d], high - low, *shape[d + 1 :])))
            start[d], shape[d] = common.start[d], common.shape[d]
        return rest

    def slices(self, origin: Sequence[int]) -> tuple[slice, ...]:
        """Where the box lies in a tensor whose first element is at `origin`."""
        pairs = zip(self.start, self.shape, origin, strict=True)
        return tuple(slice(start - first, start - first + size) for start, size, first in pairs)


def whole_box(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Boxes that hold elements start to stop of the flattened tensor, each a range of it, in order: at most 2 dim - 1."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield Box((start,) * len(shape), (stop - start,) * len(shape))
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: Sequence[int], index: int, start: int, stop: int) -> Iterator[Box]:
    for box in boxes_of_range(shape[1:], start, stop):
        yield Box((index, *box.start), (1, *box.shape))


def in_whole(box: Box, slicing: Slicing | None) -> Iterator[tuple[Box, Box]]:
    """A box of a rank's part of a tensor as boxes of the whole: (of the part, of the whole), a pair for each range it meets."""
    if slicing is None:
        yield box, box
        return
    begin = 0
    for start, stop in slicing.ranges:
        ranged = list(box.shape), list(box.start)
        ranged[0][slicing.dim], ranged[1][slicing.dim] = stop - start, begin
        here = box.common(Box(tuple(ranged[1]), tuple(ranged[0])))
        if here is not None:
            there = list(here.start)
            there[slicing.dim] += start - begin
            yield here, Box(tuple(there), here.shape)
        begin += stop - start


def cut(box: Box, most: int) -> Iterator[Box]:
    """The box in boxes of at most `most` elements (or one), cut along the first dim that is longer than 1."""
    if box.numel <= most or box.numel <= 1:
        yield box
        return
    d = next(d for d, size in enumerate(box.shape) if size > 1)
    row = box.numel // box.shape[d]
    rows = max(1, most // row)
    for begin in range(0, box.shape[d], rows):
        size = min(rows, box.shape[d] - begin)
        part = Box(
            (*box.start[:d], box.start[d] + begin, *box.start[d + 1 :]), (*box.shape[:d], size, *box.shape[d + 1 :])
        )
        yield from cut(part, most) if row > most else (part,)
