"""A rank's parts of the tensors of a checkpoint: boxes, as views of its memory, to write from and read into."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from parallel3d.checkpoint.boxes import Box, boxes_of_range, cut, in_whole, whole_box
from parallel3d.checkpoint.format import OPTIMIZER
from parallel3d.parameters import slicing_of, whole_shape
from parallel3d.zero.buckets import ParameterShard
from parallel3d.zero.memory import is_elementwise_state

# Reading verifies a stored box as a whole, so a small part of a larger box would take longer to read.
_MOST_ELEMENTS = 1 << 24


@dataclass(frozen=True, eq=False)
class Part:
    """`box` of the tensor `name`, whose whole shape is `shape`; values: [box.shape], a view of the rank's memory."""

    name: str
    shape: tuple[int, ...]
    box: Box
    values: Tensor


def parts_of(name: str, like: Tensor, values: Tensor | None = None, start: int = 0) -> Iterator[Part]:
    """Yield a rank's tensor, or elements from `start` on of it, flattened, as boxes of the whole tensor `name`.

    - like: has the shape of the rank's tensor, and its slicing, if it is sharded over tensor-parallel ranks.
    - values: those elements, or the tensor; `like` itself by default.
    """
    shape, slicing = whole_shape(like), slicing_of(like)
    values = (like if values is None else values).detach()
    if values.shape == like.shape:
        local = [(whole_box(like.shape), values)]
    else:
        local, begin = [], 0
        for box in boxes_of_range(like.shape, start, start + values.numel()):
            local.append((box, values[begin : begin + box.numel].view(box.shape)))
            begin += box.numel
    for box, held in local:
        for here, there in in_whole(box, slicing):
            part = held[here.slices(box.start)]
            for small in cut(there, _MOST_ELEMENTS):
                if small.numel:
                    yield Part(name, shape, small, part[small.slices(there.start)])


def shard_parts(name: str, shard: ParameterShard, values: Tensor) -> Iterator[Part]:
    """Yield a shard's values as parts of tensor `name`, which has the parameter's shape. values: [elements of the shard]."""
    return parts_of(name, shard.info.parameter, values, shard.start)


def state_parts(shard: ParameterShard, key: str, value: Tensor) -> Iterable[Part]:
    """Return a tensor of a shard's optimizer state as parts: elementwise state is cut like the master, other state is whole."""
    if is_elementwise_state(key, value.shape, shard.master.shape):
        return shard_parts(state_name(shard, key), shard, value)
    name = state_name(shard, key) if value.dim() == 0 else own_state_name(shard, key)
    return [Part(name, tuple(value.shape), whole_box(value.shape), value.detach())]


def state_name(shard: ParameterShard, key: str) -> str:
    """Return the stored name of an optimizer state that is elementwise or a single number."""
    return f"{OPTIMIZER}{key}/{shard.info.name}"


def own_state_name(shard: ParameterShard, key: str) -> str:
    """Return the stored name of any other optimizer state. It contains the part of the parameter, the only one that it fits."""
    name, slicing = state_name(shard, key), slicing_of(shard.info.parameter)
    if slicing is not None:
        name += f" of dim {slicing.dim} {slicing.ranges}"
    return name if shard.master.shape == shard.info.parameter.shape else f"{name} from {shard.start} on"
