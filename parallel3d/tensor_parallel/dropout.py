"""Dropout of sharded tensors: each rank draws the mask of its part, or draws the whole mask and uses its part.

If each rank draws for its own part, the mask depends on the number of ranks. With layout_independent it is the rank's part
of the mask that one process would draw for the whole tensor, which every rank then has to draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.comm.collectives import GROUPS, Group
from parallel3d.operators import define
from parallel3d.specs import BuildContext
from parallel3d.tensor_parallel.regions import SEQUENCE_DIM, scatter_sequence, slicing_group
from parallel3d.tensor_parallel.slicing import Segments, cut


class _PartDropout(nn.Dropout):
    """Dropout of a rank's part of a tensor. group, layout_independent: those of the context if not given."""

    def __init__(
        self,
        p: float,
        *,
        layout_independent: bool | None = None,
        group: Group | None = None,
        context: BuildContext | None = None,
    ):
        super().__init__(p)
        self._group = slicing_group(group, context)
        if layout_independent is None:
            layout_independent = context is not None and context.layout_independent
        self._draws_whole = layout_independent

    def _drop(self, x: Tensor, whole_shape: Sequence[int], part_of: Callable[[Tensor], Tensor]) -> Tensor:
        if not self.training or self.p == 0 or self._group.size == 1:
            return super().forward(x)
        if self._draws_whole:
            # Dropout of ones runs the same operation as one process. Only != 0 is used, as a half dtype rounds the scale.
            kept = part_of(F.dropout(x.new_ones(whole_shape), self.p) != 0)
        elif torch.compiler.is_compiling():
            kept = _own_mask(x, self.p, self._group.number)
        else:
            with self._group.own_stream(x.device):
                return super().forward(x)
        return (x * (1 / (1 - self.p) if self.p < 1 else 0.0)).masked_fill(~kept, 0)


def _draw_own_mask(x: Tensor, p: float, group: int) -> Tensor:
    """Draw which elements of this rank's part of a tensor are kept."""
    with GROUPS[group].own_stream(x.device):
        return F.dropout(torch.ones_like(x, memory_format=torch.contiguous_format), p) != 0


# A compiled graph has it as one operator, because it can't change the state of a generator and restore it.
_own_mask = define(
    "own_dropout_mask",
    "(Tensor x, float p, int group) -> Tensor",
    _draw_own_mask,
    lambda x, p, group: x.new_empty(x.shape, dtype=torch.bool),
    tags=[torch.Tag.nondeterministic_seeded],
)


class SlicedDropout(_PartDropout):
    """Dropout of a rank's part of a tensor that is `size` long along `dim` (< 0), cut as the layers before it cut theirs.

    segments: as ColumnParallelLinear's, here of `size`. Raises PartitionError where they don't make it up.
    """

    def __init__(
        self,
        p: float,
        size: int,
        dim: int = -1,
        *,
        segments: Segments | None = None,
        layout_independent: bool | None = None,
        group: Group | None = None,
        context: BuildContext | None = None,
    ):
        super().__init__(p, layout_independent=layout_independent, group=group, context=context)
        self._size, self._dim = size, dim
        self._slicing = cut(size, segments, self._group.size).slicing(dim, self._group.index)

    def forward(self, input: Tensor) -> Tensor:
        """Drop elements of input: [..., this rank's part, ...] -> same shape."""
        shape = list(input.shape)
        shape[self._dim] = self._size
        return self._drop(input, shape, self._slicing.part_of)


class SequenceDropout(_PartDropout):
    """Dropout of a rank's shard of a sequence, the form of activations between regions with sequence parallelism."""

    def forward(self, input: Tensor, length: int | None = None) -> Tensor:
        """Drop elements of input: [..., ceil(length / tp), hidden] -> same shape.

        length: of the whole sequence; by default the shards have no padding.
        """
        shape = list(input.shape)
        shape[SEQUENCE_DIM] = shape[SEQUENCE_DIM] * self._group.size if length is None else length
        return self._drop(input, shape, lambda mask: scatter_sequence(mask, self._group))
