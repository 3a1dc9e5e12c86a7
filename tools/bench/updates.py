"""Reductions of gradients, updates of shards and gathers of weights on one host, for communication.py to time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from exchanges import KERNEL, Way
from torch import nn

from parallel3d.comm.collectives import reduce_scatter_into
from parallel3d.comm.environment import local_device
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.topology import ProcessTopology
from parallel3d.config import KernelsConfig
from parallel3d.kernels.fused_adamw import FusedAdamW, open_update_kernels
from parallel3d.kernels.reduce_scatter import ReduceScatter
from parallel3d.parameters import ParameterInfo
from parallel3d.zero.buckets import Bucket, make_buckets
from parallel3d.zero.optimizer import ShardedOptimizer
from parallel3d.zero.policy import ZeroPolicy

_PARAMETERS = 16  # of equal sizes, a bucket each
_CLIP = 2.0  # what gradients are divided by
# What updates and what gathers, and the keys that ask for it.
_UPDATES = {
    "torch, {backend}": {},
    "kernel, {backend}": {"optimizer_step": True},
    "kernel, all replicas": {"optimizer_step": True},
}


class Updates:
    """Updates with every rank of the world as a replica. Collective, as `ways`."""

    def __init__(self) -> None:
        self._device, self._world = local_device(), dist.get_world_size()
        self._backend = str(dist.get_backend())
        self._groups = ProcessGroups(ProcessTopology(["pipe", "data", "model"], [1, self._world, 1]))
        self._kernel = ReduceScatter.open(self._groups, self._device)

    def ways(self, what: Sequence[str], sizes: Sequence[int], dtype: torch.dtype) -> Iterator[Way]:
        """Yield the updates of some kinds. sizes: bytes of fp32 gradients; of masters only the largest."""
        for num_bytes in sizes if "reduce_scatter" in what else ():
            yield from self._reductions(num_bytes, dtype)
        if "update" in what and dtype != torch.float32:
            yield from self._updates(max(sizes), dtype)

    def _reductions(self, num_bytes: int, wire: torch.dtype) -> Iterator[Way]:
        """Yield reductions of fp32 gradients of this size, sent in a dtype, and of as many gradients in that dtype."""
        whole = torch.zeros(num_bytes // 4 // self._world * self._world, device=self._device)
        shard = whole.chunk(self._world)[dist.get_rank()]

        def by_backend() -> None:
            sent = whole.to(wire)
            part = sent.chunk(self._world)[dist.get_rank()]
            reduce_scatter_into(part, sent, self._groups.data).wait()
            if part.data_ptr() != shard.data_ptr():
                shard.copy_(part)

        yield Way("reduce_scatter", num_bytes, self._backend, by_backend)
        if (kernel := self._kernel) is not None:
            yield Way("reduce_scatter", num_bytes, KERNEL, lambda: kernel.reduce_into(shard, whole, wire, False, None))

    def _updates(self, num_bytes: int, dtype: torch.dtype) -> Iterator[Way]:
        """Yield AdamW's step of fp32 masters of this size over all ranks, and the all-gather of weights in a dtype."""
        names = list(_UPDATES) if self._kernel is not None else list(_UPDATES)[:1]
        for name in names:
            call = self._update(num_bytes // 4 // _PARAMETERS, dtype, name)
            yield Way("update", num_bytes, name.format(backend=self._backend), call)

    def _update(self, numel: int, dtype: torch.dtype, name: str) -> Callable[[], object]:
        parameters = [nn.Parameter(torch.randn(numel, device=self._device)) for _ in range(_PARAMETERS)]
        infos = [ParameterInfo(f"layers.{k}.weight", p, (0,)) for k, p in enumerate(parameters)]
        policy = ZeroPolicy(1, numel, dtype)
        optimizer = torch.optim.AdamW(parameters, fused=self._device.type == "cuda")
        buckets = make_buckets(infos, policy, self._groups.data, self._groups.rank)
        config = KernelsConfig(**_UPDATES[name])

        def open_kernel(own: Sequence[Bucket]) -> FusedAdamW | None:
            step = open_update_kernels(optimizer, own, self._groups, self._device, config)
            return FusedAdamW(optimizer, self._device) if step is not None and name == "kernel, {backend}" else step

        sharded = ShardedOptimizer(optimizer, buckets, parameters, open_kernel=open_kernel)
        for bucket in buckets:
            bucket.gradient_shard.normal_()
        divisor = torch.tensor(_CLIP, dtype=torch.float64, device=self._device)
        module = nn.ParameterList(parameters)

        def call() -> None:
            sharded.step(set(), divisor)
            sharded.gather()
            sharded.wait_for_module(module)

        return call

    def finish(self) -> None:
        """Raise what kernels had to say."""
        if self._kernel is not None:
            self._kernel.workspace.raise_if_failed()
