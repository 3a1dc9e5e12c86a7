"""Sharding of the decoder's layers over tensor-parallel ranks, and logits that are sharded by the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from parallel3d.comm.collectives import Group
from parallel3d.parameters import slicing_of, whole_shape
from parallel3d.specs import BuildContext
from parallel3d.tensor_parallel.dropout import SequenceDropout
from parallel3d.tensor_parallel.regions import gather_features, scatter_sequence, slicing_group, sum_gradients_over
from parallel3d.tensor_parallel.slicing import cut


class Dropout(nn.Dropout):
    """nn.Dropout of replicated hidden states, called like SequenceDropout."""

    def forward(self, input: Tensor, length: int | None = None) -> Tensor:
        """Run nn.Dropout; the length isn't needed."""
        return super().forward(input)


class Sharding:
    """Sharding of the layers that a rank builds over its tensor-parallel group.

    With sequence parallelism hidden states between regions are shards [batch, ceil(seq / tp), hidden], and the layers at the
    boundary of a region are given the length of the whole sequence.

    - context: of the build; without one, the group is this rank alone.
    """

    def __init__(self, context: BuildContext | None):
        self.group: Group = slicing_group(None, context)
        self.sequence_parallel = context is not None and context.sequence_parallel and self.group.size > 1
        self.layout_independent = context is not None and context.layout_independent

    @property
    def of_linears(self) -> dict[str, Any]:
        """Arguments of tensor-parallel layers at the boundary of a region."""
        return {"sequence_parallel": self.sequence_parallel, "group": self.group}

    @property
    def of_dropout(self) -> dict[str, Any]:
        """Arguments of dropout of sharded tensors."""
        return {"layout_independent": self.layout_independent, "group": self.group}

    def dropout(self, rate: float) -> nn.Module:
        """Return dropout between regions; called with its input and the length of the whole sequence."""
        return SequenceDropout(rate, **self.of_dropout) if self.sequence_parallel else Dropout(rate)

    def norm(self, norm: nn.Module) -> nn.Module:
        """Return a norm, which now normalizes hidden states between regions."""
        if self.sequence_parallel:
            sum_gradients_over(norm.parameters(), self.group)
        return norm

    def scatter(self, x: Tensor) -> Tensor:
        """Return replicated hidden states as those between regions."""
        return scatter_sequence(x, self.group) if self.sequence_parallel else x

    def length(self, seq: int) -> int | None:
        """Return the sequence length that travels with hidden states between regions, or None."""
        return seq if self.sequence_parallel else None


@dataclass(frozen=True)
class SlicedLogits:
    """One rank's part, [batch, seq, its words], of logits that are sharded by the vocabulary over the ranks of `group`."""

    local: Tensor
    group: Group
    vocab_size: int

    def __getattr__(self, name: str) -> NoReturn:
        # A field is asked for here where an object has none yet: torch.compile asks one whose __init__ it traces.
        if name.startswith("_") or name in type(self).__dataclass_fields__:
            raise AttributeError(name)
        raise AttributeError(
            f"SlicedLogits have no {name!r}: they are this rank's {self.local.shape[-1]} of {self.vocab_size} words; "
            "logits.whole() is a tensor of all, and models.CausalLMLoss takes them as they are"
        )

    def whole(self) -> Tensor:
        """Return all logits, [batch, seq, vocab], on every rank. Collective over the group."""
        return gather_features(self.local, cut(self.vocab_size, None, self.group.size), self.group)


def fill_whole(parameter: Tensor, fill: Callable[[Tensor], Tensor]) -> None:
    """Set a parameter to its part of the whole tensor that `fill` fills: random weights don't depend on the sharding."""
    slicing = slicing_of(parameter)
    if slicing is None:
        fill(parameter)
    else:
        whole = torch.empty(whole_shape(parameter), dtype=parameter.dtype, device=parameter.device)
        parameter.copy_(slicing.part_of(fill(whole)))
