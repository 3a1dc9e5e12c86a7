"""Boxes of flat ranges, their differences and cuts, against numpy's own indexing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.checkpoint.boxes import Box, boxes_of_range, cut, in_whole, whole_box
from parallel3d.parameters import Slicing

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def marked(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    """How many of the boxes hold each element."""
    counts = np.zeros(shape, int)
    for box in boxes:
        counts[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))] += 1
    return counts


@st.composite
def box_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    starts = [draw(st.integers(0, n - 1)) for n in shape]
    return Box(tuple(starts), tuple(draw(st.integers(1, n - a)) for a, n in zip(starts, shape, strict=True)))


@given(shapes, st.data())
def test_the_boxes_of_a_flat_range_hold_it_exactly_once_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    boxes = list(boxes_of_range(shape, start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    flat = np.arange(numel).reshape(shape)
    held = [flat[box.slices([0] * len(shape))].reshape(-1) for box in boxes]
    assert np.concatenate([*held, np.zeros(0, int)]).tolist() == list(range(start, stop))


@given(st.lists(st.integers(1, 5), max_size=4).map(tuple), st.data())
def test_common_and_without_are_a_boxs_parts(shape: tuple[int, ...], data: st.DataObject) -> None:
    one, other = data.draw(box_in(shape)), data.draw(box_in(shape))
    common = one.common(other)
    both = marked(shape, [one]) & marked(shape, [other])
    assert np.array_equal(marked(shape, [common] if common else []), both)
    assert np.array_equal(marked(shape, one.without(other)), marked(shape, [one]) - both)
    assert len(one.without(other)) <= max(1, 2 * len(shape))


@given(st.lists(st.integers(1, 6), max_size=4).map(tuple), st.integers(1, 40), st.data())
def test_a_box_is_cut_into_small_ones(shape: tuple[int, ...], most: int, data: st.DataObject) -> None:
    box = data.draw(box_in(shape))
    parts = list(cut(box, most))
    assert all(part.numel <= most for part in parts)
    assert np.array_equal(marked(shape, parts), marked(shape, [box]))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), st.data())
def test_boxes_of_a_part_are_those_that_its_slicing_takes_from_the_whole(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    bounds = sorted(data.draw(st.lists(st.integers(0, shape[dim]), min_size=2, max_size=6)))
    ranges = tuple(zip(bounds[::2], bounds[1::2], strict=False))
    slicing = Slicing(dim, shape[dim], ranges)
    whole = torch.arange(math.prod(shape)).view(shape)
    part = slicing.part_of(whole)
    start = data.draw(st.integers(0, part.numel()))
    stop = data.draw(st.integers(start, part.numel()))
    found = []
    for box in boxes_of_range(part.shape, start, stop):
        for here, there in in_whole(box, slicing):
            origin = [0] * len(shape)
            assert torch.equal(part[here.slices(origin)], whole[there.slices(origin)])
            found += part[here.slices(origin)].reshape(-1).tolist()
    assert sorted(found) == sorted(part.reshape(-1)[start:stop].tolist())


@pytest.mark.parametrize(
    ("shape", "start", "stop", "boxes"),
    [
        ((), 0, 1, [Box((), ())]),
        ((7,), 2, 5, [Box((2,), (3,))]),
        ((3, 4), 1, 3, [Box((0, 1), (1, 2))]),
        ((3, 4), 2, 9, [Box((0, 2), (1, 2)), Box((1, 0), (1, 4)), Box((2, 0), (1, 1))]),
        ((3, 4), 0, 12, [whole_box((3, 4))]),
    ],
)
def test_boxes_of_small_ranges(shape: tuple[int, ...], start: int, stop: int, boxes: list[Box]) -> None:
    assert list(boxes_of_range(shape, start, stop)) == boxes
