"""An embedding sharded over ranks by the vocabulary, and the output layer that shares its weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.autograd.split_backward import embedding, linear
from parallel3d.comm import differentiable
from parallel3d.comm.collectives import Group
from parallel3d.errors import PartitionError
from parallel3d.parameters import sliced
from parallel3d.specs import BuildContext
from parallel3d.tensor_parallel.linear import SlicedLayer
from parallel3d.tensor_parallel.regions import boundary, reduce_scatter_sequence, slicing_group
from parallel3d.tensor_parallel.slicing import cut


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
