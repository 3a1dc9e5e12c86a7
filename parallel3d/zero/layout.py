"""Layout of flat buckets: each parameter's position, and the rank that updates it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from parallel3d.comm.collectives import Group
from parallel3d.comm.peer.gathers import mapped_bytes
from parallel3d.parameters import ParameterInfo, slicing_of
from parallel3d.zero.fp8_weights import is_in_fp8
from parallel3d.zero.policy import ZeroPolicy
from parallel3d.zero.weights import cut, forget, read_into

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
    sliced: whether each tensor-parallel rank holds a different part of the parameters, instead of a copy.
    partial_over: for copies, the group over which their gradients are summed; None if each rank computes whole gradients.
    in_fp8: whether ZeRO-3 may gather them in fp8.
    """

    dtype: torch.dtype
    sliced: bool
    partial_over: Group | None
    in_fp8: bool


class BucketLayout(NamedTuple):
    """The parameters of one bucket, all of one kind and with the same owners, and where each starts in `numel` elements.

    A plan makes hundreds of thousands of them, and a dataclass takes five times as long to make.

    num_shards: the number of equal parts; one rank updates each.
    is_sharded: whether the weights, too, live as shards, and are gathered while they are used. The parameters are of one unit.
    is_offloaded: whether masters and optimizer state are in host memory, or, with state_on_disk, on disk.
    weights_offloaded: whether the shards of the weights are in host memory, or, with weights_on_disk, on disk.
    """

    kind: Kind
    infos: tuple[ParameterInfo, ...]
    offsets: tuple[int, ...]
    numel: int
    policy: ZeroPolicy
    num_shards: int
    is_sharded: bool = False
    is_offloaded: bool = False
    state_on_disk: bool = False
    weights_offloaded: bool = False
    weights_on_disk: bool = False

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
    def has_own_master(self) -> bool:
        """Whether the masters are a copy: in a wider dtype than the weights, or where one of the two is on the host."""
        offload = self.policy.offload if self.is_offloaded else None
        updated_on_host = offload is not None and offload.on_cpu
        return self.weight_dtype != self.master_dtype or updated_on_host or self.weights_offloaded

    @property
    def gathers_fp8(self) -> bool:
        """Whether the weights are gathered in fp8 while a step runs; see Fp8Weights."""
        return self.is_sharded and self.kind.in_fp8 and not self.weights_offloaded

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Dtype in which gradients are accumulated."""
        return self.policy.accumulator_dtype(self.kind.dtype)

    @property
    def is_in_place(self) -> bool:
        """Whether the parameters keep their own storage, and are their own masters."""
        whole = self.num_shards == 1 and not self.is_sharded
        return whole and self.weight_dtype == self.master_dtype and not self.is_offloaded

    def released_weights(self) -> tuple[Tensor, list[Tensor]]:
        """Return a flat tensor for all weights, and a view of it for each parameter; without memory until it is gathered."""
        flat = torch.empty(self.numel, dtype=self.weight_dtype, device=self.infos[0].parameter.device)
        parts = zip(self.infos, self.offsets, self.sizes, strict=True)
        views = [flat[offset : offset + size].view(info.parameter.shape) for info, offset, size in parts]
        flat.untyped_storage().resize_(0)  # at once: the shards take its place, and leave no holes in the heap
        return flat, views

    def read(self, held: slice, dtype: torch.dtype) -> Tensor:
        """Return the initial values in this part of the flat buffer; no parameter has memory of its own any more."""
        values = torch.zeros(held.stop - held.start, dtype=dtype, device=self.infos[0].parameter.device)
        for info, offset, size in zip(self.infos, self.offsets, self.sizes, strict=True):
            part = cut(offset, size, held)
            read_into(values[part], info.parameter, held.start + part.start - offset)
            forget(info.parameter)
        return values

    @property
    def is_transient(self) -> bool:
        """Whether the gradients pass through a buffer that buckets share, and only a shard of them is kept.

        False for shared parameters, whose gradients come from several chunks and are reduced once, when all have run.
        """
        return self.policy.reduce_per_micro_batch and self.num_shards > 1 and len(self.owners) == 1


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


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


def mapped_shards(parameters: Sequence[ParameterInfo], policy: ZeroPolicy, num_shards: int) -> int:
    """Return the bytes that the shards of weights on the device take in memory that all replicas map."""
    layouts = (layout for infos in by_owners(parameters).values() for layout in lay_out(infos, policy, num_shards))
    held = (layout for layout in layouts if layout.is_sharded and not layout.weights_offloaded)
    return sum(mapped_bytes(layout.shard_numel * layout.weight_dtype.itemsize) for layout in held)


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
        parameter, unit = info.parameter, info.unit if info.unit in sharded else None
        partial_over, in_fp8 = getattr(parameter, "partial_over", None), unit is not None and is_in_fp8(parameter)
        kind = Kind(parameter.dtype, slicing_of(parameter) is not None, partial_over, in_fp8)
        kinds.setdefault((unit, kind), []).append(info)
    layouts = [
        layout
        for (unit, kind), alike in kinds.items()
        for layout in _cut(kind, alike, policy, num_shards, unit is not None)
    ]
    if (weights := policy.weight_offload) is not None:
        taken = _share((layout.numel * layout.is_sharded for layout in layouts), weights.ratio)
        for k, takes in enumerate(taken):
            on_disk = layouts[k].is_sharded and not takes and weights.disk is not None
            on_host = on_disk or (layouts[k].is_sharded and takes)
            # The single shard of one replica is whole: on the device it needs no gathers.
            is_sharded = on_host or (layouts[k].is_sharded and num_shards > 1)
            layouts[k] = layouts[k]._replace(weights_offloaded=on_host, weights_on_disk=on_disk, is_sharded=is_sharded)
    if (state := policy.offload) is not None:
        offloaded = list(_share((layout.numel for layout in layouts), state.ratio))
        kept = _share((one.numel * takes for one, takes in zip(layouts, offloaded, strict=True)), state.host_ratio)
        layouts = [
            one._replace(is_offloaded=takes, state_on_disk=takes and not on_host)
            for one, takes, on_host in zip(layouts, offloaded, kept, strict=True)
        ]
    return layouts


def _share(sizes: Iterable[int], ratio: float) -> Iterator[bool]:
    """Choose `ratio` of the elements: buckets in turn, so that those on the device are updated while others are copied."""
    seen = chosen = 0
    for size in sizes:
        seen += size
        takes = chosen + size <= ratio * seen
        chosen += size if takes else 0
        yield takes


def _sharded_units(infos: Sequence[ParameterInfo], policy: ZeroPolicy, num_shards: int) -> set[int]:
    """Return the units whose weights live as shards. Parameters that several chunks share are whole on every rank."""
    sizes: Counter[int] = Counter()
    if policy.shards_weights(num_shards) and not infos[0].shared:
        for info in infos:
            sizes[info.unit] += info.parameter.numel()
    return {unit for unit, size in sizes.items() if size > policy.largest_whole}


def bucket_limit(total: int, policy: ZeroPolicy, num_shards: int) -> int:
    """Return the most elements of a bucket, unless a parameter is larger. total: elements of all parameters of its kind."""
    smallest = max(_SMALLEST, _SMALLEST_SHARD * num_shards)
    return min(policy.bucket_size, max(smallest, -(-total // (_PARTS * num_shards))))


def _cut(
    kind: Kind, infos: Sequence[ParameterInfo], policy: ZeroPolicy, num_shards: int, is_sharded: bool
) -> Iterator[BucketLayout]:
    sizes = tuple(info.parameter.numel() for info in infos)
    start = 0
    for offsets, numel in _positions(sizes, bucket_limit(sum(sizes), policy, num_shards), num_shards * ALIGNMENT):
        held = tuple(infos[start : start + len(offsets)])
        start += len(offsets)
        yield BucketLayout(kind, held, offsets, numel, policy, num_shards, is_sharded)


@lru_cache(maxsize=4096)  # a plan lays out equal stages again and again
def _positions(sizes: tuple[int, ...], limit: int, multiple: int) -> list[tuple[tuple[int, ...], int]]:
    """Return where each parameter of each bucket starts, and the bucket's elements, a multiple of a number."""
    buckets: list[tuple[tuple[int, ...], int]] = []
    offsets: list[int] = []
    end = 0
    for size in sizes:
        if offsets and end + size > limit:
            buckets.append((tuple(offsets), _round_up(end, multiple)))
            offsets, end = [], 0
        offsets.append(end)
        end += _round_up(size, ALIGNMENT)
    return [*buckets, (tuple(offsets), _round_up(end, multiple))] if sizes else []
