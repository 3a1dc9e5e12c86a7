"""A plain module as a pipeline of one stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from parallel3d.comm.groups import ProcessGroups
from parallel3d.pipe.blocks import units_of
from parallel3d.pipe.module import PipelineModule
from parallel3d.rng import EnterLayer, same_stream


class SingleStageModule(PipelineModule):
    """Any nn.Module as a pipeline of one stage with one layer: whole on every rank, over which the world is data parallel.

    groups: those over which tensor-parallel layers inside the module are sharded; None without any.

    A micro-batch is the module's input: a mapping is passed as keywords, a tuple or list as arguments, anything else as the
    one argument. The module's result is the loss or contains it: as `.loss`, under "loss", or first in a tuple or list.
    Parameters keep the names that the module gives them.
    """

    def __init__(self, model: nn.Module, groups: ProcessGroups | None = None):
        units = units_of(model)
        self._unit_of = {
            f"{path}.{name}" if path else name: units[module]
            for path, module in model.named_modules(remove_duplicate=False)
            for name in module._parameters
        }
        self._given_groups = groups
        topology = None if groups is None else groups.topology
        super().__init__([model], num_stages=1, topology=topology, loss_fn=_loss_of)

    def pair(self, micro_batch: Any) -> tuple[Any, Any]:
        """Return the whole micro-batch as inputs. A mapping becomes a dict, because pytrees look into no other."""
        return dict(micro_batch) if isinstance(micro_batch, Mapping) else micro_batch, None

    def forward_chunk(self, chunk: int, x: Any, enter: EnterLayer = same_stream) -> Any:
        """Run the module on a micro-batch."""
        self.wait_for_weights(self)
        enter(0)
        if isinstance(x, Mapping):
            return self.layers["0"](**x)
        return self.layers["0"](*x) if isinstance(x, (tuple, list)) else self.layers["0"](x)

    def unit_of(self, layer: int, name: str) -> int:
        """Return the number of the unit of a parameter of the module; see units_of."""
        return self._unit_of[name]

    def global_name(self, layer: int, name: str) -> str:
        """Return the module's own name of the parameter."""
        return name


def _loss_of(outputs: Any, _: Any) -> Tensor:
    loss = getattr(outputs, "loss", None)
    if loss is None and isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    if loss is None:
        loss = outputs[0] if isinstance(outputs, (tuple, list)) and outputs else outputs
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"the module returned {type(outputs).__name__} without a loss; let its forward return the loss (or .loss, "
            '"loss", or a tuple that begins with it), or use engine(...), engine.backward(loss) and engine.step()'
        )
    return loss
