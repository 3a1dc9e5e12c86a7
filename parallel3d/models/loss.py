"""The loss of a causal language model, and logits that stay sharded by the vocabulary."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from parallel3d.comm.collectives import Group
from parallel3d.errors import DataError
from parallel3d.tensor_parallel.regions import gather_features, slicing_group
from parallel3d.tensor_parallel.slicing import cut
from parallel3d.tensor_parallel.vocabulary import EAGER, Passes, vocab_parallel_cross_entropy

IGNORED = -100  # label of a position that doesn't count, as in transformers


def next_labels(labels: Tensor, ignored: int = IGNORED) -> Tensor:
    """Return the label of the token after each position, [batch, seq] like `labels`; `ignored` at the last."""
    return torch.cat([labels[..., 1:], torch.full_like(labels[..., :1], ignored)], dim=-1)


@dataclass(frozen=True)
class CausalLMLoss:
    """Cross entropy of each position's label, from logits [..., seq, vocab] and labels [..., seq], at least in fp32.

    It is computed `chunk` positions at a time, so that no copy of all logits in fp32 exists. With SlicedLogits each rank
    computes its part of the vocabulary. Raises DataError for labels of another shape.

    - shift: labels are the token ids themselves, as in transformers: each position predicts the token after it.
    - per_token: return (sum, number of labels that count), for a mean over all tokens of a batch; otherwise the mean of a call.
    - z_loss: weight of logsumexp^2 (arXiv:2204.02311).
    - ignore_index: labels with this value don't count.
    """

    shift: bool = False
    per_token: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    ignore_index: int = IGNORED
    chunk: int = 512
    passes: Passes = field(default=EAGER, repr=False)

    def in_one(self) -> CausalLMLoss:
        """Return this loss, computed for all positions at once."""
        return replace(self, chunk=sys.maxsize)

    def compiled(self, **options: Any) -> CausalLMLoss:
        """Return this loss for all positions at once, compiled with these options between its collectives, without copies."""
        return replace(self.in_one(), passes=Passes.compiled(**options))

    def __call__(self, logits: Tensor | SlicedLogits, labels: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return the loss, or (sum of losses, number of tokens)."""
        if isinstance(logits, Tensor):
            logits = SlicedLogits(logits, slicing_group(None, None), logits.shape[-1])
        local = logits.local
        if local.shape[:-1] != labels.shape:
            raise DataError(f"labels are {list(labels.shape)}, but the logits {list(local.shape)}; give one a position")
        if self.shift:
            labels = next_labels(labels, self.ignore_index)
        count = (labels != self.ignore_index).sum()
        # Not slices: the backward of each would make a gradient of all logits' size.
        chunk = min(self.chunk, max(1, labels.shape[-1]))
        chunks = zip(local.split(chunk, dim=-2), labels.split(chunk, dim=-1), strict=True)
        losses = partial(
            vocab_parallel_cross_entropy,
            group=logits.group,
            vocab_size=logits.vocab_size,
            label_smoothing=self.label_smoothing,
            ignore_index=self.ignore_index,
            z_loss=self.z_loss,
            passes=self.passes,
        )
        total = torch.stack([losses(part, wanted).sum() for part, wanted in chunks]).sum()
        return (total, count) if self.per_token else total / count.clamp(min=1)


causal_lm_loss = CausalLMLoss()


@dataclass(frozen=True)
class SlicedLogits:
    """One rank's part, [batch, seq, its words], of logits that are sharded by the vocabulary over the ranks of `group`."""

    local: Tensor
    group: Group
    vocab_size: int

    def __getattr__(self, name: str) -> NoReturn:
        # torch.compile reads fields of an object whose __init__ it traces, before they are set.
        if name.startswith("_") or name in type(self).__dataclass_fields__:
            raise AttributeError(name)
        raise AttributeError(
            f"SlicedLogits have no {name!r}: they are this rank's {self.local.shape[-1]} of {self.vocab_size} words; "
            "logits.whole() is a tensor of all, and models.CausalLMLoss takes them as they are"
        )

    def whole(self) -> Tensor:
        """Return all logits, [batch, seq, vocab], on every rank. Collective over the group."""
        return gather_features(self.local, cut(self.vocab_size, None, self.group.size), self.group)
