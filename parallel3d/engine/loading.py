"""A batch's micro-batches, in number and structure agreed on by all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from parallel3d.errors import DataError
from parallel3d.pipe.agreement import agree
from parallel3d.pipe.data import MicroBatchSource
from parallel3d.pipe.module import PipelineModule


class BatchLoader:
    """Takes micro-batches from the iterators that users pass; none is lost that a batch could not use.

    batch_fn: makes (inputs, labels) of what an iterator yields, where that isn't it already.
    """

    def __init__(self, model: PipelineModule):
        self._model = model
        self._source = MicroBatchSource()
        self.batch_fn: Callable[[Any], Any] | None = None

    def next(self, iterator: Iterator[Any] | None, most: int) -> tuple[list[tuple[Any, Any]], list[int]]:
        """(this rank's micro-batches, as (inputs, labels); the signatures of all): at most `most`, the same on all ranks.

        Raises StopIteration on all ranks when none is left, DataError on all when one can't load.
        """
        model = self._model
        micro_batches: list[Any] | None = None
        error: Exception | None = None
        if model.stage_id in (model.placement[0], model.placement[-1]):
            try:
                micro_batches = self._load(iterator, most)
            except Exception as raised:
                error = raised
        try:
            pairs = None if micro_batches is None else [self._pair(item) for item in micro_batches]
        except Exception as raised:
            error, pairs = raised, None
        try:
            signatures = agree(pairs, error is not None, most, model.groups, model.placement[0])
        except DataError:
            if micro_batches is not None and iterator is not None:
                self._source.give_back(iterator, micro_batches)
            if error is not None:
                raise error from None
            raise
        if micro_batches is not None and iterator is not None:
            self._source.give_back(iterator, micro_batches[len(signatures) :])
        if not signatures:
            raise StopIteration("the data iterators have no micro-batch left")
        return (pairs or [])[: len(signatures)], signatures

    def num_left(self, iterator: Iterator[Any]) -> int:
        """Micro-batches taken from `iterator` that no batch has used."""
        return self._source.num_left(iterator)

    def forget(self, iterator: Iterator[Any]) -> None:
        """Drop those: the iterator goes on elsewhere."""
        self._source.forget(iterator)

    def _load(self, iterator: Iterator[Any] | None, most: int) -> list[Any]:
        if iterator is None:
            raise DataError(
                f"rank {self._model.groups.rank} holds the first or last chunk and needs data: pass data_iter (to train: or "
                "give training_data to initialize)"
            )
        return self._source.take(iterator, most)

    def _pair(self, micro_batch: Any) -> tuple[Any, Any]:
        return self._model.pair(self.batch_fn(micro_batch) if self.batch_fn is not None else micro_batch)
