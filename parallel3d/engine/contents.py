"""Contents of a checkpoint: the tensors and values of an engine that it saves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from parallel3d.checkpoint.format import MODEL, checksum
from parallel3d.checkpoint.optimizer import describe_groups
from parallel3d.checkpoint.parts import Part, frozen, masters, optimizer_state, parts_of, persistent_buffers, weights
from parallel3d.engine.update import WeightUpdate
from parallel3d.parameters import slicing_of
from parallel3d.pipe.module import PipelineModule

Json = dict[str, Any]


def other_state(model: PipelineModule) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of a state_dict's other tensors: buffers, such as running means, and those of the loss function."""
    for layer, module in model.layers.items():
        for name, buffer in persistent_buffers(module):
            yield MODEL + model.global_name(int(layer), name), buffer
    if isinstance(model.loss_fn, nn.Module):
        for name, tensor in (*model.loss_fn.named_parameters(), *persistent_buffers(model.loss_fn)):
            yield f"{MODEL}loss_fn.{name}", tensor


class ReplicaState:
    """Tensors of this replica's modules that differ from the first replica's, such as running means of its data."""

    def __init__(self, model: PipelineModule):
        self._model = model
        self.load({})

    def load(self, own: Mapping[str, Tensor]) -> None:
        """Copy `own`, by name, into the modules. These tensors, and those that change from now on, differ."""
        tensors = dict(other_state(self._model))
        for name, value in own.items():
            if name in tensors:
                tensors[name].data.copy_(value)
        self._own = set(own)
        self._seen = self._checksums()

    def _checksums(self) -> dict[str, int]:
        """Return checksums by name. The tensors' version counters don't do: torch's batch norm writes without counting."""
        if self._model.groups.coordinate("data") == 0:
            return {}
        return {name: checksum(tensor.cpu().contiguous()) for name, tensor in other_state(self._model)}

    def own(self) -> dict[str, Tensor]:
        """Return the tensors that differ, by name; none on the first replica."""
        now = self._checksums()
        changed = {name for name, value in now.items() if name in self._own or self._seen.get(name) != value}
        return {name: tensor for name, tensor in other_state(self._model) if name in changed}


def parts_of_engine(model: PipelineModule, update: WeightUpdate, exclude_frozen: bool) -> tuple[list[Part], Json]:
    """Return the tensors that this rank saves, and the optimizer's groups and numbers."""
    update.sharded.follow_weights()
    buckets = list(update.reducer.all_buckets())
    state, numbers = optimizer_state(update.optimizer, buckets)
    parts = [*weights(buckets), *masters(buckets, wider_alone=True), *state]
    if not exclude_frozen:
        parts += frozen(model.frozen_infos())
    # Replicas may differ in these, as they depend on the data that a replica sees: those of the first are saved.
    for name, tensor in other_state(model) if model.groups.coordinate("data") == 0 else ():
        if slicing_of(tensor) is not None or model.groups.coordinate("model") == 0:
            parts += parts_of(name, tensor, tensor)
    return parts, {"groups": describe_groups(update.optimizer, buckets), "numbers": numbers}


def layout_of(model: PipelineModule) -> dict[str, int]:
    """Return the number of ranks along each axis."""
    groups = model.groups
    return {"pipe": groups.pipe.size, "data": groups.data.size, "model": groups.model.size}
