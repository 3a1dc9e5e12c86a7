"""Packing loses no token, and asks for no prediction across documents."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from parallel3d.errors import DataError
from parallel3d.models import PackedDocuments

PAD, IGNORED = 99, -100
documents = st.lists(st.lists(st.integers(0, 9), max_size=12), max_size=6)


@given(documents, st.integers(1, 8))
def test_every_token_is_in_one_row_in_order(given_documents: list[list[int]], length: int):
    rows = [
        (inputs["input_ids"].tolist(), inputs["position_ids"].tolist(), labels.tolist())
        for inputs, labels in PackedDocuments(given_documents, length, PAD)
    ]
    assert all(len(values) == length for row in rows for values in row)
    ids, positions, labels = ([value for row in rows for value in row[k]] for k in range(3))
    tokens = [token for document in given_documents for token in document]
    assert len(rows) == -(-len(tokens) // length)
    assert ids == tokens + [PAD] * (len(ids) - len(tokens))
    wanted = [label for document in given_documents for label in [*document[1:], IGNORED][: len(document)]]
    assert labels == wanted + [IGNORED] * (len(ids) - len(tokens))
    first = 0
    for size in [*map(len, given_documents), len(ids) - len(tokens)]:
        for k in range(first, first + size):
            assert positions[k] == k - max(first, k - k % length)
        first += size


def test_labels_of_a_prompt_are_not_learned():
    prompt = {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}
    [(inputs, labels)] = PackedDocuments([prompt, [1, 2]], 6)
    assert inputs["input_ids"].tolist() == [5, 6, 7, 8, 1, 2]
    assert labels.tolist() == [-100, 7, 8, -100, 2, -100]
    with pytest.raises(DataError, match="a document has 2 tokens, but 1 labels"):
        next(iter(PackedDocuments([{"input_ids": [1, 2], "labels": [1]}], 4)))
    with pytest.raises(DataError, match="rows of 0 tokens"):
        PackedDocuments([[1, 2]], 0)


def test_workers_of_a_loader_share_the_documents():
    loader = DataLoader(PackedDocuments([[k] * 3 for k in range(5)], 4, PAD), batch_size=None, num_workers=2)
    tokens = [token for inputs, _ in loader for token in inputs["input_ids"].tolist() if token != PAD]
    assert sorted(tokens) == [k for k in range(5) for _ in range(3)]
