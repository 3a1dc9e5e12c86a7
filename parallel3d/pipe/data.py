"""Data loaders whose order of samples does not depend on the layout."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, Sampler

from parallel3d.errors import DataError


class RepeatingLoader:
    """Iterator over a loader that starts the loader again when it ends. Raises DataError for a loader without a batch."""

    def __init__(self, loader: Iterable[Any]):
        self.loader: Any = loader
        self._iterator: Iterator[Any] | None = None
        self._num_taken = 0
        if getattr(loader, "persistent_workers", False):
            iter(loader)  # draws the workers' seed now, so that an epoch draws only its order

    def _start(self) -> Iterator[Any]:
        # A shuffling loader draws an epoch's order at its first batch, or, where workers read ahead, before it.
        self._generator = _generator_of(self.loader).get_state()
        self._iterator, self._num_taken = iter(self.loader), 0
        return self._iterator

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        for _ in range(2):
            try:
                batch = next(self._start() if self._iterator is None else self._iterator)
            except StopIteration:
                self._iterator = None
                continue
            self._num_taken += 1
            return batch
        raise DataError("the loader yields nothing; give it data, or a batch size it can fill")

    def state_dict(self, unused: int = 0) -> dict[str, Any]:
        """Return the position `unused` micro-batches before the last one that was read. The state holds tensors.

        A loader with a position of its own, such as torchdata's StatefulDataLoader, returns that, which is after the unused
        micro-batches. For any other loader, a position can't lie in an earlier epoch. A warning gives the number of unused
        micro-batches that are therefore left out after a load.
        """
        sampler = _resumable_sampler(self.loader)
        if sampler is not None:
            return {"sampler": sampler.state_dict(unused)}
        own = self.loader.state_dict() if _is_stateful(self.loader) else None
        left_out = max(0, unused - self._num_taken) if own is None else unused
        if left_out:
            warnings.warn(
                f"{left_out} micro-batches that were read, but not used, are left out after a load", stacklevel=2
            )
        taken = self._num_taken - (unused - left_out)
        epoch = getattr(getattr(self.loader, "sampler", None), "epoch", None)
        return {"taken": taken, "epoch": epoch, "generator": self._generator if taken else None, "loader": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position. If neither the loader nor its sampler has one, the batches before it are read and dropped.

        Such a loader must yield batches in the same order as before: its sampler gets the epoch that it had, by
        `set_epoch`, and the generator that shuffles (the loader's own or torch's) gets the state that it had. Raises DataError
        if a loader of another kind was saved.
        """
        resumable = _resumable_sampler(self.loader)
        if (resumable is not None) != ("sampler" in state):
            raise DataError(
                "the data position was saved from a loader of another kind; let initialize make both, or neither"
            )
        if resumable is not None:
            resumable.load_state_dict(state["sampler"])
            if self._iterator is None:
                self._start()  # draws from torch's generator now, as when the state was saved
            return
        set_epoch = getattr(getattr(self.loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None and state["epoch"] is not None:
            set_epoch(state["epoch"])
        own = state.get("loader") if _is_stateful(self.loader) else None
        if own is not None:
            self.loader.load_state_dict(own)
        self._iterator, self._num_taken = None, 0
        if state["taken"]:
            _generator_of(self.loader).set_state(state["generator"])
            for _ in islice(self._start(), state["taken"] if own is None else 0):  # not past the epoch's end
                pass
            self._num_taken = state["taken"]


def _is_stateful(loader: Any) -> bool:
    """Return whether a loader has a position. Loaders of accelerate have the methods even if they have none."""
    return hasattr(loader, "load_state_dict") and bool(getattr(loader, "use_stateful_dataloader", True))


def _generator_of(loader: Any) -> torch.Generator:
    """Return the generator by which a loader of torch shuffles: its sampler's, its own or torch's."""
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", getattr(loader, "sampler", None))
    own = (getattr(owner, "generator", None) for owner in (sampler, loader))
    return next((generator for generator in own if isinstance(generator, torch.Generator)), torch.default_generator)


def _resumable_sampler(loader: Any) -> MicroBatchSampler | None:
    sampler = getattr(loader, "batch_sampler", None)
    return sampler if isinstance(sampler, MicroBatchSampler) else None


class ReplicaSamples(IterableDataset[Any]):
    """The samples of one replica of a dataset without length, dealt as MicroBatchSampler does.

    Each replica reads all samples and keeps its own. Samples at the end that don't fill a step are left out.
    """

    def __init__(
        self, data: Iterable[Any], micro_batch_size: int, replica: int, num_replicas: int, num_micro_batches: int = 1
    ):
        self._data, self._micro_batch_size = data, micro_batch_size
        self._start, self._stride = replica * micro_batch_size, num_replicas * micro_batch_size
        self._step_size = self._stride * num_micro_batches

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples of whole steps."""
        samples = iter(self._data)
        while len(step := list(islice(samples, self._step_size))) == self._step_size:
            for start in range(self._start, self._step_size, self._stride):
                yield from step[start : start + self._micro_batch_size]


class MicroBatchSampler(Sampler[list[int]]):
    """Batch sampler that deals samples by global micro-batch.

    The g-th `micro_batch_size` samples of the epoch's order (without `shuffle` the dataset's) go to replica g mod num_replicas.
    An epoch is a whole number of steps, each of num_micro_batches on each replica; the last step is filled with samples from
    the epoch's start, or left out with `drop_last`. So, with the same global batch, every step sees the same samples for every
    number of replicas.
    Raises DataError when `drop_last` leaves no step.
    """

    def __init__(
        self,
        num_samples: int,
        micro_batch_size: int,
        replica: int,
        num_replicas: int,
        num_micro_batches: int = 1,
        seed: int = 0,
        drop_last: bool = False,
        shuffle: bool = True,
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
        self._seed, self._shuffle = seed, shuffle
        self.epoch = 0  # epoch of the next iterator
        # The epoch of the last micro-batch that was dealt, and the number dealt of that epoch.
        self._epoch = self._dealt = 0
        self._loaded = False  # whether the next micro-batch is at a loaded position

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this replica's micro-batches of an epoch; the next call yields the next epoch.

        After `load_state_dict` it starts at the loaded position, and an iterator in use continues there.
        """
        epoch, dealt = self._next_start()
        order = self._order(epoch)
        while dealt < self._length:
            start = (dealt * self._num_replicas + self._replica) * self._micro_batch_size
            dealt += 1
            self._epoch, self._dealt = epoch, dealt
            yield [order[j % self._num_samples] for j in range(start, start + self._micro_batch_size)]
            if self._loaded:
                epoch, dealt = self._next_start()
                order = self._order(epoch)

    def _next_start(self) -> tuple[int, int]:
        start = (self._epoch, self._dealt) if self._loaded else (self.epoch, 0)
        self.epoch, self._loaded = start[0] + 1, False
        return start

    def _order(self, epoch: int) -> Sequence[int]:
        if not self._shuffle:
            return range(self._num_samples)
        generator = torch.Generator().manual_seed(self._seed + epoch)
        return torch.randperm(self._num_samples, generator=generator).tolist()

    def state_dict(self, unused: int = 0) -> dict[str, int]:
        """Return the position of the last iterator, in samples over all replicas.

        unused: the number of micro-batches that were dealt but not used yet; the position is before these.
        """
        epoch, dealt = divmod(self._epoch * self._length + self._dealt - unused, self._length)
        samples = dealt * self._num_replicas * self._micro_batch_size
        return {"epoch": epoch, "samples": samples, "num_samples": self._num_samples, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at a position that was saved with any number of replicas and any micro-batch size, also in open iterators.

        Raises DataError if no micro-batch begins at that position, or if the data have another number of samples.
        """
        if state["num_samples"] != self._num_samples:
            raise DataError(
                f"the data position was saved with {state['num_samples']} samples, and there are {self._num_samples}; give the "
                "same training_data, or load with load_module_only=True and start again"
            )
        step = self._num_replicas * self._micro_batch_size
        if state["samples"] % step:
            raise DataError(
                f"the data position is {state['samples']} samples into the epoch, where no micro-batches of "
                f"{self._num_replicas} replicas x {self._micro_batch_size} samples begin; keep train_batch_size as it was"
            )
        self._seed, self._epoch, self._dealt = state["seed"], state["epoch"], state["samples"] // step
        self.epoch, self._loaded = self._epoch, True
