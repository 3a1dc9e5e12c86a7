"""Shards of weights that are not trained (ZeRO-3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel3d.comm.collectives import Group
from parallel3d.parameters import ParameterInfo
from parallel3d.zero.fp8_weights import kind_of_shards
from parallel3d.zero.host_shards import HostShards
from parallel3d.zero.layout import BucketLayout, by_owners, lay_out
from parallel3d.zero.policy import ZeroPolicy
from parallel3d.zero.weights import cut


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
        shard = shard if host is None else host.keep(shard, layout.weights_on_disk)
        self.sharded = kind_of_shards(layout.gathers_fp8)(weights, shard, parameters, views, group, host)
        parts = [cut(offset, numel, own) for offset, numel in zip(layout.offsets, layout.sizes, strict=True)]
        self.shards = [
            FrozenShard(info, self.sharded.shard[part], own.start + part.start - offset)
            for info, offset, part in zip(layout.infos, layout.offsets, parts, strict=True)
            if part.start < part.stop
        ]


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
