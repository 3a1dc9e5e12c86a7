"""Source of a training's micro-batches, and the batch sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from parallel3d.config import BatchSizes, resolve_batch
from parallel3d.engine.progress import StepProgress
from parallel3d.errors import ConfigError
from parallel3d.pipe.batch import BatchLoader
from parallel3d.pipe.module import PipelineModule


class TrainingData:
    """Default iterator of train_batch, loader of micro-batches, and batch sizes.

    - sizes: batch sizes of the current step.
    - iterator: used when train_batch gets none; may be None.
    - loader: loads micro-batches from any iterator.
    """

    def __init__(self, model: PipelineModule, sizes: BatchSizes, iterator: Iterator[Any] | None):
        self.sizes, self.iterator = sizes, iterator
        self.loader = BatchLoader(model)
        self._model = model

    def use_iterator(self, iterator: Iterator[Any]) -> None:
        """Take micro-batches from this iterator when train_batch gets none."""
        self.iterator = iterator

    def set_train_batch_size(self, train_batch_size: int, progress: StepProgress) -> None:
        """Take another number of micro-batches of the same size from the next step on.

        Raises ConfigError if micro-batches of all replicas don't add up to it, and between the micro-batches of a step.
        """
        if done := progress.num_backwards:
            raise ConfigError(f"{done} micro-batches of a step are done; set the batch size after the step's last")
        topology = self._model.topology()
        self.sizes = resolve_batch(
            train_batch_size,
            self.sizes.micro_batch_size,
            None,
            pipe=self._model.num_stages,
            data=self._model.groups.data.size,
            model=max(1, topology.get_dim("model")),
        )
