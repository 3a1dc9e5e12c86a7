"""Cross entropy of logits sliced over ranks by the vocabulary: no rank ever has all logits of a token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from parallel3d.comm.collectives import Group, all_reduce, all_reduce_max
from parallel3d.errors import PartitionError
from parallel3d.tensor_parallel.embedding import check_indices
from parallel3d.tensor_parallel.slicing import even_part


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        group: Group,
        start: int,
        vocab_size: int,
        label_smoothing: float,
        ignore_index: int,
        z_loss: float,
    ) -> Tensor:
        valid = labels != ignore_index
        here = valid & (labels >= start) & (labels < start + logits.shape[-1])
        places = (labels - start).where(here, 0).unsqueeze(-1)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        largest = wide.amax(-1)
        all_reduce_max(largest, group).wait()
        label = wide.gather(-1, places).squeeze(-1).sub(largest).where(here, 0)
        shifted = (wide.clone() if wide is logits else wide).sub_(largest.unsqueeze(-1))
        # Of the logits less the largest, over the whole vocabulary: sum of exponentials, of the label's, of all.
        parts = [label, shifted.sum(-1), shifted.exp_().sum(-1)]
        sums = torch.stack(parts if label_smoothing else [parts[0], parts[2]])
        all_reduce(sums, group).wait()
        log_sum = sums[-1].log()
        loss = log_sum - (1 - label_smoothing) * sums[0]
        if label_smoothing:
            loss -= label_smoothing / vocab_size * sums[1]
        log_z = log_sum + largest
        if z_loss:
            loss += z_loss * log_z.square()
        ctx.save_for_backward(logits, log_z, places, here, valid)
        ctx.vocab_size, ctx.label_smoothing, ctx.z_loss = vocab_size, label_smoothing, z_loss
        return loss.where(valid, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_z, places, here, valid = ctx.saved_tensors
        gradient = gradient.where(valid, 0)
        softmax = logits.to(log_z.dtype).sub(log_z.unsqueeze(-1)).exp_()
        dlogits = softmax.mul_((gradient * (1 + 2 * ctx.z_loss * log_z)).unsqueeze(-1))
        if ctx.label_smoothing:
            dlogits -= (gradient * (ctx.label_smoothing / ctx.vocab_size)).unsqueeze(-1)
        label = (gradient * (1 - ctx.label_smoothing)).where(here, 0)
        dlogits.scatter_add_(-1, places, -label.unsqueeze(-1))
        return dlogits.to(logits.dtype), *(None,) * 7


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    group: Group,
    vocab_size: int,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
) -> Tensor:
    """logits: [..., this rank's part of vocab_size], labels: [...] -> loss of each token [...], the same on every rank.

    With lse = log sum_i exp(l_i), s label_smoothing and V vocab_size, the loss of a token with label t is
    lse - (1 - s) l_t - s/V sum_i l_i + z_loss lse^2 (torch's smoothing; the z-loss of arXiv:2204.02311), or 0 where the
    label is ignore_index. Two all-reduces of numbers per token forward, the largest logit and the sums, none backward.
    Half-precision logits give a loss in fp32. A label outside of the vocabulary is an error, found on the device.
    Raises PartitionError where the logits are not this rank's part.
    """
    start, stop = even_part(vocab_size, group.size, group.index)
    if vocab_size < group.size:
        raise PartitionError(f"a vocabulary of {vocab_size} can't be split over {group.size} ranks")
    if logits.shape[-1] != stop - start or logits.shape[:-1] != labels.shape:
        raise PartitionError(
            f"logits {list(logits.shape)} for labels {list(labels.shape)}: rank {group.index} of {group.size} has "
            f"{stop - start} of {vocab_size} words, so {[*labels.shape, stop - start]} is expected"
        )
    check_indices(labels, vocab_size, labels != ignore_index)
    loss: Tensor = _CrossEntropy.apply(logits, labels, group, start, vocab_size, label_smoothing, ignore_index, z_loss)
    return loss
