"""Loss of a batch, from the losses of its micro-batches on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel3d.comm.groups import ProcessGroups
from parallel3d.errors import ConfigError


@dataclass(frozen=True)
class LossShare:
    """This rank's share of a batch's loss, as float64 scalars.

    It is 0 except on the first tensor-parallel rank of the last chunk. The mean loss is total / count, each summed over all
    ranks. counted: whether the loss function returns counts, such as numbers of tokens; else the counts add up to 1.
    """

    total: Tensor
    count: Tensor
    counted: bool

    @staticmethod
    def of(
        losses: Sequence[Tensor],
        counts: Sequence[Tensor],
        groups: ProcessGroups,
        device: torch.device,
        weight: float = 1.0,
    ) -> LossShare:
        """Add up losses, and counts if there are any.

        weight: multiplies all, so that each loss has the weight that its gradient had.

        Raises ConfigError if there are counts for only some of the losses.
        """
        if counts and len(counts) != len(losses):
            raise ConfigError(
                f"the loss function returned (sum, count) for {len(counts)} of {len(losses)} micro-batches and a mean for the "
                "others; return (sum, count) for all, or a mean for all"
            )
        zero = torch.zeros((), dtype=torch.float64, device=device)
        if groups.coordinate("model") > 0:
            losses, counts = [], []
        total, count = (
            torch.stack([tensor.reshape(()) for tensor in given]).double().sum() * weight if given else zero
            for given in (losses, counts)
        )
        if counts:
            return LossShare(total, count, True)
        # A replica's share does not depend on its number of losses.
        return LossShare(total, torch.full_like(zero, 1.0 / groups.data.size if losses else 0.0), False)


def countable(count: Tensor) -> Tensor:
    """Return a count to divide a sum, and its gradients, by: 1 in place of 0, so that a sum of nothing gives 0."""
    return count.masked_fill(count == 0, 1.0)
