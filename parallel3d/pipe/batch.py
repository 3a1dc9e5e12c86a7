"""Source of the micro-batches of a step. Before each step, all ranks agree on their number and structure."""

from __future__ import annotations

import hashlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils._pytree import SUPPORTED_NODES, tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset

from parallel3d.comm.collectives import all_gather_integers
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.structures import describe
from parallel3d.config import BatchSizes, Config, resolve_batch
from parallel3d.errors import ConfigError, DataError, PeerDataError, PeerEndOfData
from parallel3d.pipe.data import MicroBatchSampler, RepeatingLoader, ReplicaSamples
from parallel3d.pipe.module import PipelineModule
from parallel3d.pipe.single_stage import SingleStageModule

_NO_DATA_NEEDED = -1
_FAILED = -2


class TrainingData:
    """Loads the micro-batches of each step, from the default iterator of train_batch or one that the user passes.

    - sizes: batch sizes of the current step.
    - iterator: used when train_batch gets none; may be None.
    - source: takes micro-batches from iterators, and keeps those that a step could not use.
    """

    def __init__(self, model: PipelineModule, sizes: BatchSizes, iterator: Iterator[Any] | None):
        self.sizes, self.iterator, self.source = sizes, iterator, MicroBatchSource()
        self._model = model
        self._parameters = tuple(model.layers.parameters()) if model.groups.pipe.size > 1 else ()
        self._batch_fn: Callable[[Any], Any] = lambda item: item
        self._warned: set[str] = set()

    def use_iterator(self, iterator: Iterator[Any]) -> None:
        """Take micro-batches from this iterator when train_batch gets none."""
        self.iterator = iterator

    def state_dict(self) -> dict[str, Any] | None:
        """Return the position of the default iterator, also as a number of samples over all replicas; None if it has none."""
        if not isinstance(self.iterator, RepeatingLoader):
            return None
        state = self.iterator.state_dict(self.source.num_left(self.iterator))
        return state | {"samples": state["taken"] * self._samples_at_once()} if "taken" in state else state

    def load_state_dict(self, state: Mapping[str, Any] | None, same_layout: bool, replicas: int) -> None:
        """Continue at a position that was saved with any number of replicas and micro-batches of any size.

        - same_layout: whether it was saved in this layout.
        - replicas: number of replicas with which it was saved.

        Raises DataError if no micro-batches begin at that position.
        """
        if state is None or not isinstance(self.iterator, RepeatingLoader):
            return
        if "taken" in state:
            at_once, size = self._samples_at_once(), self.sizes.micro_batch_size
            # Older checkpoints don't record the number of samples: their micro-batches had this size.
            samples = state.get("samples", state["taken"] * replicas * size)
            if samples % at_once:
                raise DataError(
                    f"the data position is {samples} samples into the epoch, where no micro-batches of {at_once // size} "
                    f"replicas x {size} samples begin; keep these numbers as they were, or load with load_module_only=True"
                )
            taken = samples // at_once
            own = state.get("loader") if same_layout and taken == state["taken"] else None
            state = {**state, "taken": taken, "loader": own}
        self.iterator.load_state_dict(state)
        self.source.forget(self.iterator)

    def _samples_at_once(self) -> int:
        """Return the number of samples in a micro-batch of each replica."""
        return self.sizes.micro_batch_size * self._model.groups.data.size

    def use_batch_fn(self, batch_fn: Callable[[Any], Any]) -> None:
        """Make (inputs, labels) by batch_fn(item) from each item that an iterator yields."""
        self._batch_fn = batch_fn

    def set_train_batch_size(self, train_batch_size: int, num_backwards: int) -> None:
        """Change the number of micro-batches of a step, from the next step on; the size of a micro-batch stays.

        num_backwards: number of micro-batches of the current step that are done. Raises ConfigError if it is not 0, or if
        train_batch_size is no multiple of a micro-batch of all replicas.
        """
        if num_backwards:
            raise ConfigError(
                f"{num_backwards} micro-batches of a step are done; set the batch size after the step's last"
            )
        self._resize(train_batch_size, self.sizes.micro_batch_size, None)

    def set_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the number of samples of a micro-batch; a step has as many micro-batches as before. Raises ConfigError."""
        self._resize(None, micro_batch_size, self.sizes.num_micro_batches)

    def _resize(self, *given: int | None) -> None:
        groups = self._model.groups
        pipe, data, model = self._model.num_stages, groups.data.size, groups.model.size
        self.sizes = resolve_batch(*given, pipe=pipe, data=data, model=model)

    def next(self, iterator: Iterator[Any] | None, most: int) -> tuple[list[tuple[Any, Any]], list[int]]:
        """Load at most `most` micro-batches, the same number on all ranks.

        Returns this rank's micro-batches as (inputs, labels), and the signatures of its pipeline's micro-batches. Raises
        StopIteration on all ranks when one has no micro-batch left, DataError on all ranks when one of them can't load.
        """
        model = self._model
        items: list[Any] = []
        pairs: list[tuple[Any, Any]] = []
        own: list[int] | None = None
        error: Exception | None = None
        if model.stage_id in (model.placement[0], model.placement[-1]):
            try:
                if iterator is None:
                    raise DataError(
                        f"rank {model.groups.rank} holds the first or last chunk and needs data: pass data_iter (to train: "
                        "or give training_data to initialize)"
                    )
                items = self.source.take(iterator, most)
                loaded = (model.pair(self._batch_fn(item)) for item in items)
                pairs = [(_as_pytree(inputs), _as_pytree(labels)) for inputs, labels in loaded]
                self._check(pairs)
                own = [signature(inputs) for inputs, _ in pairs]
            except Exception as raised:
                error = raised
        signatures: list[int] = []
        try:
            # Freezing parameters between steps changes which tensors between stages require a gradient.
            trained = _hash(bytes(parameter.requires_grad for parameter in self._parameters))
            signatures = agree(own, error is not None, most, model.groups, model.placement[0], trained)
        except DataError:
            if error is not None:
                raise error from None
            raise
        finally:
            if iterator is not None:
                self.source.give_back(iterator, items[len(signatures) :])
        return pairs[: len(signatures)], signatures

    def warn_of_sizes(self, pairs: Sequence[tuple[Any, Any]], count: int) -> None:
        """Warn once if a step has fewer micro-batches than configured, and once if one has another number of samples.

        count: micro-batches of this rank's pipeline. Samples are the first dimension of the first tensor.
        """
        for what, found, wanted in (
            ("micro-batches in this step", count, self.sizes.num_micro_batches),
            ("samples in a micro-batch", _num_samples(pairs), self.sizes.micro_batch_size),
        ):
            if found not in (None, wanted) and what not in self._warned:
                self._warned.add(what)
                warnings.warn(f"{found} {what}, but the configuration says {wanted}; is data missing?", stacklevel=4)

    def _check(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Call check_inputs of the model's first layer, if this rank holds that layer and it has this method."""
        first: Any = dict(self._model.layers.items()).get("0")
        if hasattr(first, "check_inputs"):
            for inputs, _ in pairs:
                first.check_inputs(inputs)


