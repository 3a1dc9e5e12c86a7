"""Policy of ZeRO: the stage, the dtypes, the sizes of buckets."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from parallel3d.config import AioConfig, Config, OffloadOptimizerConfig, OffloadParamConfig, ZeroConfig
from parallel3d.parameters import DTYPES, ParameterInfo
from parallel3d.schedule.lifetimes import NEVER, LiveLimits, live_choices

# With "auto", unsharded gradients of an accumulation, or weights that are gathered, may take this share of the device's memory.
_SHARE = 0.1
# Most elements whose gradients are copied into the masters' dtype at a time, unless one tensor has more: 256 MiB in fp32.
COPIED_NUMEL = 2**26
# Multiply-adds (0.15 ms on an H100 in bf16) from which a weight gradient is added past autograd though autograd could add it:
# that saves the device a pass over memory, and costs the host a call of a Python function.
_WORTH_FUSING = 5 * 10**10
# Most elements of a buffer of the window: 64 MiB in fp32, long enough for the full rate of a link.
_WINDOW = 1 << 24
# Spans that are read from disk before a buffer of the window is free for them, and that are written at a time.
READS_AHEAD, _WRITES = 2, 2
_MOST_THREADS = 64
# Elements of state in a block of the disk.
_DISK_BLOCK = 1024
# Most bytes of each of the two buffers that new weights pass through on their way to shards in host memory.
STAGED_BYTES = 1 << 25


@dataclass(frozen=True)
class Disk:
    """A directory for scratch files; block_bytes, in_flight: size of the requests to the disk, and their number at a time."""

    directory: str
    block_bytes: int
    in_flight: int


@dataclass(frozen=True)
class OptimizerOffload:
    """Masters and optimizer state of a share of the elements, `ratio`, in host memory, or on disk.

    They pass through `buffers` buffers of the device of at most `window` elements each, or stay, and the CPU updates them.
    is_auto: whether those that the device has room for are moved to it after some steps. disk: None for only host memory;
    host_ratio: with a disk, the share of the offloaded state that stays in host memory.
    """

    ratio: float
    buffers: int
    pin: bool
    on_cpu: bool
    is_auto: bool
    window: int
    disk: Disk | None = None
    host_ratio: float = 1.0

    @property
    def host_buffers(self) -> int:
        """Buffers in host memory between the disk and the window: as many as it has, those being read, and those written."""
        return 0 if self.disk is None else self.buffers + READS_AHEAD + _WRITES


@dataclass(frozen=True)
class WeightOffload:
    """With stage 3, shards of weights in host memory: a share of the elements, `ratio`. pin: whether it is pinned.

    disk: where the others are, which pass through `buffers` buffers in host memory; None if they are on the device.
    fills: whether more weights are gathered than the limit of live ones where activations leave room for them.
    """

    ratio: float = 1.0
    pin: bool = True
    disk: Disk | None = None
    buffers: int = 0
    fills: bool = False


_promoted = cache(torch.promote_types)


@dataclass(frozen=True)
class ZeroPolicy:
    """ZeRO's stage and settings (arXiv:1910.02054).

    Stage 0 all-reduces gradients, 1 shards masters and optimizer state, 2 gradients too, 3 weights too.

    bucket_size: largest number of elements of a gradient bucket; weight_dtype: dtype of the layers' weights, None for the
    one they were built in; gradient_dtype: dtype of the accumulators, None for the wider of fp32 and the weights' dtype;
    communication_dtype: dtype of reductions, None for the accumulators'; reduce_per_micro_batch: only from stage 2 on, reduce
    in every micro-batch's backward, so that unsharded gradients are never held; fused_from: whole backwards of linears with at
    least this number of multiply-adds add weight gradients to the accumulators past autograd, which would write, read and add
    them once more, None if none does; largest_whole: with stage 3, weights of units of at most this number of elements are
    whole on every rank; peer_copies: whether sharded weights are gathered by copies, where devices can; whole_layers: whether
    the gradients of a layer come all at once, as a compiled one gives them; offload: how optimizer state is kept on the host,
    if it is; weight_offload: the same for the weights' shards.
    """

    stage: int
    bucket_size: int
    weight_dtype: torch.dtype | None = None
    gradient_dtype: torch.dtype | None = None
    communication_dtype: torch.dtype | None = None
    reduce_per_micro_batch: bool = False
    fused_from: int | None = None
    largest_whole: int = 0
    peer_copies: bool = False
    whole_layers: bool = False
    offload: OptimizerOffload | None = None
    weight_offload: WeightOffload | None = None

    def master_dtype(self, built: torch.dtype) -> torch.dtype:
        """Return the dtype of the masters: fp32, or the dtype that a parameter was built in if that is wider."""
        return _promoted(torch.float32, built)

    def num_shards(self, data_size: int) -> int:
        """Return the number of shards into which the parameters' state is cut over `data_size` replicas."""
        return data_size if self.stage > 0 else 1

    def shards_weights(self, data_size: int) -> bool:
        """Return whether weights live as shards over `data_size` replicas; for a single one only if they are offloaded."""
        return self.stage == 3 and (data_size > 1 or self.weight_offload is not None)

    def accumulator_dtype(self, built: torch.dtype) -> torch.dtype:
        """Return the dtype of the gradient accumulator of a parameter built in `built`."""
        return self.gradient_dtype or self.master_dtype(built)


