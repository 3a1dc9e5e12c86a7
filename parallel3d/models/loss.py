"""The loss of a causal language model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from parallel3d.errors import DataError
from parallel3d.models.sliced import token_losses


@dataclass(frozen=True)
class CausalLMLoss:
    """loss_fn(logits [batch, seq, vocab], labels [batch, seq]): cross entropy of each position's label, at least in fp32.

    Computed `chunk` positions at a time, in the backward once more, so that no copy of all logits in fp32 exists. Labels
    that are ignore_index don't count. shift: labels are the token ids themselves, as in transformers: each position
    predicts the one after it. per_token: return (sum, number of labels that count), for a mean over all tokens of a batch;
    otherwise the mean over this call's. z_loss: weight of logsumexp^2 (arXiv:2204.02311). Raises DataError.
    """

    shift: bool = False
    per_token: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    ignore_index: int = -100
    chunk: int = 512

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """See the class."""
        if logits.shape[:-1] != labels.shape:
            raise DataError(
                f"labels are {list(labels.shape)}, but the logits {list(logits.shape)}; give one a position"
            )
        if self.shift:
            labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], self.ignore_index)], dim=1)
        count = (labels != self.ignore_index).sum()
        # Not slices: the backward of each would make a gradient of all logits' size.
        chunks = zip(logits.split(self.chunk, dim=1), labels.split(self.chunk, dim=1), strict=True)
        total = torch.stack([self._sum(*chunk) for chunk in chunks]).sum()
        return (total, count) if self.per_token else total / count.clamp(min=1)

    def _sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        if logits.requires_grad and torch.is_grad_enabled():
            return checkpoint(self._sum_of, logits, labels, use_reentrant=False, preserve_rng_state=False)
        return self._sum_of(logits, labels)

    def _sum_of(self, logits: Tensor, labels: Tensor) -> Tensor:
        return token_losses(
            logits.flatten(0, 1),
            labels.flatten(),
            label_smoothing=self.label_smoothing,
            ignore_index=self.ignore_index,
            z_loss=self.z_loss,
        ).sum()


causal_lm_loss = CausalLMLoss()
