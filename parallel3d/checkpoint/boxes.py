"""Axis-aligned boxes of tensors: their intersections, and the boxes that a flat range consists of. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import add, sub

from parallel3d.parameters import Slicing


@dataclass(frozen=True)
class Box:
    """Elements start[d] to start[d] + shape[d] along each dim d of a tensor; its one element for a 0-dim tensor."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def stop(self) -> tuple[int, ...]:
        """Index after the last element along each dim."""
        return tuple(map(add, self.start, self.shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def common(self, other: Box) -> Box | None:
        """Return the intersection with another box, or None if it is empty."""
        start = tuple(map(max, self.start, other.start))
        shape = tuple(map(sub, map(min, self.stop, other.stop), start))
        return Box(start, shape) if min(shape, default=1) > 0 else None

    def along(self, d: int, start: int, size: int) -> Box:
        """Return the box with another range along dim d."""
        return Box((*self.start[:d], start, *self.start[d + 1 :]), (*self.shape[:d], size, *self.shape[d + 1 :]))

    def without(self, other: Box) -> list[Box]:
        """Return disjoint boxes that cover this one except `other`: at most two for each dim."""
        common = self.common(other)
        if common is None:
            return [self]
        rest, left = [], self
        for d, (start, stop) in enumerate(zip(common.start, common.stop, strict=True)):
            for low, high in ((left.start[d], start), (stop, left.stop[d])):
                if low < high:
                    rest.append(left.along(d, low, high - low))
            left = left.along(d, start, stop - start)
        return rest

    def slices(self, origin: Sequence[int]) -> tuple[slice, ...]:
        """Return the index of the box in a tensor whose first element is at `origin`."""
        pairs = zip(self.start, self.shape, origin, strict=True)
        return tuple(slice(start - first, start - first + size) for start, size, first in pairs)


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box of all elements of a tensor of this shape."""
    return Box((0,) * len(shape), tuple(shape))


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of elements start to stop of the flattened tensor, each a range of it, in order: at most 2 dim - 1."""
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
    """Map a box of a rank's part of a tensor to the whole: yield (box of the part, box of the whole) for each range."""
    if slicing is None:
        yield box, box
        return
    dim, begin = slicing.dim, 0
    for start, stop in slicing.ranges:
        here = box.common(box.along(dim, begin, stop - start))
        if here is not None:
            yield here, here.along(dim, here.start[dim] + start - begin, here.shape[dim])
        begin += stop - start


def cut(box: Box, most: int) -> Iterator[Box]:
    """Yield the box cut, along the first dim that is longer than 1, into boxes of at most `most` elements (or one)."""
    if box.numel <= most or box.numel <= 1:
        yield box
        return
    d = next(d for d, size in enumerate(box.shape) if size > 1)
    row = box.numel // box.shape[d]
    rows = max(1, most // row)
    for begin in range(0, box.shape[d], rows):
        part = box.along(d, box.start[d] + begin, min(rows, box.shape[d] - begin))
        yield from cut(part, most) if row > most else (part,)
