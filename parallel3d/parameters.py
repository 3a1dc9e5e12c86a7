"""Parameters as parts of the whole model, whatever the layout; buckets, norm and checkpoints read only this.

Under tensor parallelism a parameter may have two attributes more: `slicing`, where it is a part of a tensor, and
`partial_over`, where it is a copy of a whole one and each rank computes a part of its gradient: the group over which the
gradient is to be summed. A parameter with neither is a copy whose gradient is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# (start, stop) along a dim.
Range = tuple[int, int]


@dataclass(frozen=True, eq=False)
class ParameterInfo:
    """One trainable parameter of this rank.

    - name: the same in every layout, "layers.<place in the list>.<name in the layer>".
    - owners: the chunks of the whole model that hold a copy, one for each rank where several chunks of a rank share it. More
      than one make a replica group.
    - unit: index of the layer whose weights are gathered together with it if weights are sharded.
    """

    name: str
    parameter: nn.Parameter
    owners: tuple[int, ...]
    unit: int = 0

    @property
    def shared(self) -> bool:
        """Whether its gradient is complete only after the backwards of several chunks."""
        return len(self.owners) > 1


@dataclass(frozen=True)
class Slicing:
    """Part of a whole tensor that a rank's parameter is: `ranges` of the whole along `dim`, one after the other.

    - size: of the whole along `dim`.

    Over the ranks of a tensor-parallel group the ranges cover 0 to size exactly once. There is no padding: the parts of two
    ranks may differ in size.
    """

    dim: int
    size: int
    ranges: tuple[Range, ...]

    @property
    def length(self) -> int:
        """Length of the part along `dim`."""
        return sum(stop - start for start, stop in self.ranges)

    def part_of(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor, in memory of its own."""
        return torch.cat([whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges], self.dim)

    def write(self, whole: Tensor, part: Tensor) -> None:
        """Copy a part to where it belongs in a whole tensor: with the parts of all ranks, the inverse of `part_of`."""
        lengths = [stop - start for start, stop in self.ranges]
        for (start, _), length, values in zip(self.ranges, lengths, part.split(lengths, self.dim), strict=True):
            whole.narrow(self.dim, start, length).copy_(values)


def sliced(whole: Tensor, slicing: Slicing) -> nn.Parameter:
    """Return a parameter with a rank's part of `whole`, marked by its slicing; trainable if `whole` is."""
    parameter = nn.Parameter(slicing.part_of(whole.detach()), whole.requires_grad)
    vars(parameter)["slicing"] = slicing
    return parameter


def slicing_of(parameter: Tensor) -> Slicing | None:
    """Return which part of a whole tensor the parameter is; None where it is whole."""
    slicing: Slicing | None = getattr(parameter, "slicing", None)
    return slicing


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of the whole tensor that a parameter is a part of."""
    slicing = slicing_of(parameter)
    if slicing is None:
        return tuple(parameter.shape)
    return tuple(slicing.size if dim == slicing.dim else size for dim, size in enumerate(parameter.shape))


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's buffers that its state_dict holds, by their names there."""
    for prefix, submodule in module.named_modules():
        for name, buffer in submodule._buffers.items():
            if buffer is not None and name not in submodule._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
