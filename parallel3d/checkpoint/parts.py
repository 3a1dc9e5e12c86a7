"""A rank's parts of the tensors of a checkpoint: boxes, as views of its memory, to write from and read into."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.checkpoint.boxes import Box, boxes_of_range, cut, in_whole, whole_box
from parallel3d.checkpoint.format import MASTER, MODEL, OPTIMIZER
from parallel3d.parameters import ParameterInfo, slicing_of, whole_shape
from parallel3d.zero.buckets import Bucket, ParameterShard

# A box is read, and its checksum compared, as a whole: of larger ones much might be read for little.
_MOST_ELEMENTS = 1 << 24


@dataclass(frozen=True, eq=False)
class Part:
    """`box` of the tensor `name`, which is of `shape` in all; values: [box.shape], a view of what the rank holds."""

    name: str
    shape: tuple[int, ...]
    box: Box
    values: Tensor


def parts_of(name: str, like: Tensor, values: Tensor, start: int = 0) -> Iterator[Part]:
    """A tensor of a rank, or elements from `start` on of it, flattened, in boxes of the whole tensor that `name` is.

    like: of the shape of the rank's tensor, and with its slicing, if it is a slice of the whole.
    """
    shape, slicing = whole_shape(like), slicing_of(like)
    if values.shape == like.shape:
        local = [(whole_box(like.shape), values.detach())]
    else:
        local, begin = [], 0
        for box in boxes_of_range(like.shape, start, start + values.numel()):
            local.append((box, values.detach()[begin : begin + box.numel].view(box.shape)))
            begin += box.numel
    for box, held in local:
        for here, there in in_whole(box, slicing):
            part = held[here.slices(box.start)]
            for small in cut(there, _MOST_ELEMENTS):
                if small.numel:
                    yield Part(name, shape, small, part[small.slices(there.start)])


def weights(buckets: Iterable[Bucket]) -> Iterator[Part]:
    """Iterate over the weights that the layers compute with, of the parameters that this rank updates."""
    for bucket in buckets:
        for piece in bucket.pieces:
            yield from parts_of(MODEL + piece.info.name, piece.info.parameter, bucket.weights_of(piece), piece.start)


def masters(buckets: Iterable[Bucket], wider_alone: bool) -> Iterator[Part]:
    """Iterate over the masters that this rank updates. wider_alone: only those that are wider copies of the weights."""
    for bucket in buckets:
        if bucket.has_own_master or not wider_alone:
            for piece in bucket.pieces:
                yield from parts_of(MASTER + piece.info.name, piece.info.parameter, piece.master, piece.start)


def frozen(infos: Iterable[ParameterInfo]) -> Iterator[Part]:
    """Parameters that nothing updates."""
    for info in infos:
        yield from parts_of(MODEL + info.name, info.parameter, info.parameter)


def optimizer_state(
    optimizer: torch.optim.Optimizer, buckets: Iterable[Bucket]
) -> tuple[list[Part], dict[str, dict[str, Any]]]:
    """Return the optimizer's state on this rank: tensors, and numbers by parameter and key.

    A parameter that was never updated has none.
    """
    parts: list[Part] = []
    numbers: dict[str, dict[str, Any]] = {}
    for bucket in buckets:
        for piece in bucket.pieces:
            for key, value in optimizer.state.get(piece.master, {}).items():
                if isinstance(value, Tensor):
                    parts += state_parts(piece, key, value)
                else:
                    numbers.setdefault(piece.info.name, {})[key] = value
    return parts, numbers


def state_parts(piece: ParameterShard, key: str, value: Tensor) -> Iterable[Part]:
    """A tensor of a piece's state: elementwise ones are as the master is; others, such as step counts, as they are."""
    if value.shape == piece.master.shape:
        return parts_of(state_name(piece, key), piece.info.parameter, value, piece.start)
    name = state_name(piece, key) if value.dim() == 0 else own_state_name(piece, key)
    return [Part(name, tuple(value.shape), whole_box(value.shape), value.detach())]


def state_name(piece: ParameterShard, key: str) -> str:
    """Return the name of an elementwise state of a parameter, or of one that is a number."""
    return f"{OPTIMIZER}{key}/{piece.info.name}"


def own_state_name(piece: ParameterShard, key: str) -> str:
    """Return the name of any other state. The state of a part of a parameter fits only that part, which the name says."""
    name, slicing = state_name(piece, key), slicing_of(piece.info.parameter)
    if slicing is not None:
        name += f" of dim {slicing.dim} {slicing.ranges}"
    return name if piece.master.shape == piece.info.parameter.shape else f"{name} from {piece.start} on"


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module's buffers that its state_dict holds, by their names there."""
    for prefix, submodule in module.named_modules():
        for name, buffer in submodule._buffers.items():
            if buffer is not None and name not in submodule._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
