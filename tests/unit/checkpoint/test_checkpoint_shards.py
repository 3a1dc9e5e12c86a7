"""Writing boxes and reading others: any box, from any boxes, in any dtype."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel3d.checkpoint import read
from parallel3d.checkpoint.boxes import Box, boxes_of_range, whole_box
from parallel3d.checkpoint.format import MANIFEST, Manifest, StoredTensor, manifest_text
from parallel3d.checkpoint.parts import Part
from parallel3d.checkpoint.read import Reader
from parallel3d.checkpoint.save import assign, write_parts
from parallel3d.errors import CheckpointError


def save(path: Path, tensors: dict[str, list[tuple[Box, torch.Tensor]]], shapes: dict[str, tuple[int, ...]]) -> Reader:
    parts = [Part(name, shapes[name], box, values) for name, boxes in tensors.items() for box, values in boxes]
    written = write_parts(path, 3, parts, may_thread=True)
    text = manifest_text(Manifest(tag="t", saved=0.0, latest=True, **written, state={}, ranks=[]))
    (path / MANIFEST).write_text(text)
    return Reader(path)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 5), max_size=3).map(tuple),
    st.lists(st.integers(0, 125), max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]),
    st.data(),
)
def test_any_box_is_read_from_the_shards_of_any_cut(shape, cuts, dtype, data) -> None:
    whole = torch.randint(0, 100, shape).to(dtype)
    bounds = sorted({0, whole.numel(), *(c % (whole.numel() + 1) for c in cuts)})
    boxes = [b for a, z in pairwise(bounds) for b in boxes_of_range(shape, a, z)]
    boxes += [boxes[0]]  # written twice: it may be read from either
    starts = [data.draw(st.integers(0, n - 1)) for n in shape]
    box = Box(tuple(starts), tuple(data.draw(st.integers(1, n - a)) for a, n in zip(starts, shape, strict=True)))
    index = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
    with tempfile.TemporaryDirectory() as place:
        reader = save(Path(place), {"w": [(b, whole[b.slices([0] * len(shape))]) for b in boxes]}, {"w": shape})
        assert torch.equal(reader.read("w", box), whole[index])
        assert torch.equal(reader.read("w"), whole)
        assert list(reader.verify_all()) == []


@pytest.mark.parametrize("shape", [(2, 3), (2**61, 2), (2**61, 2**61)])
def test_a_tensor_of_which_a_part_was_not_written_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """It takes no memory either, of which a manifest may ask for more than there is."""
    reader = save(tmp_path, {"w": [(Box((0, 0), (2, 2)), torch.ones(2, 2))]}, {"w": shape})
    with pytest.raises(CheckpointError, match=r"names no file for .* of tensor w"):
        reader.read("w")
    assert reader.read("w", Box((0, 1), (2, 1))).tolist() == [[1], [1]]


def test_many_gaps_are_refused_at_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The boxes come in no order, as from many ranks."""
    n = 200
    boxes = [(Box((2 * (7 * k % n),), (1,)), torch.ones(1)) for k in range(n)]
    reader = save(tmp_path, {"w": boxes}, {"w": (2 * n,)})
    compared, common = [], Box.common
    monkeypatch.setattr(Box, "common", lambda a, b: compared.append(b) or common(a, b))
    with pytest.raises(CheckpointError, match=r"names no file for .*\(1,\).* of tensor w"):
        reader.read("w")
    assert len(compared) < 2 * n


def test_boxes_that_leave_many_pieces_are_refused_after_a_limited_number_of_comparisons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each column is cut at another row, so that what is missing has as many pieces as there are columns."""
    n, most = 40, 500
    columns = [(Box((0, k), (k, 1)), Box((k, k), (n - k, 1))) for k in range(n)]
    boxes = [(box, torch.ones(box.shape)) for pair in columns for box in pair if box.numel]
    reader = save(tmp_path, {"w": boxes}, {"w": (n, n)})
    assert reader.read("w").sum() == n * n
    monkeypatch.setattr(read, "_MOST_COMPARED", most)
    compared, without = [], Box.without
    monkeypatch.setattr(Box, "without", lambda a, b: compared.append(b) or without(a, b))
    with pytest.raises(CheckpointError, match=rf"too irregular a division of tensor w into {len(boxes)} boxes"):
        reader.read("w")
    assert len(compared) <= most


def test_who_may_read_a_plain_file_may_read_a_shard(tmp_path: Path) -> None:
    save(tmp_path, {"w": [(whole_box((2,)), torch.ones(2))]}, {"w": (2,)})
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}  # the manifest's too
    assert len(modes) == 1


def test_every_changed_byte_of_a_file_is_found(tmp_path: Path) -> None:
    save(tmp_path, {"w": [(whole_box((2, 3)), torch.arange(6.0).view(2, 3))]}, {"w": (2, 3)})
    [path] = tmp_path.glob("*.safetensors")
    content = path.read_bytes()
    for k in range(len(content)):
        path.write_bytes(content[:k] + bytes([content[k] ^ 16]) + content[k + 1 :])
        reader = Reader(tmp_path)
        with pytest.raises(CheckpointError, match=path.name):
            reader.read("w")
        assert any(path.name in line for line in reader.verify_all())


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=8, unique=True), min_size=1, max_size=4)
)
def test_each_box_is_written_by_one_of_those_that_hold_it(held) -> None:
    offers = [[(f"t{name}", (start,), (1,), 8) for name, start in own] for own in held]
    chosen = assign(offers)
    written = [offers[rank][k] for rank, own in enumerate(chosen) for k in own]
    assert sorted(written) == sorted({offer for own in offers for offer in own})


def test_copies_are_spread_over_the_ranks() -> None:
    offers = [[(f"w{k}", (0,), (4,), 16) for k in range(12)] for _ in range(4)]
    assert [len(own) for own in assign(offers)] == [3, 3, 3, 3]
    # One that has to write more of its own writes fewer of the copies.
    offers[0] += [("own", (0,), (16,), 64)]
    assert [len(own) for own in assign(offers)] == [1, 4, 4, 4]


def test_of_a_large_file_no_more_than_needed_is_read(tmp_path: Path) -> None:
    whole = torch.randn(8, 16)
    boxes = [(Box((k, 0), (1, 16)), whole[k : k + 1]) for k in range(8)]
    reader = save(tmp_path, {"w": boxes}, {"w": (8, 16)})
    read = []
    values = reader._values
    reader._values = lambda stored, box: read.append(box) or values(stored, box)
    assert np.array_equal(reader.read("w", Box((2, 3), (1, 4))).numpy(), whole[2:3, 3:7].numpy())
    assert {box.start[0] for box in read} == {2}
    assert isinstance(reader.tensors["w"], StoredTensor)
