"""Flat buckets: the buffers of weights, masters and gradients; and of weights that are not trained (ZeRO-3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from parallel3d.comm.collectives import DONE, Group, Work, all_gather_into
from parallel3d.errors import ExecutionError
from parallel3d.parameters import ParameterInfo
from parallel3d.zero.fp8_weights import kind_of_shards
from parallel3d.zero.host_shards import HostShards
from parallel3d.zero.layout import BucketLayout, by_owners, lay_out
from parallel3d.zero.policy import COPIED_NUMEL, ZeroPolicy
from parallel3d.zero.weights import ShardedWeights, WeightState, cut, make_whole

HostAllocator = Callable[[int, torch.dtype, bool], Tensor]  # numel, dtype, whether on disk


@dataclass(frozen=True, eq=False)
class ShardHomes:
    """Places where a rank keeps shards, and the group that gathers sharded weights.

    - gather_group: the ranks of the partition with a communicator of their own, for gathers of sharded weights.
    - allocate: makes flat tensors of zeros for offloaded state. host: keeps shards of weights in host memory or on disk.
    """

    gather_group: Group | None = None
    allocate: HostAllocator | None = None
    host: HostShards | None = None


ON_DEVICE = ShardHomes()


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


@dataclass(frozen=True, eq=False)
class Span:
    """Consecutive elements of a rank's shard of a bucket that the optimizer updates in one call: `part` of the shard."""

    part: slice
    shards: tuple[ParameterShard, ...]


