"""Layers sharded over ranks by the vocabulary: embedding, output layer with its weight, and cross-entropy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from parallel3d.autograd.split_backward import embedding, linear
from parallel3d.comm import differentiable
from parallel3d.comm.collectives import Group, all_reduce, all_reduce_max
from parallel3d.errors import PartitionError
from parallel3d.parameters import sliced
from parallel3d.specs import BuildContext
from parallel3d.tensor_parallel.linear import SlicedLayer
from parallel3d.tensor_parallel.regions import boundary, reduce_scatter_sequence, slicing_group
from parallel3d.tensor_parallel.slicing import cut, even_part


class VocabParallelEmbedding(SlicedLayer):
    """Embedding whose rows are sharded by the vocabulary: indices [...] -> [..., dim], replicated.

    y = sum_r E_r[i - start_r], where a rank adds zeros for words of other ranks: an all-reduce, or, with
    sequence_parallel, a reduce-scatter to [..., ceil(seq / tp), dim]. The table is the one that nn.Embedding would have
    drawn. Raises PartitionError if there are fewer words than ranks; an index outside of the vocabulary is an error as
    in nn.Embedding, found on the device.
    """

    shown = ("num_embeddings", "embedding_dim", "sequence_parallel")

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        padding_idx: int | None = None,
        sequence_parallel: bool = False,
        group: Group | None = None,
        context: BuildContext | None = None,
    ):
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.sequence_parallel = sequence_parallel
        self.group = slicing_group(group, context)
        if num_embeddings < self.group.size:
            raise PartitionError(
                f"a vocabulary of {num_embeddings} can't be split over {self.group.size} ranks; use nn.Embedding"
            )
        self.cut = cut(num_embeddings, None, self.group.size)
        ((self.start, self.stop),) = self.cut.ranges[self.group.index]
        whole = nn.Embedding(num_embeddings, embedding_dim, padding_idx)
        self.padding_idx = whole.padding_idx
        self.take(whole.weight)

    @classmethod
    def from_embedding(cls, whole: nn.Embedding, **options: Any) -> VocabParallelEmbedding:
        """Return a layer that holds this rank's part of `whole`'s table. options: those of the class."""
        with torch.device("meta"):
            layer = cls(whole.num_embeddings, whole.embedding_dim, padding_idx=whole.padding_idx, **options)
        layer.take(whole.weight)
        return layer.train(whole.training)

    def take(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Take this rank's rows of a whole weight. There is no bias."""
        assert bias is None
        self._hold(sliced(weight, self.cut.slicing(0, self.group.index)), None)

    def forward(self, indices: Tensor) -> Tensor:
        """Look up the embeddings of indices."""
        here, own = own_rows(indices, self.num_embeddings, self.start, self.stop)
        padding = own_padding(self.padding_idx, self.start, self.stop)
        rows = embedding(self.port, own, self.weight, -1 if padding is None else padding)
        y = rows.masked_fill(~here.unsqueeze(-1), 0)
        if self.sequence_parallel:
            return reduce_scatter_sequence(y, self.group)
        return differentiable.reduce_from_region_(y, self.group)

    def logits(self, x: Tensor, length: int | None = None) -> Tensor:
        """x E_r^T, the output layer of tied embeddings: [..., dim] -> [..., this rank's part of the vocabulary].

        With sequence_parallel x is a shard of the sequence, length as in ColumnParallelLinear.
        """
        return linear(self.port, x, self.weight, None, boundary(self.group, self.sequence_parallel, length))


def check_indices(indices: Tensor, size: int, valid: Tensor | None = None) -> None:
    """Raise RuntimeError (CUDA: stop the device, without the host waiting) for an index outside of 0 to size - 1.

    valid: the indices that must be in range; all by default.
    """
    right = (indices >= 0) & (indices < size)
    torch._assert_async((right if valid is None else right | ~valid).all(), f"an index is not in [0, {size})")