def _as_pytree(value: Any) -> Any:
    """Convert a mapping that is no pytree node, such as a tokenizer's BatchEncoding, to a dict; return the rest unchanged."""
    return dict(value) if isinstance(value, Mapping) and type(value) not in SUPPORTED_NODES else value


def _num_samples(pairs: Sequence[tuple[Any, Any]]) -> int | None:
    """Return the first dimension of the first tensor of the inputs; None without one."""
    tensors = (
        leaf for inputs, _ in pairs[:1] for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()
    )
    return next((len(tensor) for tensor in tensors), None)


class MicroBatchSource:
    """Takes micro-batches from iterators, and keeps those that a step did not use for the next one."""

    def __init__(self) -> None:
        # id(iterator) -> (an object that keeps the id from being reused, its kept micro-batches)
        self._left: dict[int, tuple[Any, list[Any]]] = {}

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
        _, kept = self._left.setdefault(id(iterator), (self._holder(iterator), []))
        for item in islice(iterator, max(0, most - len(kept))):
            kept.append(item)  # those before an exception stay in _left
        taken = self.forget(iterator)
        self.give_back(iterator, taken[most:])
        return taken[:most]

    def give_back(self, iterator: Iterator[Any], micro_batches: list[Any]) -> None:
        """Keep micro-batches that a step could not use, because another rank had fewer or failed, for the next `take`."""
        left = [*micro_batches, *self.forget(iterator)]
        if left:
            self._left[id(iterator)] = self._holder(iterator), left

    def _holder(self, iterator: Iterator[Any]) -> Any:
        """Return a weak reference that drops what is kept of the iterator at its end, or the iterator where it has none."""
        left, key = self._left, id(iterator)
        try:
            return weakref.ref(iterator, lambda _: left.pop(key, None))
        except TypeError:  # those of lists, and others in C
            return iterator

    def num_left(self, iterator: Iterator[Any]) -> int:
        """Return the number of micro-batches of `iterator` that are kept."""
        return len(self._left[id(iterator)][1]) if id(iterator) in self._left else 0

    def forget(self, iterator: Iterator[Any]) -> list[Any]:
        """Drop the micro-batches of `iterator` that are kept, and return them."""
        return self._left.pop(id(iterator), (None, []))[1]