def make_policy(
    config: Config,
    parameters: Sequence[ParameterInfo],
    device: torch.device,
    weight_dtype: torch.dtype | None,
    shard_numel: int = 0,
) -> ZeroPolicy:
    """Return the policy of a configuration for this rank's parameters; reduce_per_micro_batch "auto" depends on their size.

    shard_numel: elements of this rank's shards of weights, which may be more than offload_param.max_in_cpu.
    """
    zero = config.zero_optimization
    accumulators = config.data_types.grad_accum_dtype
    communication = config.communication_data_type
    size = sum(i.parameter.numel() for i in parameters) * (DTYPES[accumulators].itemsize if accumulators else 4)
    too_large = size > _SHARE * device_memory(device)
    per_micro_batch = zero.stage >= 2 and (
        too_large if zero.reduce_per_micro_batch == "auto" else zero.reduce_per_micro_batch
    )
    gradient_dtype = DTYPES[accumulators] if accumulators else None
    # Whether autograd may add to the accumulators. Not in CUDA graphs, whose replays call no Python function.
    by_autograd = gradient_dtype == weight_dtype and not (per_micro_batch or config.cuda_graphs or config.fp8.enabled)
    return ZeroPolicy(
        stage=zero.stage,
        bucket_size=min(zero.reduce_bucket_size, zero.allgather_bucket_size),
        weight_dtype=weight_dtype,
        gradient_dtype=gradient_dtype,
        communication_dtype=DTYPES[communication] if communication else None,
        reduce_per_micro_batch=per_micro_batch,
        fused_from=None if weight_dtype is None else _WORTH_FUSING if by_autograd else 0,
        largest_whole=zero.stage3_param_persistence_threshold,
        peer_copies=zero.peer_copies,
        whole_layers=config.compile.enabled,
        offload=_offload(zero, config.aio),
        weight_offload=_weight_offload(zero, config.aio, shard_numel),
    )


def _disk(config: OffloadOptimizerConfig | OffloadParamConfig, aio: AioConfig) -> Disk | None:
    if config.device != "nvme" or config.nvme_path is None:
        return None
    return Disk(config.nvme_path, aio.block_size, min(aio.queue_depth * aio.intra_op_parallelism, _MOST_THREADS))


def _weight_offload(zero: ZeroConfig, aio: AioConfig, shard_numel: int) -> WeightOffload | None:
    config, disk = zero.offload_param, _disk(zero.offload_param, aio)
    if zero.stage < 3 or config.device in ("none", None) or (config.max_in_cpu == 0 and disk is None):
        return None
    if config.max_in_cpu is None:
        ratio = 1.0 if disk is None else 0.0
    else:
        ratio = min(1.0, config.max_in_cpu / shard_numel) if shard_numel else 1.0
    return WeightOffload(ratio, config.pin_memory, disk, config.buffer_count, config.fill_freed_memory)


def _offload(zero: ZeroConfig, aio: AioConfig) -> OptimizerOffload | None:
    config = zero.offload_optimizer
    if config.device in ("none", None) or config.ratio == 0:
        return None
    disk = _disk(config, aio)
    return OptimizerOffload(
        1.0 if config.ratio == "auto" else config.ratio,
        config.buffer_count,
        config.pin_memory,
        on_cpu=config.step == "cpu",
        is_auto=config.ratio == "auto",
        window=min(-(-zero.sub_group_size // _DISK_BLOCK) * _DISK_BLOCK if disk else zero.sub_group_size, _WINDOW),
        disk=disk,
        host_ratio=config.host_ratio if disk else 1.0,
    )


def live_limits(zero: ZeroConfig, ranks: Sequence[Mapping[int, int]]) -> list[LiveLimits]:
    """Return the possible limits of weights that are gathered with stage 3, the least first: several for "auto".

    ranks: unit -> elements, of each rank of a pipeline.
    """
    live, given = zero.stage3_max_live_parameters, zero.stage3_prefetch_bucket_size
    reuse = NEVER if zero.stage3_max_reuse_distance == "auto" else zero.stage3_max_reuse_distance
    ahead = max((size for own in ranks for size in own.values()), default=0) if given == "auto" else given
    return [LiveLimits(n, ahead, reuse) for n in (live_choices(ranks) if live == "auto" else [live])]


def within(limits: Sequence[LiveLimits], most: int) -> LiveLimits:
    """Return the largest of some limits, the least first, that is at most this many elements, or else the least."""
    return ([each for each in limits if each.live <= most] or limits[:1])[-1]


def usual_live(policy: ZeroPolicy, device: torch.device) -> int:
    """Return how many elements of weights are gathered on a device at most, if the configuration leaves that open."""
    return int(_SHARE * device_memory(device)) // (policy.weight_dtype or torch.float32).itemsize


def free_memory(device: torch.device) -> float:
    """Return the bytes of the device's memory that nothing has used so far, but for a tenth of it."""
    if device.type != "cuda":
        return float("inf")  # the CPU's memory is the host's
    free, total = torch.cuda.mem_get_info(device)
    return free - _SHARE * total


def device_memory(device: torch.device) -> int:
    """Return the bytes of the device's memory; on the CPU those of the host."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