def own_rows(indices: Tensor, size: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return which indices are in [start, stop), and all relative to start, 0 for the others. Checks indices against `size`."""
    check_indices(indices, size)
    here = (indices >= start) & (indices < stop)
    return here, (indices - start).where(here, 0)


def own_padding(padding_idx: int | None, start: int, stop: int) -> int | None:
    """Return the padding index relative to start, or None if it isn't in [start, stop)."""
    return padding_idx - start if padding_idx is not None and start <= padding_idx < stop else None


@dataclass(frozen=True)
class _Terms:
    """Terms of the loss of a token, see vocab_parallel_cross_entropy."""

    vocab_size: int
    label_smoothing: float
    z_loss: float


def _largest(logits: Tensor) -> Tensor:
    """[..., words] -> [...], at least in fp32."""
    return logits.amax(-1).to(torch.promote_types(logits.dtype, torch.float32))


def _sums(logits: Tensor, largest: Tensor, places: Tensor, here: Tensor, terms: _Terms) -> Tensor:
    """Return sums [2 or 3, ...] over this rank's words: the label's logit less the largest, all (if smoothed), exponentials."""
    wide = logits.to(largest.dtype)
    label = wide.gather(-1, places).squeeze(-1).sub(largest).where(here, 0)
    # In place where it is a copy. Not `wide is logits`: torch.compile can't tell.
    subtract = wide.sub if logits.dtype == largest.dtype else wide.sub_
    shifted = subtract(largest.unsqueeze(-1))
    every = [shifted.sum(-1)] if terms.label_smoothing else []
    return torch.stack([label, *every, shifted.exp_().sum(-1)])


def _losses(sums: Tensor, largest: Tensor, valid: Tensor, terms: _Terms) -> tuple[Tensor, Tensor]:
    """Return the loss of each token, and the logarithm of the sum of the exponentials of all words.

    sums: over the whole vocabulary.
    """
    log_sum = sums[-1].log()
    loss = log_sum - (1 - terms.label_smoothing) * sums[0]
    if terms.label_smoothing:
        loss -= terms.label_smoothing / terms.vocab_size * sums[1]
    log_z = log_sum + largest
    if terms.z_loss:
        loss += terms.z_loss * log_z.square()
    return loss.where(valid, 0), log_z


def _gradient(gradient: Tensor, logits: Tensor, log_z: Tensor, places: Tensor, here: Tensor, terms: _Terms) -> Tensor:
    """Return the gradient of the logits. gradient: of each token's loss, 0 for tokens that don't count."""
    dlogits = logits.to(log_z.dtype).sub(log_z.unsqueeze(-1)).exp_()
    dlogits = dlogits.mul_((gradient * (1 + 2 * terms.z_loss * log_z)).unsqueeze(-1))
    if terms.label_smoothing:
        dlogits -= (gradient * (terms.label_smoothing / terms.vocab_size)).unsqueeze(-1)
    label = (gradient * (1 - terms.label_smoothing)).where(here, 0).unsqueeze(-1)
    if torch.compiler.is_compiling():
        # Compiled, that is one pass over the logits; a scatter would need a copy of them in fp32.
        words = torch.arange(logits.shape[-1], device=logits.device)
        dlogits = dlogits - label.where(words == places, 0)
    else:
        dlogits.scatter_add_(-1, places, -label)
    return dlogits.to(logits.dtype)


@dataclass(frozen=True)
class Passes:
    """Computations of a cross entropy between its collectives: each in several passes over the logits, or in one, compiled."""

    largest: Callable[..., Tensor] = _largest
    sums: Callable[..., Tensor] = _sums
    losses: Callable[..., tuple[Tensor, Tensor]] = _losses
    gradient: Callable[..., Tensor] = _gradient

    @classmethod
    def compiled(cls, **options: Any) -> Passes:
        """Return the computations compiled by torch.compile with its options."""
        compiled: Any = partial(torch.compile, **options)
        return cls(compiled(_largest), compiled(_sums), compiled(_losses), compiled(_gradient))


EAGER = Passes()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        group: Group,
        start: int,
        ignore_index: int,
        terms: _Terms,
        run: Passes,
    ) -> Tensor:
        valid = labels != ignore_index
        here = valid & (labels >= start) & (labels < start + logits.shape[-1])
        places = (labels - start).where(here, 0).unsqueeze(-1)
        largest = run.largest(logits)
        all_reduce_max(largest, group).wait()
        sums = run.sums(logits, largest, places, here, terms)
        all_reduce(sums, group).wait()
        loss, log_z = run.losses(sums, largest, valid, terms)
        ctx.save_for_backward(logits, log_z, places, here, valid)
        ctx.terms, ctx.run = terms, run
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_z, places, here, valid = ctx.saved_tensors
        dlogits = ctx.run.gradient(gradient.where(valid, 0), logits, log_z, places, here, ctx.terms)
        return dlogits, *(None,) * 6


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    group: Group,
    vocab_size: int,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    passes: Passes = EAGER,
) -> Tensor:
    """logits: [..., this rank's part of vocab_size], labels: [...] -> loss of each token [...], the same on every rank.

    With lse = log sum_i exp(l_i), s label_smoothing and V vocab_size, the loss of a token with label t is
    lse - (1 - s) l_t - s/V sum_i l_i + z_loss lse^2 (torch's smoothing; the z-loss of arXiv:2204.02311), or 0 where the
    label is ignore_index. Two all-reduces of numbers per token forward, the largest logit and the sums, none backward.
    Half-precision logits give a loss in fp32. A label outside of the vocabulary is an error, found on the device.
    passes: how, Passes.compiled() for a large vocabulary. Raises PartitionError where the logits are not this rank's part.
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
    terms = _Terms(vocab_size, label_smoothing, z_loss)
    loss: Tensor = _CrossEntropy.apply(logits, labels, group, start, ignore_index, terms, passes)
    return loss
