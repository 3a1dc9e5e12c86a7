"""Boundaries of tensor-parallel regions: features sharded over ranks, and sequences sharded over ranks.

Sequence parallelism (arXiv:2205.05198): between a row layer and the next column layer, activations are shards of the
sequence, [batch, ceil(seq / tp), hidden]: dim -2 is the sequence. A sequence that tp does not divide is padded at its
end; the caller that gathers it again gives its length. Norms and dropout work on the shard; their outputs at padded
positions are not used, and the gradient there is zero.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel3d.autograd.products import NO_BOUNDARY, Factors, Pair, RegionBoundary, multiply, rows_of
from parallel3d.comm import differentiable
from parallel3d.comm.collectives import GROUPS, Group
from parallel3d.comm.differentiable import Started
from parallel3d.comm.environment import get_rank
from parallel3d.errors import CommunicationError, PartitionError
from parallel3d.specs import BuildContext
from parallel3d.tensor_parallel.shard_products import ShardProducts
from parallel3d.tensor_parallel.slicing import Cut

SEQUENCE_DIM = -2


def slicing_group(group: Group | None, context: BuildContext | None) -> Group:
    """Return the group over which a layer is sharded: the one given, else the context's, else this rank alone.

    Raises PartitionError for a group of another kind, such as torch's.
    """
    if group is not None:
        if not isinstance(group, Group):
            raise PartitionError(
                f"group is a {type(group).__name__}; layers are sharded over a Group, which the context has that LayerSpec "
                "passes to a class that declares it: context.groups.model"
            )
        return group
    return Group((get_rank(),), None) if context is None else context.groups.model


def sum_gradients_over(parameters: Iterable[Tensor], group: Group) -> None:
    """Mark parameters of whose gradients each rank of the group computes only a part (attribute `partial_over`).

    Examples are norms on shards of a sequence, and parameters that the heads of several ranks share.
    """
    for parameter in parameters:
        vars(parameter)["partial_over"] = group


def gather_features(x: Tensor, cut: Cut, group: Group) -> Tensor:
    """x: [..., this rank's part of the last dim] -> [..., cut.size], replicated, as are its gradients."""
    if cut.plain:
        return differentiable.gather_from_region(x, group, -1)
    block = max(cut.lengths)
    blocks = differentiable.gather_from_region(F.pad(x, (0, block - x.shape[-1])), group, -1)
    pieces = [blocks.narrow(-1, rank * block + start, length) for rank, start, length in cut.sources()]
    return torch.cat(pieces, -1)


def scatter_features(x: Tensor, cut: Cut, group: Group) -> Tensor:
    """x: [..., cut.size], replicated -> [..., this rank's part of the last dim]."""
    if cut.plain:
        return differentiable.scatter_to_region(x, group, -1)
    block, pieces = max(cut.lengths), []
    for ranges, length in zip(cut.ranges, cut.lengths, strict=True):
        pieces += [x.narrow(-1, start, stop - start) for start, stop in ranges]
        pieces.append(x.new_zeros(*x.shape[:-1], block - length))
    shard = differentiable.scatter_to_region(torch.cat(pieces, -1), group, -1)
    return shard.narrow(-1, 0, cut.lengths[group.index])


def scatter_sequence(x: Tensor, group: Group) -> Tensor:
    """x: [..., seq, hidden], replicated -> this rank's [..., ceil(seq / tp), hidden], zeros where the sequence has ended."""
    return differentiable.scatter_to_region(_pad(x, group), group, SEQUENCE_DIM)


def gather_sequence(x: Tensor, group: Group, length: int | None = None) -> Tensor:
    """x: [..., shard, hidden] -> [..., length, hidden], replicated, as are its gradients; by default with the padding."""
    return _cut_off(differentiable.gather_from_region(x, group, SEQUENCE_DIM), length)


def enter_region(x: Tensor, group: Group, sequence_parallel: bool = False, length: int | None = None) -> Tensor:
    """Return the input of column-parallel layers built with in_region: one collective for all layers of one input.

    x: [..., hidden], replicated; with sequence_parallel a shard [..., shard, hidden] -> [..., length, hidden].
    """
    if sequence_parallel:
        return _cut_off(differentiable.all_gather(x, group, SEQUENCE_DIM), length)
    return differentiable.copy_to_region(x, group)


def reduce_scatter_sequence(x: Tensor, group: Group) -> Tensor:
    """x: [..., seq, hidden], partial -> this rank's [..., ceil(seq / tp), hidden] of the sum over the group."""
    return differentiable.reduce_scatter(_pad(x, group), group, SEQUENCE_DIM)


def sequence_length(x: Tensor) -> int:
    """Return the sequence length of x: [..., seq, hidden]. Raises CommunicationError for a single vector."""
    if x.dim() < 2:
        raise CommunicationError(
            f"sequence parallelism needs [..., sequence, hidden], not {list(x.shape)}; add a dim, or build without it"
        )
    return x.shape[SEQUENCE_DIM]


def _pad(x: Tensor, group: Group) -> Tensor:
    missing = -sequence_length(x) % group.size
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def _cut_off(x: Tensor, length: int | None) -> Tensor:
    if length is None or length == x.shape[SEQUENCE_DIM]:
        return x
    if length > x.shape[SEQUENCE_DIM]:
        raise CommunicationError(
            f"the shards of a sequence add up to {x.shape[SEQUENCE_DIM]} places, not {length}; give the length of the whole "
            "sequence before it was scattered"
        )
    return x.narrow(SEQUENCE_DIM, 0, length)


# A product that is communicated goes in two halves, the first under way while the second multiplies, if a rank's share of
# the result's bytes is this. A collective more costs some 30 us, so half of the product must take longer: 40 us are 2^34
# multiplications at 650 TFLOP/s and half of them, of a weight some thousands of features wide. Shapes of the result and not
# of the operands decide, for those may differ between ranks, which must agree.
HALVES_FROM = 2**24
# Fewest rows of a product that is halved: a GPU's cores need that many to be busy.
ROWS_FROM = 512


def _shape(factors: Factors) -> tuple[int, ...]:
    """Return the shape of a sum of products."""
    left, right = factors[0]
    return *left.shape[:-1], right.shape[1]


def in_halves(factors: Factors, group: Group) -> bool:
    """Return whether a product is communicated in two halves; the same on every rank."""
    num_bytes = math.prod(_shape(factors)) * factors[0][0].element_size()
    return group.size > 1 and num_bytes >= HALVES_FROM * group.size and not torch.is_grad_enabled()


def halves(size: int) -> tuple[slice, slice]:
    """Return the two halves of a number of rows."""
    return slice(0, size // 2), slice(size // 2, size)


@dataclass(frozen=True)
class _GroupBoundary(RegionBoundary):
    """A boundary where a group communicates. length: of the whole sequence, where its shards are gathered."""

    group: Group
    length: int | None = None

    @property
    def described(self) -> tuple[str, int, int | None]:
        """The arguments of an operator."""
        return type(self).__name__, self.group.number, self.length

    @classmethod
    def of(cls, group: int, length: int | None) -> RegionBoundary:
        """Return the boundary of the group with this number."""
        return cls(GROUPS[group], length)


class ReplicatedBoundary(_GroupBoundary):
    """copy_to_region before a column layer: the input's gradient is all-reduced during the weight's product.

    After a row layer it is the other way round: the outputs are all-reduced, in halves if they are large.
    """

    def enter(self, x: Tensor) -> Started:
        """[..., hidden], replicated, as it is."""
        if torch.is_grad_enabled():
            x = differentiable.copy_to_region(x, self.group)
        return lambda: x

    def leave(self, gradient: Tensor, hidden: bool = True) -> Started:
        """[..., hidden], partial -> the sum. hidden: a matrix product runs at the same time."""
        if torch.is_grad_enabled():
            total = differentiable.reduce_from_region(gradient, self.group)
            return lambda: total
        return differentiable.start_all_reduce(gradient, self.group, hidden)

    def leave_products(self, factors: Factors, hidden: bool = False) -> Started:
        """Multiply and all-reduce; of a large output one half is reduced while the other is multiplied."""
        if hidden or not in_halves(factors, self.group):
            return self.leave(multiply(factors), hidden)
        *_, features = shape = _shape(factors)
        operands = [(rows_of(left), right) for left, right in factors]
        total = operands[0][0].new_empty(len(operands[0][0]), features)
        started = []
        for half in halves(len(total)):
            multiply([(rows[half], right) for rows, right in operands], out=total[half])
            started.append(differentiable.start_all_reduce(total[half], self.group, hidden=half.start == 0))

        def finish() -> Tensor:
            for finish_half in started:
                finish_half()
            return total.view(shape)

        return finish


class SequenceBoundary(_GroupBoundary):
    """all_gather before a column layer. The layer keeps the shard; its backward gathers it again, during the product for
    the input's gradient, and reduce-scatters that gradient during the weight's product.

    After a row layer it is the other way round: the outputs are reduce-scattered, in halves if they are large, and their
    gradients gathered. Without a length the padding stays.
    """

    def entered(self, shape: Sequence[int]) -> Sequence[int]:
        """[..., shard, in] -> [..., length, in]."""
        *others, shard, features = shape
        return *others, shard * self.group.size if self.length is None else self.length, features

    def left(self, shape: Sequence[int]) -> Sequence[int]:
        """[..., length, out] -> [..., shard, out]."""
        *others, seq, features = shape
        return *others, -(-seq // self.group.size), features

    def _by_copies(self, x: Tensor, shard: int) -> ShardProducts | None:
        """Return what overlaps the communication of x with matrix products, or None if it runs as collectives.

        shard: rows of each rank.
        """
        copies, whole = self.group.shard_messages, shard * self.group.size
        if copies is None or torch.is_grad_enabled() or not copies.takes(x):
            return None
        return ShardProducts(self.group, copies) if shard >= ROWS_FROM and self.length in (None, whole) else None

    def enter_products(self, x: Tensor, pairs: Sequence[Pair]) -> Sequence[Tensor]:
        """All-gather x and multiply it with each weight."""
        by_copies = self._by_copies(x, sequence_length(x))
        return super().enter_products(x, pairs) if by_copies is None else by_copies.gather_products(x, pairs)

    def enter_kept(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """All-gather x; return it and its product with weight [in, out]."""
        by_copies = self._by_copies(x, sequence_length(x))
        return super().enter_kept(x, weight) if by_copies is None else by_copies.gather_kept(x, weight)

    def enter(self, x: Tensor) -> Started:
        """[..., shard, hidden] -> [..., length, hidden]."""
        if (by_copies := self._by_copies(x, sequence_length(x))) is not None:
            return by_copies.start_gather(x)
        if torch.is_grad_enabled():
            whole = _cut_off(differentiable.all_gather(x, self.group, SEQUENCE_DIM), self.length)
            return lambda: whole
        gathered = differentiable.start_all_gather(x, self.group, SEQUENCE_DIM)
        return lambda: _cut_off(gathered(), self.length)

    def leave(self, gradient: Tensor) -> Started:
        """[..., length, hidden], partial -> [..., shard, hidden] of the sum."""
        if torch.is_grad_enabled():
            shard = reduce_scatter_sequence(gradient, self.group)
            return lambda: shard
        return differentiable.start_reduce_scatter(_pad(gradient, self.group), self.group, SEQUENCE_DIM)

    def leave_products(self, factors: Factors, hidden: bool = False) -> Started:
        """Multiply, and reduce-scatter the result over the sequence."""
        *others, seq, features = _shape(factors)
        tp, shard = self.group.size, seq // self.group.size
        by_copies = None if seq % tp else self._by_copies(factors[0][0], shard)
        if by_copies is not None:
            total = by_copies.scatter_products(factors)
            return lambda: total
        if hidden or seq % tp or shard < 2 * ROWS_FROM or not in_halves(factors, self.group):
            return self.leave(multiply(factors))
        # [sequences, rank, shard, k]: half of each rank's rows at once, into what is scattered as it lies there.
        operands = [(left.reshape(-1, tp, shard, left.shape[-1]), right) for left, right in factors]
        samples, started = len(operands[0][0]), []
        for half in halves(shard):
            block = factors[0][0].new_empty(tp, samples, half.stop - half.start, features)
            for rank, sample in itertools.product(range(tp), range(samples)):
                multiply([(left[sample, rank, half], right) for left, right in operands], out=block[rank, sample])
            started.append(differentiable.start_reduce_scatter(block, self.group, 0))

        def finish() -> Tensor:
            return torch.cat([finish_half()[0] for finish_half in started], 1).view(*others, shard, features)

        return finish


def boundary(group: Group, sequence_parallel: bool, length: int | None) -> RegionBoundary:
    """Return the boundary before a column-parallel layer and after a row-parallel one.

    Raises CommunicationError for a length without sequence parallelism.
    """
    if sequence_parallel:
        return SequenceBoundary(group, length)
    if length is not None:
        raise CommunicationError(
            f"length={length} is the length of a sequence split over ranks; build the layer with sequence_parallel=True"
        )
    return NO_BOUNDARY if group.size == 1 else ReplicatedBoundary(group)
