"""Flat buckets: each parameter's position, the rank that updates it, and the buffers of weights, masters and gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from parallel3d.comm.collectives import DONE, Group, Work, all_gather_into
from parallel3d.errors import ExecutionError
from parallel3d.parameters import ParameterInfo, slicing_of
from parallel3d.zero.policy import ZeroPolicy
from parallel3d.zero.values import forget, make_whole, read_into
from parallel3d.zero.weights import ShardedWeights, WeightState

# Every parameter, and every shard, starts on a 128-byte boundary of fp32, so that kernels keep their vectorized paths.
ALIGNMENT = 32
# A chunk's gradients are cut into about 16 buckets, so that most of them are reduced while the backward still runs...
_PARTS = 16
# ...but a reduction is limited by latency, not by bandwidth, if its bucket or its shard has fewer elements than these: a ring
# of 1,024 replicas passes on 1,024 shards.
_SMALLEST, _SMALLEST_SHARD = 1 << 20, 1 << 17

Owners = tuple[int, ...]  # the chunks of the model that hold a copy


@dataclass(frozen=True)
class Kind:
    """Properties that all parameters of a bucket share.

    dtype: dtype in which the parameters were built.
    sliced: whether each tensor-parallel rank holds another part.
    partial_over: for copies, the group over which their gradients are summed; None if these are whole on every rank.
    """

    dtype: torch.dtype
    sliced: bool
    partial_over: Group | None


@dataclass(frozen=True)
class BucketLayout:
    """The parameters of one bucket, all of one kind and with the same owners, and where each starts in `numel` elements.

    num_shards: the number of equal parts; one rank updates each.
    is_sharded: whether the weights, too, live as shards, and are gathered while they are used. The parameters are of one unit.
    """

    kind: Kind
    infos: tuple[ParameterInfo, ...]
    offsets: tuple[int, ...]
    numel: int
    policy: ZeroPolicy
    num_shards: int
    is_sharded: bool = False

    @property
    def owners(self) -> Owners:
        """The chunks that hold these parameters."""
        return self.infos[0].owners

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of each parameter."""
        return tuple(info.parameter.numel() for info in self.infos)

    @property
    def shard_numel(self) -> int:
        """Number of elements that one rank updates, padding included."""
        return self.numel // self.num_shards

    @property
    def weight_dtype(self) -> torch.dtype:
        """Dtype of the weights that the layers compute with."""
        return self.policy.weight_dtype or self.kind.dtype

    @property
    def master_dtype(self) -> torch.dtype:
        """Dtype of the weights that the optimizer updates."""
        return self.policy.master_dtype(self.kind.dtype)

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Dtype in which gradients are accumulated."""
        return self.policy.accumulator_dtype(self.kind.dtype)

    @property
    def is_in_place(self) -> bool:
        """Whether the parameters keep their own storage, and are their own masters."""
        return self.num_shards == 1 and self.weight_dtype == self.master_dtype

    def released_weights(self) -> tuple[Tensor, list[Tensor]]:
        """Return a flat tensor for all weights, and a view of it for each parameter; without memory until it is gathered."""
        flat = torch.empty(self.numel, dtype=self.weight_dtype, device=self.infos[0].parameter.device)
        parts = zip(self.infos, self.offsets, self.sizes, strict=True)
        views = [flat[offset : offset + size].view(info.parameter.shape) for info, offset, size in parts]
        flat.untyped_storage().resize_(0)  # at once, so that the shards take its place, and leave no holes in the heap
        return flat, views

    @property
    def is_transient(self) -> bool:
        """Whether the gradients pass through a buffer that buckets share, and only a shard of them is kept.

        False for shared parameters, whose gradients come from several chunks and are reduced once, when all have run.
        """
        return self.policy.reduce_per_micro_batch and self.num_shards > 1 and len(self.owners) == 1


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@dataclass(frozen=True, eq=False)
class ParameterShard:
    """The part of one parameter that the optimizer updates on this rank: `master`, with its gradient in `gradient`.

    Without partitioning, that is the whole parameter, in its shape; else the flat part of it that lies in the rank's shard.

    - start: index of its first element in the flat parameter.
    - place: index of its first element in the bucket's flat buffers.
    """

    info: ParameterInfo
    master: nn.Parameter
    gradient: Tensor
    start: int
    place: int


class Bucket:
    """Consecutive parameters in flat buffers of `numel` elements; each rank of `partition` updates one shard of them.

    - weights: the weights that layers compute with, [numel]; None if the parameters keep their own storage. own_weights: this
      rank's shard of them, [numel / partition]; None likewise.
    - sharded: the weights as shards; None if they are whole on every rank.
    - gradients: the accumulator, [numel]; None if the bucket uses transient buffers. gradient_shard: [numel / partition].
    """

    def __init__(self, layout: BucketLayout, partition: Group, rank: int, gather_group: Group | None = None):
        self.infos, self.offsets, self.sizes = layout.infos, layout.offsets, layout.sizes
        self.numel, self.kind, self.owners = layout.numel, layout.kind, layout.owners
        self.parameters = tuple(info.parameter for info in self.infos)
        self.partition, self._gather_group = partition, gather_group or partition
        self.device = self.parameters[0].device
        self.weight_dtype, self.master_dtype = layout.weight_dtype, layout.master_dtype
        self.gradient_dtype = layout.gradient_dtype
        # Whether the masters are a copy, in a wider dtype than the weights.
        self.has_own_master = self.weight_dtype != self.master_dtype
        start = partition.ranks.index(rank) * layout.shard_numel
        self.shard = slice(start, start + layout.shard_numel)
        self.sharded: ShardedWeights | None = None
        self.weights, self.own_weights, self.master = self._place_weights(layout)
        zeros = partial(torch.zeros, dtype=self.gradient_dtype, device=self.device)
        self.gradients = None if layout.is_transient else zeros(self.numel)
        self.gradient_shard = zeros(layout.shard_numel) if self.gradients is None else self.gradients[self.shard]
        # Whether gradient_shard is zero since the last step.
        self.is_cleared = False
        self.pieces = self._cut_pieces()
        # How often each parameter has been written to: our own writes go into the flat buffer and don't count.
        self._versions = {piece: piece.info.parameter._version for piece in self.pieces}

    def mark_cleared(self, is_cleared: bool = True) -> None:
        """Note whether gradient_shard is zero, so that nobody has to clear it again."""
        self.is_cleared = is_cleared

    def view(self, flat: Tensor, k: int) -> Tensor:
        """Return parameter k's part of a flat buffer of the bucket, in its shape."""
        parameter = self.infos[k].parameter
        return flat[self.offsets[k] : self.offsets[k] + self.sizes[k]].view(parameter.shape)

    def clear_all_but(self, flat: Tensor, kept: Set[int]) -> None:
        """Zero a flat buffer of the bucket, padding included, except the parts of the parameters with indices `kept`."""
        end, places = 0, [(self.offsets[k], self.sizes[k]) for k in sorted(kept)]
        for start, size in (*places, (self.numel, 0)):
            if end < start:
                flat[end:start].zero_()
            end = start + size

    @torch.no_grad()
    def _place_weights(self, layout: BucketLayout) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Move the parameters into a flat buffer; returns it, this rank's shard of it, and the master shard.

        The master may be that shard. All are None if the parameters stay in place and are their own masters. Masters get the
        values with which the parameters were built, before these are rounded to the weights' dtype.
        """
        if layout.is_in_place:
            for parameter in self.parameters:
                make_whole(parameter)
            return None, None, None
        if layout.is_sharded:
            weights, views = layout.released_weights()
        held = self.shard if layout.is_sharded else slice(0, self.numel)
        masters = torch.zeros(held.stop - held.start, dtype=layout.master_dtype, device=self.device)
        for parameter, offset, size in zip(self.parameters, self.offsets, self.sizes, strict=True):
            part = cut(offset, size, held)
            read_into(masters[part], parameter, held.start + part.start - offset)
            forget(parameter)
        own = masters.to(layout.weight_dtype)
        if layout.is_sharded:
            self.sharded = ShardedWeights(weights, own, self.parameters, views, self._gather_group)
            return weights, own, masters
        self._point_to(own)
        master = masters[self.shard]
        return own, own[self.shard], master.clone() if self.has_own_master else master

    def _cut_pieces(self) -> list[ParameterShard]:
        pieces = []
        for k, info in enumerate(self.infos):
            if self.master is None:
                assert self.gradients is not None, "an unpartitioned bucket accumulates in place"
                pieces.append(ParameterShard(info, info.parameter, self.view(self.gradients, k), 0, self.offsets[k]))
                continue
            own = cut(self.offsets[k], self.sizes[k], self.shard)
            if own.start >= own.stop:
                continue
            place, shape = self.shard.start + own.start, info.parameter.shape if self.partition.size == 1 else (-1,)
            master, gradient = nn.Parameter(self.master[own].view(shape)), self.gradient_shard[own].view(shape)
            pieces.append(ParameterShard(info, master, gradient, place - self.offsets[k], place))
        return pieces

    @property
    def autograd_adds(self) -> bool:
        """Whether autograd itself adds to the accumulators, which have the weights' dtype."""
        return self.gradients is not None and self.gradient_dtype == self.parameters[0].dtype

    def assign_gradients(self, untouched: Set[nn.Parameter], factor: Tensor | None = None) -> None:
        """Set `grad` of each master; None for parameters without a gradient, which the optimizer then skips.

        factor: multiplies the gradients, a scalar on the device. The product is computed in the masters' dtype, because in fp16
        the values that the loss scale has kept from underflow would be lost.
        """
        in_place = all(piece.gradient.dtype == piece.master.dtype for piece in self.pieces)
        if factor is not None and in_place:
            self.gradient_shard.mul_(factor)  # in one pass
        for piece in self.pieces:
            piece.master.grad = None  # it is the accumulator if the parameter is its own master
            if piece.info.parameter not in untouched:
                gradient = piece.gradient.to(piece.master.dtype)
                piece.master.grad = gradient if factor is None or in_place else gradient.mul_(factor)

    @torch.no_grad()
    def follow_weights(self) -> None:
        """Copy weights that others have written, as load_state_dict does, into the masters; a step would undo them."""
        if not self.has_own_master:
            return
        for piece in self.pieces:
            version = piece.info.parameter._version
            if self._versions[piece] != version:
                self._versions[piece] = version
                piece.master.copy_(self.weights_of(piece))

    @torch.no_grad()
    def move_weights(self, memory: Tensor) -> None:
        """Move the weights to other memory, [numel] of their dtype. Only for buckets with a flat buffer of weights."""
        assert self.weights is not None
        self.weights = memory.copy_(self.weights)
        self.own_weights = self.weights[self.shard]
        self._point_to(self.weights)

    def _point_to(self, weights: Tensor) -> None:
        """Make the parameters views of a flat buffer."""
        for k, parameter in enumerate(self.parameters):
            parameter.data = self.view(weights, k)

    def weights_of(self, piece: ParameterShard) -> Tensor:
        """Return the weights that the layers compute with, in the master's shape; the master itself if they are the same."""
        if not self.has_own_master:
            return piece.master.detach()
        assert self.own_weights is not None
        return self.own_weights[piece.place - self.shard.start :][: piece.master.numel()].view(piece.master.shape)

    def weights_address(self) -> int:
        """Return the address that the flat weights have, or would have around this rank's shard of them."""
        assert self.own_weights is not None
        return self.own_weights.data_ptr() - self.shard.start * self.own_weights.itemsize

    def check_place(self) -> None:
        """Raise ExecutionError for a parameter that is no longer in the bucket's memory: no step would update it."""
        if self.weights is None or (self.sharded is not None and self.sharded.state is WeightState.SHARDED):
            return
        start, width = self.weights.data_ptr(), self.weights.itemsize
        for info, offset, size in zip(self.infos, self.offsets, self.sizes, strict=True):
            if size and info.parameter.data_ptr() != start + offset * width:
                raise ExecutionError(
                    f"parameter {info.name} left the buffer that is trained, as by module.to(dtype) after initialize; do that "
                    "before initialize"
                )

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the updated masters of this rank's shard into the weights, where these are not the masters themselves."""
        if self.has_own_master:
            assert self.own_weights is not None
            assert self.master is not None
            self.own_weights.copy_(self.master)

    @torch.no_grad()
    def whole_masters(self) -> dict[nn.Parameter, Tensor]:
        """Return the whole master of each parameter, in its shape. Collective over the partition."""
        if self.master is None:
            return {info.parameter: info.parameter.detach() for info in self.infos}
        flat = torch.empty(self.numel, dtype=self.master.dtype, device=self.device)
        all_gather_into(flat, self.master, self.partition).wait()
        return {info.parameter: self.view(flat, k) for k, info in enumerate(self.infos)}

    def gather(self) -> Work:
        """Start to fill the weights with every rank's shard; wait before they are read. Sharded ones are left as they are."""
        if self.weights is None or self.own_weights is None or self.sharded is not None:
            return DONE
        return all_gather_into(self.weights, self.own_weights, self.partition)


