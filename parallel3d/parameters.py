"""What a parameter is in the whole model, whatever the layout; buckets, norm and checkpoints read only this."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


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