def agree(
    signatures: Sequence[int] | None,
    failed: bool,
    most: int,
    groups: ProcessGroups,
    first_stage: int,
    trained: int = 0,
) -> list[int]:
    """Agree with all ranks on the number and structure of a step's micro-batches, by collectives on the host.

    Returns the signature of each micro-batch of this rank's pipeline. Their number is the same on every rank: the smallest of
    the ranks that load data. A signature depends on the inputs and on which parameters any stage trains, because both
    determine which outputs of stages require a gradient.

    - signatures: one for each micro-batch that this rank could load, at most `most`; None on a rank that needs no data.
    - failed: whether loading failed on this rank.
    - first_stage: the stage of the first chunk, whose signatures are used.
    - trained: signature of which of this rank's parameters require gradients.

    Raises PeerDataError on all ranks when loading failed on one; when one has no micro-batch, StopIteration on it and
    PeerEndOfData on ranks that do or need none.
    """
    count = _FAILED if failed else _NO_DATA_NEEDED if signatures is None else len(signatures)
    padded = [*(signatures or ()), *[0] * most][:most]
    rows = all_gather_integers([count, trained, *padded], groups.control)
    broken = [rank for rank, row in enumerate(rows) if row[0] == _FAILED]
    if broken:
        raise PeerDataError(f"ranks {broken} could not load their micro-batches; their own errors say why", broken[0])
    number = min(row[0] for row in rows if row[0] != _NO_DATA_NEEDED)
    empty = [rank for rank, row in enumerate(rows) if row[0] == 0]
    if count == 0:
        raise StopIteration(f"the data iterator of rank {groups.rank} has no micro-batch left")
    if empty:
        raise PeerEndOfData(f"the data iterators of ranks {empty} have no micro-batch left", empty[0])
    pipeline = [rows[rank] for rank in groups.pipe.ranks]
    everywhere = [row[1] for row in pipeline]
    return [_hash(f"{each} {everywhere}".encode()) for each in pipeline[first_stage][2 : 2 + number]]


def signature(inputs: Any) -> int:
    """Hash the structure of a micro-batch's inputs (tree, shapes, dtypes, and values other than tensors) to 63 bits."""
    structure, _ = describe(inputs)
    return _hash(f"{structure.tree}|{structure.leaves}".encode())


def _hash(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def make_loader(
    model: PipelineModule,
    data: Dataset[Any] | DataLoader[Any],
    sizes: BatchSizes,
    config: Config,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    pin_memory: bool = True,
) -> DataLoader[Any]:
    """Return a loader of this replica's micro-batches of a dataset, or `data` itself. Raises ConfigError, DataError.

    config.dataloader_shuffle says whether samples are shuffled; by default they are, except for a pipeline, which reads them
    in the dataset's order, as in DeepSpeed. pin_memory: whether batches are in pinned memory, on CUDA only.
    """
    if isinstance(data, DataLoader):
        if data.batch_size not in (None, sizes.micro_batch_size):
            raise ConfigError(
                f"training_data is a DataLoader with batches of {data.batch_size}, but train_micro_batch_size_per_gpu is "
                f"{sizes.micro_batch_size}; make the two equal"
            )
        return data
    groups, chosen = model.groups, config.dataloader_shuffle
    own = sizes.micro_batch_size, groups.coordinate("data"), groups.data.size, sizes.num_micro_batches
    options: dict[str, Any] = {"collate_fn": collate_fn, "pin_memory": pin_memory and model.device.type == "cuda"}
    if not isinstance(data, Sized) or isinstance(data, IterableDataset):
        if not hasattr(data, "__iter__"):
            raise DataError(
                f"training_data {type(data).__name__} has neither a length nor __iter__; give it one of them"
            )
        return DataLoader(ReplicaSamples(data, *own), batch_size=sizes.micro_batch_size, **options)
    shuffle = isinstance(model, SingleStageModule) if chosen is None else chosen
    sampler = MicroBatchSampler(len(data), *own, config.seed, config.dataloader_drop_last, shuffle)
    return DataLoader(data, batch_sampler=sampler, **options)