class Bucket:
    """Consecutive parameters in flat buffers of `numel` elements; each rank of `partition` updates one shard of them.

    - weights: the weights that layers compute with, [numel]; None if the parameters keep their own storage. own_weights: this
      rank's shard of them, [numel / partition]; None in the same case.
    - sharded: the weights as shards; None if they are whole on every rank.
    - gradients: the accumulator, [numel]; None if the bucket uses transient buffers. gradient_shard: [numel / partition].
    - spans: the parts of the shard that the optimizer may update one by one. A single one if its state is on the device and
      it can read the gradients where they are.
    """

    def __init__(self, layout: BucketLayout, partition: Group, rank: int, homes: ShardHomes):
        self.infos, self.offsets, self.sizes = layout.infos, layout.offsets, layout.sizes
        self.numel, self.kind, self.owners = layout.numel, layout.kind, layout.owners
        self.parameters = tuple(info.parameter for info in self.infos)
        self.partition, self._gather_group = partition, homes.gather_group or partition
        self.device = self.parameters[0].device
        self.weight_dtype, self.master_dtype = layout.weight_dtype, layout.master_dtype
        self.gradient_dtype = layout.gradient_dtype
        # Whether the optimizer gets copies of the gradients, in the masters' dtype.
        self.copies_gradients = layout.gradient_dtype != layout.master_dtype
        # Whether the masters are a copy, in a wider dtype than the weights.
        self.has_own_master = layout.has_own_master
        # Whether masters of their own, and the optimizer's state, are in host memory, or on disk, between steps.
        self.is_offloaded, self.state_on_disk, self._allocate = (
            layout.is_offloaded,
            layout.state_on_disk,
            homes.allocate,
        )
        self.weights_offloaded = layout.weights_offloaded
        start = partition.ranks.index(rank) * layout.shard_numel
        self.shard = slice(start, start + layout.shard_numel)
        self.sharded: ShardedWeights | None = None
        self.weights, self.own_weights, self.master = self._place_weights(layout, homes.host)
        zeros = partial(torch.zeros, dtype=self.gradient_dtype, device=self.device)
        self.gradients = None if layout.is_transient else zeros(self.numel)
        self.gradient_shard = zeros(layout.shard_numel) if self.gradients is None else self.gradients[self.shard]
        # Whether gradient_shard is still zero since the last step, or was divided in that step by loss scale and clipping.
        self.is_cleared = self.is_divided = False
        offload = layout.policy.offload if layout.is_offloaded else None
        self.spans = self._cut_spans(offload.window if offload is not None else layout.shard_numel)
        self.shards = [shard for span in self.spans for shard in span.shards]
        # Version counter of each parameter. Writes of this package go into the flat buffer and don't change it.
        self._versions = {shard: shard.info.parameter._version for shard in self.shards}

    def mark_gradients(self, is_cleared: bool = False, is_divided: bool = False) -> None:
        """Note that gradient_shard is zero, so that it need not be cleared again, or that it was divided in place."""
        self.is_cleared, self.is_divided = is_cleared, is_divided

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
    def _place_weights(
        self, layout: BucketLayout, host: HostShards | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
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
        masters = layout.read(self.shard if layout.is_sharded else slice(0, self.numel), layout.master_dtype)
        own = masters.to(layout.weight_dtype)
        if layout.is_sharded and not layout.weights_offloaded:
            own = _mapped(own, self._gather_group)
        master = masters if self.has_own_master else own
        master = master if layout.is_sharded else master[self.shard]
        if self.has_own_master:
            master = self._kept(layout, master)
        if layout.is_sharded:
            host = host if layout.weights_offloaded else None
            shard = own if host is None else host.keep(own, layout.weights_on_disk)
            self.sharded = kind_of_shards(layout.gathers_fp8)(
                weights, shard, self.parameters, views, self._gather_group, host
            )
            return weights, self.sharded.shard, master
        self._point_to(own)
        return own, own[self.shard], master

    def _kept(self, layout: BucketLayout, master: Tensor) -> Tensor:
        """Return a master shard where it is kept between steps, in no more memory than it needs."""
        if not layout.is_offloaded:
            return master if layout.is_sharded else master.clone()
        assert self._allocate is not None
        return self._allocate(master.numel(), master.dtype, self.state_on_disk).copy_(master)

    def _cut_spans(self, longest: int) -> list[Span]:
        if self.master is None:
            assert self.gradients is not None, "an unpartitioned bucket accumulates in place"
            infos = [(info, self.view(self.gradients, k), self.offsets[k]) for k, info in enumerate(self.infos)]
            return [Span(slice(0, self.numel), tuple(ParameterShard(i, i.parameter, g, 0, at) for i, g, at in infos))]
        length = self.shard.stop - self.shard.start
        if self.copies_gradients and not self.is_offloaded:
            return list(self._whole_shards(slice(0, length)))
        parts = [slice(start, min(start + longest, length)) for start in range(0, length, max(longest, 1))]
        return [Span(part, tuple(self._cut_shards(part))) for part in parts]

    def _whole_shards(self, part: slice) -> Iterator[Span]:
        """Yield spans of whole shards, each of one shard or of at most COPIED_NUMEL / 4 elements."""
        shards: list[ParameterShard] = []
        for shard in self._cut_shards(part):
            if shards and shard.place + shard.master.numel() - shards[0].place > COPIED_NUMEL // 4:
                yield self._span_of(shards)
                shards = []
            shards.append(shard)
        if shards:
            yield self._span_of(shards)

    def _span_of(self, shards: Sequence[ParameterShard]) -> Span:
        start, end = shards[0].place - self.shard.start, shards[-1].place + shards[-1].master.numel() - self.shard.start
        return Span(slice(start, end), tuple(shards))

    def _cut_shards(self, part: slice) -> Iterator[ParameterShard]:
        """Yield the shards of parameters in a part of the bucket's shard."""
        assert self.master is not None
        first = self.shard.start + part.start
        for k, info in enumerate(self.infos):
            inside = cut(self.offsets[k], self.sizes[k], slice(first, self.shard.start + part.stop))
            if inside.start >= inside.stop:
                continue
            own, place = slice(part.start + inside.start, part.start + inside.stop), first + inside.start
            is_whole = self.partition.size == 1 and inside.stop - inside.start == self.sizes[k]
            shape = info.parameter.shape if is_whole else (-1,)
            master, gradient = nn.Parameter(self.master[own].view(shape)), self.gradient_shard[own].view(shape)
            yield ParameterShard(info, master, gradient, place - self.offsets[k], place)

    @property
    def autograd_adds(self) -> bool:
        """Whether autograd itself adds to the accumulators, which have the weights' dtype."""
        return self.gradients is not None and self.gradient_dtype == self.parameters[0].dtype

    def assign_gradients(
        self, span: Span, untouched: Set[nn.Parameter], factor: Tensor | None = None, gradients: Tensor | None = None
    ) -> None:
        """Set `grad` of each master of a span; None for parameters without a gradient, which the optimizer then skips.

        factor: multiplies the gradients, a scalar on their device. The product is computed in the masters' dtype, because in
        fp16 the values that the loss scale has kept from underflow would be lost. gradients: a copy of the span's gradients.
        """
        flat = self.gradient_shard[span.part] if gradients is None else gradients
        if flat.dtype != self.master_dtype:
            flat = flat.to(self.master_dtype)
        if factor is not None:
            flat.mul_(factor)
            self.is_divided = gradients is None and not self.copies_gradients
        for shard in span.shards:
            shard.master.grad = None  # it is the accumulator if the parameter is its own master
            if shard.info.parameter not in untouched:
                shard.master.grad = self.part_of(shard, flat, span.part.start)

    def part_of(self, shard: ParameterShard, flat: Tensor, start: int = 0) -> Tensor:
        """Return a shard in a flat tensor, in its master's shape. start: where the tensor begins in the bucket's shard."""
        place = shard.place - self.shard.start - start
        return flat[place : place + shard.master.numel()].view(shard.master.shape)

    @torch.no_grad()
    def follow_weights(self, settle: Callable[[], None]) -> None:
        """Copy weights that others have written, as load_state_dict does, into the masters; a step would undo them.

        A master whose rounded value equals the weight stays as it is: a script that clamps weights in each step changes few.

        settle: called before a master is written.
        """
        if not self.has_own_master:
            return
        for shard in self.shards:
            version = shard.info.parameter._version
            if self._versions[shard] != version:
                self._versions[shard] = version
                settle()
                weights = self.weights_of(shard).to(shard.master.device)
                is_old = weights == shard.master.to(weights.dtype)
                shard.master.copy_(torch.where(is_old, shard.master, weights.to(shard.master.dtype)))

    @torch.no_grad()
    def move_weights(self, memory: Tensor) -> None:
        """Move the weights to other memory, [numel] of their dtype. Only for buckets with a flat buffer of weights."""
        assert self.weights is not None
        self.weights = memory.copy_(self.weights)
        self.own_weights = self.weights[self.shard]
        self._point_to(self.weights)

    def keep_on_device(self, master: Tensor | None) -> None:
        """Keep the optimizer's state on the device from now on, and `master` too if it is a copy of the weights."""
        self.is_offloaded = self.state_on_disk = False
        if self.has_own_master:
            self.master = master

    def _point_to(self, weights: Tensor) -> None:
        """Make the parameters views of a flat buffer."""
        for k, parameter in enumerate(self.parameters):
            parameter.data = self.view(weights, k)

    def weights_of(self, shard: ParameterShard) -> Tensor:
        """Return the weights that the layers compute with, in the master's shape; the master itself if they are the same."""
        if not self.has_own_master:
            return shard.master.detach()
        assert self.own_weights is not None
        return self.part_of(shard, self.own_weights)

    def weights_address(self) -> int:
        """Return the address that the flat weights have, or would have around this rank's shard of them."""
        assert self.own_weights is not None
        return self.own_weights.data_ptr() - self.shard.start * self.own_weights.itemsize

    def check_place(self) -> None:
        """Raise ExecutionError for a parameter that is no longer in the bucket's memory: no step would update it."""
        if self.weights is None or (self.sharded is not None and self.sharded.state is not WeightState.GATHERED):
            return
        start, width = self.weights.data_ptr(), self.weights.itemsize
        for info, offset, size in zip(self.infos, self.offsets, self.sizes, strict=True):
            if size and info.parameter.data_ptr() != start + offset * width:
                raise ExecutionError(
                    f"parameter {info.name} left the buffer that is trained, as by module.to(dtype) or parameter.data = "
                    "values; do that before initialize, or copy values into it in torch.no_grad()"
                )

    @torch.no_grad()
    def write_back(self, part: slice | None = None, masters: Tensor | None = None) -> None:
        """Round updated masters of this rank's shard into the weights, unless the weights are the masters themselves.

        masters: the masters of `part` of the shard, on the device; by default all, read from where they are kept.
        """
        if not self.has_own_master:
            return
        values, part = self.master if masters is None else masters, part or slice(None)
        assert self.own_weights is not None
        assert values is not None
        if self.sharded is None or (masters is None and self.is_offloaded):
            self.own_weights[part].copy_(values)
        else:
            self.sharded.write(part, values)

    @torch.no_grad()
    def whole_masters(self) -> dict[nn.Parameter, Tensor]:
        """Return the whole master of each parameter, in its shape. Collective over the partition."""
        if self.master is None:
            return {info.parameter: info.parameter.detach() for info in self.infos}
        flat = torch.empty(self.numel, dtype=self.master.dtype, device=self.device)
        all_gather_into(flat, self.master.to(self.device), self.partition).wait()
        return {info.parameter: self.view(flat, k) for k, info in enumerate(self.infos)}

    def gather(self) -> Work:
        """Start to fill the weights with every rank's shard; wait before they are read. Sharded ones are left as they are."""
        if self.weights is None or self.own_weights is None or self.sharded is not None:
            return DONE
        return all_gather_into(self.weights, self.own_weights, self.partition)


def make_buckets(
    infos: Sequence[ParameterInfo],
    policy: ZeroPolicy,
    partition: Group,
    rank: int,
    homes: ShardHomes = ON_DEVICE,
) -> list[Bucket]:
    """Make the buckets of parameters of the same owners, in the order given, one kind to a bucket."""
    return [Bucket(layout, partition, rank, homes) for layout in lay_out(infos, policy, partition.size)]


@dataclass(frozen=True, eq=False)
class FrozenShard:
    """The part of a frozen parameter that a rank holds: `values`, flat, from element `start` of the parameter on."""

    info: ParameterInfo
    values: Tensor
    start: int


class FrozenBucket:
    """Frozen parameters of one layer and dtype, of which each rank of `group` holds a shard.

    sharded: their weights. shards: what this rank holds of each parameter.
    """

    @torch.no_grad()
    def __init__(self, layout: BucketLayout, group: Group, host: HostShards | None):
        size = layout.shard_numel
        own = slice(group.index * size, (group.index + 1) * size)
        weights, views = layout.released_weights()
        shard, parameters = layout.read(own, weights.dtype), [info.parameter for info in layout.infos]
        self.infos = layout.infos
        host = host if layout.weights_offloaded else None
        shard = _mapped(shard, group) if host is None else host.keep(shard, layout.weights_on_disk)
        self.sharded = kind_of_shards(layout.gathers_fp8)(weights, shard, parameters, views, group, host)
        parts = [cut(offset, numel, own) for offset, numel in zip(layout.offsets, layout.sizes, strict=True)]
        self.shards = [
            FrozenShard(info, self.sharded.shard[part], own.start + part.start - offset)
            for info, offset, part in zip(layout.infos, layout.offsets, parts, strict=True)
            if part.start < part.stop
        ]


def _mapped(shard: Tensor, group: Group) -> Tensor:
    """Return a shard of weights in the memory from which peers gather it."""
    return shard if group.gather_copies is None else group.gather_copies.keep(shard)


def shard_frozen(
    parameters: Sequence[ParameterInfo], policy: ZeroPolicy, group: Group, host: HostShards | None
) -> Iterator[FrozenBucket]:
    """Shard frozen parameters, given in the model's order; those that several chunks share stay whole, and so do integers.

    host: for shards in host memory.
    """
    for infos in by_owners([info for info in parameters if info.parameter.is_floating_point()]).values():
        for layout in lay_out(infos, policy, group.size):
            if layout.is_sharded:
                yield FrozenBucket(layout, group, host)
