"""Loading of one step's micro-batches, whose number and structure all ranks agree on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from parallel3d.comm.collectives import all_gather_integers
from parallel3d.comm.groups import ProcessGroups
from parallel3d.errors import DataError, PeerDataError
from parallel3d.pipe.module import PipelineModule
from parallel3d.structures import describe

_NO_DATA_NEEDED = -1
_FAILED = -2


class BatchLoader:
    """Loads the micro-batches of each step from the iterators that users pass. Those that a step could not use are kept."""

    def __init__(self, model: PipelineModule):
        self._model = model
        self._source = MicroBatchSource()
        self._batch_fn: Callable[[Any], Any] | None = None

    def use_batch_fn(self, batch_fn: Callable[[Any], Any]) -> None:
        """Make (inputs, labels) by batch_fn(item) from each item that an iterator yields."""
        self._batch_fn = batch_fn

    def next(self, iterator: Iterator[Any] | None, most: int) -> tuple[list[tuple[Any, Any]], list[int]]:
        """Load at most `most` micro-batches, the same number on all ranks.

        Returns this rank's micro-batches as (inputs, labels), and the signatures of all of its pipeline's. Raises
        StopIteration on all ranks when no micro-batch is left, DataError on all ranks when one of them can't load.
        """
        model = self._model
        loaded: list[Any] = []
        pairs: list[tuple[Any, Any]] | None = None
        error: Exception | None = None
        if model.stage_id in (model.placement[0], model.placement[-1]):
            try:
                loaded = self._load(iterator, most)
                pairs = [model.pair(item if self._batch_fn is None else self._batch_fn(item)) for item in loaded]
            except Exception as raised:
                error = raised
        try:
            signatures = agree(pairs, error is not None, most, model.groups, model.placement[0])
        except DataError:
            self._give_back(iterator, loaded)
            if error is not None:
                raise error from None
            raise
        self._give_back(iterator, loaded[len(signatures) :])
        if not signatures:
            raise StopIteration("the data iterators have no micro-batch left")
        return (pairs or [])[: len(signatures)], signatures

    def num_left(self, iterator: Iterator[Any]) -> int:
        """Return the number of micro-batches that were taken from `iterator` and not used by any step."""
        return self._source.num_left(iterator)

    def forget(self, iterator: Iterator[Any]) -> None:
        """Drop these micro-batches: the iterator was moved to another position."""
        self._source.forget(iterator)

    def _load(self, iterator: Iterator[Any] | None, most: int) -> list[Any]:
        if iterator is None:
            raise DataError(
                f"rank {self._model.groups.rank} holds the first or last chunk and needs data: pass data_iter (to train: or "
                "give training_data to initialize)"
            )
        return self._source.take(iterator, most)

    def _give_back(self, iterator: Iterator[Any] | None, items: list[Any]) -> None:
        if iterator is not None:
            self._source.give_back(iterator, items)


class MicroBatchSource:
    """Takes micro-batches from iterators, and keeps those that a batch did not use for the next one."""

    def __init__(self) -> None:
        # id(iterator) -> the iterator, which keeps the id from being used again, and its micro-batches.
        self._left: dict[int, tuple[Iterator[Any], list[Any]]] = {}

    def take(self, iterator: Iterator[Any], most: int) -> list[Any]:
        """Return the next micro-batches of `iterator`: `most` of them, or fewer when it ends.

        An exception of the iterator is passed on, and the micro-batches before it are kept. Raises DataError for an
        iterable that is no iterator.
        """
        if not hasattr(iterator, "__next__"):
            raise DataError(
                f"data_iter is a {type(iterator).__name__}, which starts again at each batch; pass an iterator: "
                "iter(loader), or RepeatingLoader(loader) to go on over epochs"
            )
        kept = self._pop(iterator)
        taken = kept[:most]
        self.give_back(iterator, kept[most:])
        try:
            while len(taken) < most:
                taken.append(next(iterator))
        except StopIteration:
            pass
        except BaseException:
            self.give_back(iterator, taken)
            raise
        return taken

    def give_back(self, iterator: Iterator[Any], micro_batches: list[Any]) -> None:
        """Keep micro-batches that a batch could not use, because another rank had fewer or failed, for the next `take`."""
        left = [*micro_batches, *self._pop(iterator)]
        if left:
            self._left[id(iterator)] = iterator, left

    def num_left(self, iterator: Iterator[Any]) -> int:
        """Return the number of micro-batches of `iterator` that are kept."""
        return len(self._left[id(iterator)][1]) if id(iterator) in self._left else 0

    def forget(self, iterator: Iterator[Any]) -> None:
        """Drop the micro-batches of `iterator` that are kept."""
        self._pop(iterator)

    def _pop(self, iterator: Iterator[Any]) -> list[Any]:
        _, micro_batches = self._left.pop(id(iterator), (iterator, []))
        return micro_batches


def agree(
    micro_batches: Sequence[tuple[Any, Any]] | None, failed: bool, most: int, groups: ProcessGroups, first_stage: int
) -> list[int]:
    """Agree with all ranks, on the host, on a batch; return the signature of each micro-batch of this rank's pipeline.

    The number of micro-batches is the same on every rank: the smallest that a rank which loads data has.

    - micro_batches: the (inputs, labels) that this rank could load, at most `most`; None on a rank that needs no data.
    - failed: whether loading failed on this rank.
    - first_stage: the stage of the first chunk, whose signatures are used.

    Raises PeerDataError on all ranks when loading failed on one.
    """
    signatures = [signature(inputs) for inputs, _ in micro_batches or ()]
    count = _FAILED if failed else _NO_DATA_NEEDED if micro_batches is None else len(micro_batches)
    rows = all_gather_integers([count, *signatures, *[0] * (most - len(signatures))], groups.control)
    broken = [rank for rank, row in enumerate(rows) if row[0] == _FAILED]
    if broken:
        raise PeerDataError(f"ranks {broken} could not load their micro-batches; their own errors say why", broken[0])
    number = min(row[0] for row in rows if row[0] != _NO_DATA_NEEDED)
    return rows[groups.pipe.ranks[first_stage]][1 : 1 + number]


def signature(inputs: Any) -> int:
    """Hash the structure of a micro-batch's inputs (tree, shapes, dtypes, and values other than tensors) to 63 bits."""
    structure, _ = describe(inputs)
    text = f"{structure.tree}|{structure.leaves}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
