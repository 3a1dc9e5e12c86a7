"""Open the kernels that reduce gradients and update weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parallel3d.comm.collectives import everywhere
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.peer.symmetric import UNMAPPED, Unavailable, check_axis, first_unavailable
from parallel3d.config import KernelsConfig
from parallel3d.kernels.reduce_scatter import ReduceScatter
from parallel3d.kernels.workspace import (
    SymmetricWorkspace,
    buffer_bytes,
    check_kernels,
    check_ranks,
    open_workspace,
    warn_unavailable,
)
from parallel3d.zero.buckets import Bucket
from parallel3d.zero.fused_adamw import FusedAdamW, check_adam


def open_update_kernels(
    optimizer: torch.optim.Optimizer,
    buckets: Sequence[Bucket],
    groups: ProcessGroups,
    device: torch.device,
    config: KernelsConfig,
) -> FusedAdamW | None:
    """Open the configured kernels that can run on every rank; warn why the others can't. Collective over the world.

    Returns the kernel that updates buckets, if there is one; the reduce-scatter is opened in the group of replicas.
    optimizer: must hold the buckets' masters already. The weights of buckets move into shared memory where replicas share them.
    """
    steps, reduces = config.optimizer_step, config.reduce_scatter
    partitioned = groups.data.size > 1 and (steps or reduces)
    partitioned = partitioned and everywhere(all(b.partition.size > 1 for b in buckets), groups.control)
    if reduces and groups.data.size > 1 and not partitioned:
        unsharded = Unavailable("nothing is partitioned", "set zero_optimization.stage to 1 or 2")
        warn_unavailable(groups, ReduceScatter.key, unsharded, f"{groups.backend} {ReduceScatter.instead}")
    groups.data.use_reduce_scatter(ReduceScatter.open(groups, device) if reduces and partitioned else None)
    if not steps:
        return None
    reason = check_kernels(device) or check_adam(optimizer) or _check_masters(buckets)
    if (first := first_unavailable(reason if buckets else None, groups.control)) is not None:
        warn_unavailable(groups, "optimizer_step", first, "torch updates weights")
        return None
    workspace, shared = _share(buckets, groups, device) if partitioned else (None, {})
    return FusedAdamW(optimizer, device, workspace, shared) if buckets else None


def _share(
    buckets: Sequence[Bucket], groups: ProcessGroups, device: torch.device
) -> tuple[SymmetricWorkspace | None, dict[Bucket, list[int]]]:
    """Move the weights into memory that all replicas map, and return it with each bucket's addresses on every replica.

    Returns (None, {}), with a warning that says why, if something prevents it on any rank. Collective over the world.
    """
    weights = {b: b.weights for b in buckets if b.has_own_master and b.weights is not None}
    lengths = [tensor.nbytes for tensor in weights.values()]
    workspace = None
    reason = check_axis(groups, "data", device, "replicas", check_kernels, check_ranks)
    if reason is None:
        workspace = open_workspace(groups, "data", device, "optimizer_step", buffer_bytes(lengths))
    if workspace is None:
        warn_unavailable(groups, "optimizer_step", reason or UNMAPPED, f"{groups.backend} gathers weights")
        return None, {}
    shared = {}
    for (bucket, tensor), (memory, places) in zip(weights.items(), workspace.buffers(lengths), strict=True):
        bucket.move_weights(memory.view(tensor.dtype))
        shared[bucket] = places
    torch.cuda.synchronize(device)
    everywhere(True, groups.control)  # no peer writes before the move is done
    return workspace, shared


def _check_masters(buckets: Sequence[Bucket]) -> Unavailable | None:
    if any(bucket.has_own_master for bucket in buckets):
        return None
    return Unavailable("weights are their own masters", "set bf16.enabled or fp16.enabled")
