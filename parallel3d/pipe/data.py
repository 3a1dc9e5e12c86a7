"""Data: loaders whose order no layout changes, and the micro-batches of one step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from parallel3d.errors import DataError


class RepeatingLoader:
    """Iterates over a loader again and again: starts it anew when it ends. Raises DataError for a loader with no batch."""

    def __init__(self, loader: Iterable[Any]):
        self.loader = loader
        self._start()

    def _start(self) -> None:
        self._iterator, self._taken = iter(self.loader), 0

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return self._take()
        except StopIteration:
            self._start()
        try:
            return self._take()
        except StopIteration:
            raise DataError("the loader yields nothing; give it data, or a batch size it can fill") from None

    def _take(self) -> Any:
        if self._taken == 0:
            self._generator = torch.get_rng_state()  # torch's samplers draw the order of a pass at its first batch
        batch = next(self._iterator)
        self._taken += 1
        return batch

    def state_dict(self, unused: int = 0) -> dict[str, Any]:
        """The position, `unused` micro-batches before what was taken. It holds a tensor."""
        sampler = _resumable_sampler(self.loader)
        if sampler is not None:
            return {"sampler": sampler.state_dict(unused)}
        taken = max(0, self._taken - unused)
        epoch = getattr(getattr(self.loader, "sampler", None), "epoch", None)
        return {"taken": taken, "epoch": epoch, "generator": self._generator if taken else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a position. A loader whose sampler has no position takes the batches before it, and drops them.

        It must deal them in the same order: a sampler is given the epoch that it had, as by `set_epoch`, and one that draws
        from torch's generator draws what it did. Raises DataError for what a loader of another kind has saved.
        """
        resumable = _resumable_sampler(self.loader)
        if (resumable is not None) != ("sampler" in state):
            raise DataError(
                "the data position was saved of a loader of another kind; let initialize make both, or neither"
            )
        if resumable is not None:
            resumable.load_state_dict(state["sampler"])
            return
        set_epoch = getattr(getattr(self.loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None and state["epoch"] is not None:
            set_epoch(state["epoch"])
        self._start()
        if state["taken"]:
            torch.set_rng_state(state["generator"])
        for _ in range(state["taken"]):
            self._take()


def _resumable_sampler(loader: Any) -> MicroBatchSampler | None:
    sampler = getattr(loader, "batch_sampler", None)
    return sampler if isinstance(sampler, MicroBatchSampler) else None


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
        self.epoch = 0  # of the next pass
        self._epoch, self._dealt = (
            0,
            0,
        )  # of the last micro-batch that was dealt: the pass, and how many that makes of it
        self._loaded, self._jumps = False, 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[list[int]]:
        """The epoch's micro-batches of this replica; the next call is the next epoch, in its own order.

        Where a position was loaded, it goes on from there; so does one that is under way.
        """
        (epoch, dealt), jumps = self._next_start(), self._jumps
        order = self._order(epoch)
        while dealt < self._length:
            start = (dealt * self._num_replicas + self._replica) * self._micro_batch_size
            dealt += 1
            self._epoch, self._dealt = epoch, dealt
            yield [order[j % self._num_samples] for j in range(start, start + self._micro_batch_size)]
            if jumps != self._jumps:
                (epoch, dealt), jumps = self._next_start(), self._jumps
                order = self._order(epoch)

    def _next_start(self) -> tuple[int, int]:
        start = (self._epoch, self._dealt) if self._loaded else (self.epoch, 0)
        self.epoch, self._loaded = start[0] + 1, False
        return start

    def _order(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(self._num_samples))
        generator = torch.Generator().manual_seed(self._seed + epoch)
        return torch.randperm(self._num_samples, generator=generator).tolist()

    def state_dict(self, unused: int = 0) -> dict[str, int]:
        """The position of the last iterator, over all replicas, in samples; `unused`: micro-batches that were not used yet."""
        passed, dealt = divmod(self._epoch * self._length + self._dealt - unused, self._length)
        samples = dealt * self._num_replicas * self._micro_batch_size
        return {"epoch": passed, "samples": samples, "num_samples": self._num_samples, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on at a position, of any number of replicas and size of micro-batches; iterators under way go on there too.

        Raises DataError where no micro-batch begins there, or the data is other data.
        """
        if state["num_samples"] != self._num_samples:
            raise DataError(
                f"the data position was saved of {state['num_samples']} samples, and there are {self._num_samples}; give the "
                "same training_data, or load with load_module_only=True and begin anew"
            )
        step = self._num_replicas * self._micro_batch_size
        if state["samples"] % step:
            raise DataError(
                f"the data position is {state['samples']} samples into the epoch, where no micro-batches of "
                f"{self._num_replicas} replicas x {self._micro_batch_size} samples begin; keep train_batch_size as it was"
            )
        self._seed, self._epoch, self._dealt = state["seed"], state["epoch"], state["samples"] // step
        self.epoch, self._loaded, self._jumps = self._epoch, True, self._jumps + 1


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


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`, without the host waiting for what the device has to do before."""
    if (
        device.type == "cuda"
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_pinned()
    ):
        # CUDA copies from pageable memory when the stream is there, and the host waits; pinned memory is cached.
        tensor = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return tensor.to(device, non_blocking=True)


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

    def num_left(self, iterator: Iterator[Any]) -> int:
        """How many micro-batches of `iterator` are kept."""
        return sum(len(micro_batches) for owner, micro_batches in self._left if owner is iterator)

    def forget(self, iterator: Iterator[Any]) -> None:
        """Drop what is kept of `iterator`, which goes on elsewhere."""
        self._keep(iterator)

    def _keep(self, iterator: Iterator[Any]) -> list[Any]:
        for k, (owner, micro_batches) in enumerate(self._left):
            if owner is iterator:
                del self._left[k]
                return micro_batches
        return []