def by_owners(parameters: Sequence[ParameterInfo]) -> dict[Owners, list[ParameterInfo]]:
    """Group a rank's parameters, given in the model's order, by owners: owners -> parameters in the order of their buckets.

    That is the order of the backward, which reaches the last layer first. Shared parameters are sorted by name instead, because
    their layers may come in another order on each owner.
    """
    groups: dict[Owners, list[ParameterInfo]] = {}
    for info in reversed(parameters):
        groups.setdefault(info.owners, []).append(info)
    for infos in groups.values():
        if infos[0].shared:
            infos.sort(key=lambda info: info.name)
    return groups


def lay_out(infos: Sequence[ParameterInfo], policy: ZeroPolicy, num_shards: int) -> list[BucketLayout]:
    """Cut parameters of the same owners, in the order given, into buckets of one kind each.

    A bucket has at most policy.bucket_size elements. It also has at most 1/16 of the elements of a shard of its kind, so that
    buffers of its size take little memory, but this limit is never below 2^20, nor below 2^17 per shard. A parameter that is
    larger than the limit has its own bucket. Parameters are padded to ALIGNMENT, buckets to num_shards * ALIGNMENT elements.
    With stage 3 no bucket has parameters of several units, unless their weights stay whole.
    """
    kinds: dict[tuple[int | None, Kind], list[ParameterInfo]] = {}
    sharded = _sharded_units(infos, policy, num_shards)
    for info in infos:
        parameter = info.parameter
        partial_over = getattr(parameter, "partial_over", None)
        kind = Kind(parameter.dtype, slicing_of(parameter) is not None, partial_over)
        kinds.setdefault((info.unit if info.unit in sharded else None, kind), []).append(info)
    return [
        layout
        for (unit, kind), alike in kinds.items()
        for layout in _cut(kind, alike, policy, num_shards, unit is not None)
    ]


