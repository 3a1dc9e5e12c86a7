"""Data: loaders whose order no layout changes, and the micro-batches of one step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from parallel3d.errors import DataError


class RepeatingLoader:
    """Iterates over a loader again and again: starts it anew when it ends. Raises DataError for a loader with no batch."""

    def __init__(self, loader: Iterable[Any]):
        self.loader = loader
        self._iterator = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self.loader)
        try:
            return next(self._iterator)
        except StopIteration:
            raise DataError("the loader yields nothing; give it data, or a batch size it can fill") from None


class MicroBatchSampler(Sampler[list[int]]):
    """Deals samples by global micro-batch: the g-th `micro_batch_size` of the epoch's order go to replica g mod dp.

    An epoch is a whole number of steps, of num_micro_batches on each replica: the last is filled from the epoch's start
    (`drop_last`: left out). So every step sees the same samples for every number of replicas, given the same global
    batch. Raises DataError when `drop_last` leaves nothing.
    """

    def __init__(
        self,
        num_samples: int,
        micro_batch_size: int,
        replica: int,
        num_replicas: int,
        num_micro_batches: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ):
        step_size = micro_batch_size * num_replicas * num_micro_batches
        steps = num_samples // step_size if drop_last else -(-num_samples // step_size)
        if steps == 0:
            raise DataError(
                f"{num_samples} samples can't fill one step of {num_replicas} replicas x {num_micro_batches} micro-batches x "
                f"{micro_batch_size} = {step_size} samples; give more data or lower train_batch_size"
                + (", or turn dataloader_drop_last off" if drop_last else "")
            )
        self._num_samples, self._micro_batch_size = num_samples, micro_batch_size
        self._replica, self._num_replicas, self._length = replica, num_replicas, steps * num_micro_batches
        self._shuffle, self._seed = shuffle, seed
        self.epoch = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[list[int]]:
        """The epoch's micro-batches of this replica; the next call is the next epoch, in its own order."""
        order = list(range(self._num_samples))
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + self.epoch)
            order = torch.randperm(self._num_samples, generator=generator).tolist()
        self.epoch += 1
        for k in range(self._length):
            start = (k * self._num_replicas + self._replica) * self._micro_batch_size
            yield [order[j % self._num_samples] for j in range(start, start + self._micro_batch_size)]


def make_loader(
    dataset: Dataset[Any],
    micro_batch_size: int,
    replica: int,
    num_replicas: int,
    num_micro_batches: int,
    seed: int,
    drop_last: bool,
    collate_fn: Callable[[list[Any]], Any] | None,
    pin_memory: bool,
) -> DataLoader[Any]:
    """The loader that `initialize` makes from `training_data`: this replica's micro-batches, reshuffled each epoch."""
    if not isinstance(dataset, Sized):
        raise DataError(f"training_data {type(dataset).__name__} has no length; pass your own iterator to train_batch")
    size = len(cast(Sized, dataset))
    sampler = MicroBatchSampler(
        size, micro_batch_size, replica, num_replicas, num_micro_batches, seed=seed, drop_last=drop_last
    )
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate_fn, pin_memory=pin_memory)


class MicroBatchSource:
    """Takes micro-batches from the iterators that a user hands to train_batch, and keeps those that a batch left over."""

    def __init__(self) -> None:
        self._left: list[tuple[Iterator[Any], list[Any]]] = []

    def take(self, iterator: Iterator[Any], most: int) -> list[Any]:
        """The next micro-batches of `iterator`, at most `most`; fewer when it ends. Raises DataError for no iterator.

        What the iterator raises is passed on; the micro-batches before it are not lost.
        """
        if not hasattr(iterator, "__next__"):
            raise DataError(
                f"data_iter is a {type(iterator).__name__}, which starts anew at each batch; pass an iterator: "
                "iter(loader), or RepeatingLoader(loader) to go on over epochs"
            )
        kept = self._keep(iterator)
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
        """Keep what a batch could not use, because another rank had fewer or failed, for the next `take`."""
        left = [*micro_batches, *self._keep(iterator)]
        if left:
            self._left.append((iterator, left))

    def _keep(self, iterator: Iterator[Any]) -> list[Any]:
        for k, (owner, micro_batches) in enumerate(self._left):
            if owner is iterator:
                del self._left[k]
                return micro_batches
        return []
