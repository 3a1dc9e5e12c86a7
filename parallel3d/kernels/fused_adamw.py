"""AdamW's step of a bucket in one pass over memory by csrc/adamw.cu, which writes the weights of this rank or of all replicas.

`open_update_kernels` opens it together with the kernel that reduces gradients.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from parallel3d.comm.collectives import everywhere
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.peer.symmetric import Unavailable, first_unavailable
from parallel3d.config import KernelsConfig
from parallel3d.errors import ConfigError
from parallel3d.kernels.cuda_library import addresses, check, load_library
from parallel3d.kernels.reduce_scatter import ReduceScatter
from parallel3d.kernels.workspace import (
    DTYPES,
    VECTOR_BYTES,
    SymmetricWorkspace,
    buffer_bytes,
    check_kernels,
    open_workspace,
    warn_unavailable,
)

if TYPE_CHECKING:
    from parallel3d.zero.buckets import Bucket

_MAX_BLOCKS = 128
MAX_GROUPS = 32  # parameter groups; as in csrc/adamw.cuh


@dataclass
class _Laid:
    """Table of the parts of a bucket that the kernel updates, one for each shard.

    - rows: for each part the numbers of csrc/adamw.cuh's Part: addresses of the master, the gradient, its averages and the
      number of the step; its size, its place in the bucket's weights, the vectors of all parts up to it, its parameter group.
    - table: the rows on the device, int64 [parts, 9].
    - vectors: number of vectors of all parts; each has 16 bytes of weights.
    - steps: the number of the step of each part, fp32, on the device.
    """

    rows: list[list[int]]
    table: Tensor
    vectors: int
    steps: list[Tensor]


class FusedAdamW:
    """Updates the shards of buckets as torch's fused Adam or AdamW would, and keeps the optimizer's state in torch's form.

    - workspace: memory of the weights that are written on every replica; None to write only this rank's.
    - shared: bucket -> addresses of its weights on every replica.

    Raises KernelError.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        workspace: SymmetricWorkspace | None = None,
        shared: Mapping[Bucket, Sequence[int]] | None = None,
    ):
        self._library, self._optimizer, self._device = load_library(), optimizer, device
        self._workspace = workspace
        self._shared = {bucket: addresses(places) for bucket, places in (shared or {}).items()}
        self._group_of: dict[nn.Parameter, int] = {}
        self._laid: dict[Bucket, _Laid] = {}

    def writes_peers(self, bucket: Bucket) -> bool:
        """Return whether a step writes the bucket's weights on every replica, so that they need not be gathered."""
        return bucket in self._shared

    def takes(self, bucket: Bucket) -> bool:
        """Return whether it supports the bucket: weights rounded from fp32 masters, gradients in fp32 or the weights' dtype."""
        if not bucket.has_own_master or bucket.weights_offloaded or bucket.device.type != "cuda":
            return False
        # Masters of parameters built in float64 are in float64.
        return bucket.master_dtype == torch.float32 and bucket.gradient_dtype in (torch.float32, bucket.weight_dtype)

    def clears(self, bucket: Bucket) -> bool:
        """Return whether a step zeroes the gradient shard: it has its own memory, and the optimizer updates all of it."""
        return bucket.gradients is None and all(shard.master in self._group_of for shard in bucket.shards)

    @torch.no_grad()
    def step(
        self, buckets: Sequence[Bucket], untouched: Set[nn.Parameter], divisor: Tensor | None, skip: Tensor | None
    ) -> None:
        """Update the optimizer's shards except those of `untouched` parameters; zero the gradients for which `clears` is true.

        divisor: divides the gradients; skip: bool, whether to do nothing; scalars on the device. Raises CommunicationError
        after a replica was late, ConfigError if the optimizer's settings are no longer supported.
        """
        if (reason := check_adam(self._optimizer)) is not None:  # settings from a checkpoint, for example
            raise ConfigError(f"kernels.optimizer_step: {reason}, or set kernels.optimizer_step to false")
        groups = self._optimizer.param_groups
        self._group_of = {p: k for k, group in enumerate(groups) for p in group["params"]}
        laid = [(bucket, self._lay_out(bucket, untouched)) for bucket in buckets]
        steps = [step for _, its in laid for step in its.steps]
        if steps:
            torch._foreach_add_(steps, 1 if skip is None else (~skip).float())
        divisor = None if divisor is None else divisor.double()
        scalars = [None if scalar is None else scalar.data_ptr() for scalar in (divisor, skip)]
        rule = (settings_array(groups), len(groups), *scalars)
        common = [bucket for bucket in buckets if self.writes_peers(bucket)]
        for bucket, its in laid:
            meets = bool(common) and bucket is common[0], bool(common) and bucket is common[-1]
            self._launch(bucket, its, rule, meets)

    def _launch(self, bucket: Bucket, laid: _Laid, rule: tuple[Any, ...], meets: tuple[bool, bool]) -> None:
        """Launch the step of one bucket.

        - rule: settings of the groups, their number, addresses of divisor and skip.
        - meets: whether the replicas synchronize before it, and after it.
        """
        workspace, weights = self._workspace, self._shared.get(bucket)
        if workspace is None or weights is None:
            world, index, weights = 1, 0, addresses([bucket.weights_address()])
            peers: tuple[Any, ...] = (None, None, None, 0)
            stream = torch.cuda.current_stream(self._device).cuda_stream
        else:
            world, index = workspace.group.size, workspace.group.index
            peers = workspace.pads, workspace.state, workspace.report, int(workspace.limit_s * 1e9)
            stream = workspace.follow()
        # Arguments in the groups that the comment in kernels/cuda_library.py describes.
        kind = (DTYPES[bucket.weight_dtype], bucket.gradient_dtype != bucket.weight_dtype, world, index)
        parts = (laid.table.data_ptr(), laid.vectors)
        launch = (_MAX_BLOCKS, self._device.index, stream)
        clear = bucket.gradients is None
        status = self._library.p3d_adamw(*kind, *parts, *rule, clear, weights, *meets, *peers, *launch)
        check(self._library, "p3d_adamw", status)

    def _lay_out(self, bucket: Bucket, untouched: Set[nn.Parameter]) -> _Laid:
        """Return the table of the parts to step; it is made again if a tensor has moved, as when a checkpoint is loaded."""
        rows, steps, end = [], [], 0
        for shard in bucket.shards:
            master = shard.master
            if master not in self._group_of or shard.info.parameter in untouched:
                continue
            state = self._state_of(master)
            tensors = (master, shard.gradient, state["exp_avg"], state["exp_avg_sq"], state["step"])
            end += -(-master.numel() * bucket.weight_dtype.itemsize // VECTOR_BYTES)
            rows.append([*(t.data_ptr() for t in tensors), master.numel(), shard.place, end, self._group_of[master]])
            steps.append(state["step"])
        laid = self._laid.get(bucket)
        if laid is None or laid.rows != rows:
            table = torch.tensor(rows, dtype=torch.int64).pin_memory().to(self._device, non_blocking=True)
            laid = self._laid[bucket] = _Laid(rows, table, end, steps)
        return laid

    def _state_of(self, master: nn.Parameter) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self._optimizer.state[master]
        if not state:  # the initial state of torch's fused optimizer
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
        return state


def settings_array(groups: Sequence[Mapping[str, Any]]) -> Any:
    """Return the settings of torch's parameter groups as an array for C, in the order of csrc/adamw.cuh."""
    flat: list[float] = []
    for group in groups:
        flat += [group["lr"], *group["betas"], group["eps"], group["weight_decay"], group["decoupled_weight_decay"]]
    return (ctypes.c_double * len(flat))(*flat)


def check_adam(optimizer: torch.optim.Optimizer) -> Unavailable | None:
    """Return why the kernel can't replace an optimizer's step; None if it can."""
    name = type(optimizer).__name__
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return Unavailable(f"it takes the steps of Adam and AdamW, and the optimizer is {name}", "use one of these")
    for group in optimizer.param_groups:
        if not group["fused"]:
            return Unavailable(
                f"{name} was made without fused=True", "make it with that, or let the configuration make it"
            )
        for key in ("amsgrad", "maximize", "capturable", "differentiable"):
            if group[key]:
                return Unavailable(f"{name} has {key}=True", f"drop {key}")
        if any(isinstance(value, Tensor) for value in (group["lr"], *group["betas"])):
            return Unavailable(f"{name} has lr or betas in tensors", "give numbers")
    if (number := len(optimizer.param_groups)) > MAX_GROUPS:
        return Unavailable(f"{name} has {number} parameter groups", f"use at most {MAX_GROUPS}")
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return Unavailable(f"{name} has step hooks, which would see no gradients", "remove them")
    return None


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
    weights = {b: b.weights for b in buckets if b.has_own_master and b.weights is not None and b.sharded is None}
    lengths = [tensor.nbytes for tensor in weights.values()]
    workspace = open_workspace(groups, "data", device, "replicas", "optimizer_step", buffer_bytes(lengths))
    if isinstance(workspace, Unavailable):
        warn_unavailable(groups, "optimizer_step", workspace, f"{groups.backend} gathers weights")
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
