"""Open the kernels that reduce gradients and update weights."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from parallel3d.comm.collectives import everywhere
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.peer.symmetric import UNMAPPED, Unavailable, check_axis, first_unavailable
from parallel3d.config import KernelsConfig
from parallel3d.kernels.reduce_scatter import open_reduce_scatter
from parallel3d.kernels.shared_weights import SharedWeights, shared_bytes
from parallel3d.kernels.workspace import check_kernels, check_ranks, open_workspace
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
        _warn(groups, "reduce_scatter", unsharded, f"{groups.backend} reduces gradients instead")
    groups.data.use_reduce_scatter(open_reduce_scatter(groups, device) if reduces and partitioned else None)
    if not steps:
        return None
    reason = check_kernels(device) or check_adam(optimizer) or _check_masters(buckets)
    if (first := first_unavailable(reason if buckets else None, groups.control)) is not None:
        _warn(groups, "optimizer_step", first, "torch updates weights instead")
        return None
    shared = _share(buckets, groups, device) if partitioned else None
    if isinstance(shared, Unavailable):
        _warn(groups, "optimizer_step", shared, f"{groups.backend} gathers weights instead")
        shared = None
    places = {} if shared is None else {bucket: k for k, bucket in enumerate(_rounded(buckets))}
    return FusedAdamW(optimizer, device, shared, places) if buckets else None


def _share(buckets: Sequence[Bucket], groups: ProcessGroups, device: torch.device) -> SharedWeights | Unavailable:
    """Move the weights into memory that all replicas map, unless something prevents it on any rank."""
    reason = first_unavailable(_check_masters(buckets), groups.control)
    reason = reason or check_axis(groups, "data", device, "replicas", check_kernels, check_ranks)
    if reason is not None:
        return reason
    own = _rounded(buckets)
    weights = [bucket.weights for bucket in own if bucket.weights is not None]
    lengths = [tensor.nbytes for tensor in weights]
    workspace = open_workspace(groups, "data", device, "optimizer_step", shared_bytes(lengths))
    if workspace is None:
        return UNMAPPED
    shared = SharedWeights(workspace, lengths)
    for k, (bucket, tensor) in enumerate(zip(own, weights, strict=True)):
        bucket.move_weights(shared.memory(k).view(tensor.dtype))
    torch.cuda.synchronize(device)
    everywhere(True, groups.control)  # no peer writes before the move is done
    return shared


def _rounded(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Those whose weights are rounded from masters."""
    return [bucket for bucket in buckets if bucket.has_own_master]


def _check_masters(buckets: Sequence[Bucket]) -> Unavailable | None:
    if _rounded(buckets) or not buckets:
        return None
    return Unavailable("weights are their own masters", "set bf16.enabled or fp16.enabled")


def _warn(groups: ProcessGroups, kernel: str, reason: Unavailable, instead: str) -> None:
    if groups.rank == 0:
        warnings.warn(f"kernels.{kernel}: {reason}; {instead}", stacklevel=2)