def _sharded_units(infos: Sequence[ParameterInfo], policy: ZeroPolicy, num_shards: int) -> set[int]:
    """Return the units whose weights live as shards. Parameters that several chunks share are whole on every rank."""
    sizes: Counter[int] = Counter()
    if policy.stage == 3 and num_shards > 1 and not infos[0].shared:
        for info in infos:
            sizes[info.unit] += info.parameter.numel()
    return {unit for unit, size in sizes.items() if size > policy.largest_whole}


def _cut(
    kind: Kind, infos: Sequence[ParameterInfo], policy: ZeroPolicy, num_shards: int, is_sharded: bool
) -> Iterator[BucketLayout]:
    total = sum(info.parameter.numel() for info in infos)
    smallest = max(_SMALLEST, _SMALLEST_SHARD * num_shards)
    limit = min(policy.bucket_size, max(smallest, -(-total // (_PARTS * num_shards))))
    held: list[ParameterInfo] = []
    offsets: list[int] = []
    end = 0

    def bucket() -> BucketLayout:
        numel = _round_up(end, num_shards * ALIGNMENT)
        return BucketLayout(kind, tuple(held), tuple(offsets), numel, policy, num_shards, is_sharded)

    for info in infos:
        size = info.parameter.numel()
        if held and end + size > limit:
            yield bucket()
            held, offsets, end = [], [], 0
        held.append(info)
        offsets.append(end)
        end += _round_up(size, ALIGNMENT)
    if held:
        yield bucket()


def cut(offset: int, size: int, shard: slice) -> slice:
    """Return where in a shard of a flat buffer the part lies that it has of `size` elements from `offset` on."""
    start = max(offset, shard.start) - shard.start
    return slice(start, max(start, min(offset + size, shard.stop) - shard.start))


def make_buckets(
    infos: Sequence[ParameterInfo], policy: ZeroPolicy, partition: Group, rank: int, gather_group: Group | None = None
) -> list[Bucket]:
    """Make the buckets of parameters of the same owners, in the order given, one kind to a bucket.

    gather_group: the ranks of `partition` with a communicator of their own, for gathers of sharded weights.
    """
    return [Bucket(layout, partition, rank, gather_group) for layout in lay_out(infos, policy, partition.size)]
