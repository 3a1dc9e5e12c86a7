"""Parameters as parts of the whole model, whatever the layout; buckets, norm and checkpoints read only this.

Under tensor slicing a parameter may say two more things, as attributes of its own: `slicing`, where it is a part of a
tensor, and `partial_over`, the group over which its gradient is to be summed, where it is a copy of a whole one of whose
gradient each rank computes a part. A parameter with neither is a copy whose gradient is whole on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

# (start, stop) along a dim.
Range = tuple[int, int]


@dataclass(frozen=True, eq=False)
class ParameterInfo:
    """One trainable parameter of this rank.

    name: the same in every layout, "layers.<place in the list>.<name in the layer>"; owners: the chunks of the whole
    model that hold a copy, one a rank where several chunks of a rank share it; more than one make a replica group.
    """

    name: str
    parameter: nn.Parameter
    owners: tuple[int, ...]

    @property
    def shared(self) -> bool:
        """Whether its gradient is complete only after the backwards of several chunks."""
        return len(self.owners) > 1


@dataclass(frozen=True)
class Slicing:
    """Which part of a whole tensor a rank's parameter is: `ranges` of the whole along `dim`, one behind the other.

    size: of the whole along `dim`. Over the ranks of a tensor-slicing group the ranges cover 0 to size exactly once, and
    there is no padding: the parts of two ranks may differ in size.
    """

    dim: int
    size: int
    ranges: tuple[Range, ...]

    @property
    def length(self) -> int:
        """The length of the part along `dim`."""
        return sum(stop - start for start, stop in self.ranges)

    def part_of(self, whole: Tensor) -> Tensor:
        """The part, in memory of its own."""
        return torch.cat([whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges], self.dim)

    def write(self, whole: Tensor, part: Tensor) -> None:
        """Put a part where it belongs in a whole tensor: done with every rank's part, the inverse of `part_of`."""
        places = [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        for place, piece in zip(
            places, part.split([stop - start for start, stop in self.ranges], self.dim), strict=True
        ):
            place.copy_(piece)


def sliced(whole: Tensor, slicing: Slicing) -> nn.Parameter:
    """A parameter of a rank's part of `whole`, which says so; trainable if that is."""
    parameter = nn.Parameter(slicing.part_of(whole.detach()), whole.requires_grad)
    vars(parameter)["slicing"] = slicing
    return parameter


def slicing_of(parameter: Tensor) -> Slicing | None:
    """Which part of a whole tensor the parameter is; None where it is whole."""
    slicing: Slicing | None = getattr(parameter, "slicing", None)
    return slicing


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of the whole tensor that a parameter is a part of."""
    slicing = slicing_of(parameter)
    if slicing is None:
        return tuple(parameter.shape)
    return tuple(slicing.size if dim == slicing.dim else size for dim, size in enumerate(parameter.shape))
