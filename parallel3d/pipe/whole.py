"""A plain module as a pipeline of one stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from parallel3d.pipe.module import PipelineModule
from parallel3d.rng import EnterLayer, same_stream


class WholeModel(PipelineModule):
    """Any nn.Module, whole on every rank: one stage of one layer, the world data parallel.

    A micro-batch is what the module takes: a mapping as keywords, a tuple or list as arguments, all else as the one
    argument. Its result is the loss, or holds it: as `.loss`, under "loss", or first in a tuple or list.
    Parameters keep the names that the module gives them.
    """

    def __init__(self, model: nn.Module):
        super().__init__([model], num_stages=1, loss_fn=_loss_of)

    @property
    def model(self) -> nn.Module:
        """The module itself."""
        return self.layers["0"]

    def pair(self, micro_batch: Any) -> tuple[Any, Any]:
        """The whole micro-batch is the input. A mapping of another class than dict would hide its tensors: a dict of it."""
        return dict(micro_batch) if isinstance(micro_batch, Mapping) else micro_batch, None

    def forward_chunk(self, chunk: int, x: Any, enter: EnterLayer = same_stream) -> Any:
        """The module on a micro-batch."""
        self.wait_for_weights(self)
        enter(0)
        if isinstance(x, Mapping):
            return self.model(**x)
        return self.model(*x) if isinstance(x, (tuple, list)) else self.model(x)

    def global_name(self, layer: int, name: str) -> str:
        """As the module has it."""
        return name


def _loss_of(outputs: Any, _: Any) -> Tensor:
    loss = getattr(outputs, "loss", None)
    if loss is None and isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    if loss is None and isinstance(outputs, (tuple, list)) and outputs:
        loss = outputs[0]
    loss = outputs if loss is None else loss
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"the module returned {type(outputs).__name__} without a loss; let its forward return the loss (or .loss, "
            '"loss", or a tuple that begins with it), or use engine(...), engine.backward(loss) and engine.step()'
        )
    return loss
