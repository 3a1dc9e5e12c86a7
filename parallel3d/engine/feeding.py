"""Where an engine's micro-batches come from, and how many make a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from parallel3d.comm.groups import ProcessGroups
from parallel3d.config import BatchSizes, resolve_batch
from parallel3d.engine.calls import StepByCalls
from parallel3d.errors import ConfigError
from parallel3d.pipe.batch import BatchLoader
from parallel3d.pipe.data import RepeatingLoader
from parallel3d.pipe.module import PipelineModule


class Feeding:
    """What a script says of its data."""

    _batch_sizes: BatchSizes
    _calls: StepByCalls
    _data_iterator: Iterator[Any] | None
    _groups: ProcessGroups
    _loader: BatchLoader
    _model: PipelineModule

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Take micro-batches from `iterator` when train_batch gets none."""
        self._data_iterator = iterator

    def set_dataloader(self, loader: Any) -> None:
        """Take micro-batches from `loader`, over and over, when train_batch gets no iterator."""
        self._data_iterator = RepeatingLoader(loader)

    def set_batch_fn(self, function: Callable[[Any], Any]) -> None:
        """Make (inputs, labels) by function(what an iterator yields)."""
        self._loader.batch_fn = function

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """From the next step on, so many samples a step, by another number of micro-batches of the same size.

        Raises ConfigError when micro-batches of all replicas don't add up to it, and between the micro-batches of a step.
        """
        if done := self._calls.num_backwards:
            raise ConfigError(f"{done} micro-batches of a step are done; set the batch size behind the step's last")
        sizes = self._batch_sizes
        topology = self._model.topology()
        self._batch_sizes = resolve_batch(
            train_batch_size,
            sizes.micro_batch_size,
            None,
            pipe=self._model.num_stages,
            data=self._groups.data.size,
            model=max(1, topology.get_dim("model")),
        )
