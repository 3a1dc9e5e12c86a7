"""Packing of documents into rows of one length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from parallel3d.errors import DataError
from parallel3d.models.loss import IGNORED

# ids, positions in their document, and labels of consecutive tokens
_Tokens = tuple[list[int], list[int], list[int]]


class PackedDocuments(IterableDataset[tuple[dict[str, Tensor], Tensor]]):
    """Rows of `length` tokens, filled with documents one after the other. A document that doesn't fit goes on in the next row.

    Yields ({"input_ids": [length], "position_ids": [length]}, labels [length]), all int64. Positions start at 0 in each
    document, and in each row, by which models keep documents apart. Labels are the next token of the document, -100 at its
    end. The last row is filled with `pad_token_id`, whose labels are -100.

    - documents: sequences of token ids, or mappings with "input_ids" and optionally "labels", which follow the convention of
      transformers: -100 where a token is not to be learned, as in a prompt. They are iterated again in each epoch. Each worker
      of a DataLoader packs its share of them; an IterableDataset must divide them among workers itself.

    Raises DataError for a length below 1, and for a document with another number of labels than tokens.
    """

    def __init__(
        self, documents: Iterable[Sequence[int] | Mapping[str, Sequence[int]]], length: int, pad_token_id: int = 0
    ):
        if length < 1:
            raise DataError(f"rows of {length} tokens hold no document; give a length of 1 or more")
        self._documents, self._length, self._pad = documents, length, pad_token_id

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Yield the rows of an epoch."""
        row: _Tokens = ([], [], [])
        documents, worker = iter(self._documents), get_worker_info()
        if worker is not None and not isinstance(self._documents, IterableDataset):  # which gives each worker its own
            documents = islice(documents, worker.id, None, worker.num_workers)
        for document in documents:
            ids, labels = self._labelled(document)
            start = 0
            while start < len(ids):
                end = min(len(ids), start + self._length - len(row[0]))
                for values, more in zip(row, (ids[start:end], range(end - start), labels[start:end]), strict=True):
                    values.extend(more)
                start = end
                if len(row[0]) == self._length:
                    yield _tensors(row)
                    row = ([], [], [])
        if row[0]:
            missing = self._length - len(row[0])
            for values, more in zip(row, ([self._pad] * missing, range(missing), [IGNORED] * missing), strict=True):
                values.extend(more)
            yield _tensors(row)

    def _labelled(self, document: Sequence[int] | Mapping[str, Sequence[int]]) -> tuple[list[int], list[int]]:
        """Return a document's token ids, and for each position the token to predict."""
        given = document if isinstance(document, Mapping) else {"input_ids": document}
        ids = list(given["input_ids"])
        wanted = list(given.get("labels", ids))
        if len(ids) != len(wanted):
            raise DataError(f"a document has {len(ids)} tokens, but {len(wanted)} labels; give one a token")
        return ids, [*wanted[1:], IGNORED][: len(ids)]


def _tensors(row: _Tokens) -> tuple[dict[str, Tensor], Tensor]:
    ids, positions, labels = map(torch.tensor, row)
    return {"input_ids": ids, "position_ids": positions}, labels
