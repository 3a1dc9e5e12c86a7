"""What of a step runs by this package's kernels: the reduction of gradients, the update of shards, the gathering of weights."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from parallel3d.comm.collectives import Awaited, Work, everywhere
from parallel3d.comm.environment import DEFAULT_TIMEOUT
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.obstacles import UNMAPPED, Obstacle, axis_obstacle, first_obstacle, local_obstacle
from parallel3d.comm.peer.message_wait import open_message_wait
from parallel3d.comm.peer.peer_calls import open_peer_calls
from parallel3d.comm.peer.streams import CudaStream, CudaStreams, copy_obstacle
from parallel3d.config import KernelsConfig
from parallel3d.kernels.reduce_scatter_kernel import open_reduce_scatter
from parallel3d.kernels.shared_weights import SharedWeights, WeightCopies, shared_bytes
from parallel3d.zero.buckets import Bucket
from parallel3d.zero.fused_adamw import FusedAdamW, optimizer_obstacle


@dataclass
class UpdateKernels:
    """What updates and gathers buckets instead of torch's optimizer and the backend, if anything does.

    places: of the buckets whose weights replicas share.
    """

    step: FusedAdamW | None = None
    copies: WeightCopies | None = None
    places: Mapping[Bucket, int] = field(default_factory=dict)

    def gather(self, bucket: Bucket) -> Work:
        """Start to fill the weights of a bucket with every rank's shard; wait before they are read."""
        if self.copies is None or bucket not in self.places:
            return bucket.gather()
        assert bucket.weights is not None
        width = bucket.weights.itemsize
        length = bucket.shard.stop - bucket.shard.start
        work = self.copies.gather(self.places[bucket], bucket.shard.start * width, length * width)
        return Awaited(work, "an all-gather", bucket.partition.ranks)


def open_update_kernels(
    optimizer: torch.optim.Optimizer,
    buckets: Sequence[Bucket],
    groups: ProcessGroups,
    device: torch.device,
    config: KernelsConfig,
) -> UpdateKernels:
    """What is asked for and can be had on every rank; warnings say why the rest can't. Collective over the world.

    optimizer: of the buckets' masters already. The weights of buckets move where replicas share them.
    """
    steps, gathers, reduces = config.wants_optimizer_step, config.wants_all_gather, config.wants_reduce_scatter
    partitioned = groups.data.size > 1 and (steps or gathers or reduces) and _everywhere_partitioned(buckets, groups)
    if groups.data.size > 1 and not partitioned:
        _warn_whole(groups, config)
    open_reduce_scatter(groups, device, reduces and partitioned)
    if steps:
        obstacle = local_obstacle(device) or optimizer_obstacle(optimizer) or _master_obstacle(buckets)
        if (first := first_obstacle(obstacle if buckets else None, groups.control)) is not None:
            _warn(groups, "optimizer_step", first, "torch updates weights instead")
            steps = False
    shared, places = None, {}
    if partitioned and (steps or gathers):
        kernel = "all_gather" if gathers else "optimizer_step"
        found = _share(buckets, groups, device, kernel)
        if isinstance(found, SharedWeights):
            shared, places = found, {bucket: k for k, bucket in enumerate(_rounded(buckets))}
        else:
            _warn(groups, kernel, found, f"{groups.backend} gathers weights instead")
    kernels = UpdateKernels(places=places)
    if shared is not None and gathers:
        waits = open_message_wait(device, config.wants_message_wait)
        outgoing = CudaStream(torch.cuda.Stream(device), waits)
        kernels.copies = WeightCopies(shared, outgoing, CudaStreams(device, waits).current)
    if steps and buckets:
        # Weights that copy engines gather are written here alone.
        kernels.step = FusedAdamW(optimizer, device, None if kernels.copies is not None else shared, places)
    return kernels


def _share(
    buckets: Sequence[Bucket], groups: ProcessGroups, device: torch.device, kernel: str
) -> SharedWeights | Obstacle:
    """Move the weights into memory that all replicas map, unless something is in the way on any rank."""
    obstacle = first_obstacle(_master_obstacle(buckets), groups.control)
    obstacle = obstacle or axis_obstacle(groups, "data", device, "replicas")
    if obstacle is None and kernel == "all_gather":
        obstacle = first_obstacle(copy_obstacle(device), groups.control)
    if obstacle is not None:
        return obstacle
    own = _rounded(buckets)
    weights = [bucket.weights for bucket in own if bucket.weights is not None]
    lengths = [tensor.nbytes for tensor in weights]
    limit = DEFAULT_TIMEOUT.total_seconds()
    calls = open_peer_calls(groups, "data", device, kernel, shared_bytes(lengths, groups.data.size), limit)
    if calls is None:
        return UNMAPPED
    shared = SharedWeights(calls, lengths)
    for k, (bucket, tensor) in enumerate(zip(own, weights, strict=True)):
        bucket.move_weights(shared.memory(k).view(tensor.dtype))
    torch.cuda.synchronize(device)
    everywhere(True, groups.control)  # nobody writes into counts that are not cleared yet
    return shared


def _rounded(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Those whose weights are rounded from masters."""
    return [bucket for bucket in buckets if bucket.has_own_master]


def _master_obstacle(buckets: Sequence[Bucket]) -> Obstacle | None:
    if _rounded(buckets) or not buckets:
        return None
    return Obstacle("weights are their own masters", "set bf16.enabled or fp16.enabled")


def _everywhere_partitioned(buckets: Sequence[Bucket], groups: ProcessGroups) -> bool:
    return everywhere(all(bucket.partition.size > 1 for bucket in buckets), groups.control)


def _warn_whole(groups: ProcessGroups, config: KernelsConfig) -> None:
    """Of what is asked for and works on shards alone."""
    obstacle = Obstacle("nothing is partitioned", "set zero_optimization.stage to 1 or 2")
    if config.wants_reduce_scatter:
        _warn(groups, "reduce_scatter", obstacle, f"{groups.backend} reduces gradients instead")
    if config.wants_all_gather:
        _warn(groups, "all_gather", obstacle, "every rank updates all weights")


def _warn(groups: ProcessGroups, kernel: str, obstacle: Obstacle, instead: str) -> None:
    if groups.rank == 0:
        warnings.warn(f"kernels.{kernel}: {obstacle}; {instead}", stacklevel=2)
