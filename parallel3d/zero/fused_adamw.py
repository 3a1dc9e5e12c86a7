"""AdamW's step of a bucket by csrc/adamw.cu: gradients to weights in one pass over memory, on this rank or on all replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.comm.peer.symmetric import Unavailable
from parallel3d.errors import ConfigError
from parallel3d.kernels import adamw
from parallel3d.kernels.library import addresses, check, load_library
from parallel3d.kernels.workspace import DTYPES, SymmetricWorkspace
from parallel3d.zero.buckets import Bucket, ParameterShard


@dataclass
class _Laid:
    """Where a bucket's pieces are, in device memory. known: what it was made of, as addresses."""

    known: list[int]
    table: Tensor
    vectors: int
    steps: list[Tensor]


class FusedAdamW:
    """Steps the pieces of buckets as torch's fused Adam or AdamW would, whose state it keeps.

    - workspace: has the weights that are written on every replica; None to write this rank's alone.
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
        library = load_library()
        assert library is not None, "checked before by check_kernels"
        self._library, self._optimizer, self._device = library, optimizer, device
        self._workspace = workspace
        self._shared = {bucket: addresses(places) for bucket, places in (shared or {}).items()}
        self._group_of = {p: k for k, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._laid: dict[Bucket, _Laid] = {}

    def writes_peers(self, bucket: Bucket) -> bool:
        """Whether the bucket, once stepped, need not be gathered."""
        return bucket in self._shared

    def takes(self, bucket: Bucket) -> bool:
        """Whether it steps the bucket: its weights are rounded from fp32 masters, and its gradients are fp32 or as these."""
        if not bucket.has_own_master or bucket.device.type != "cuda":
            return False
        assert bucket.weights is not None
        assert bucket.master is not None
        # Masters of what was built in float64 are as wide.
        return bucket.master.dtype == torch.float32 and bucket.gradient_dtype in (torch.float32, bucket.weights.dtype)

    def clears(self, bucket: Bucket) -> bool:
        """Whether a step leaves the gradient shard zero: it is one of its own, and the optimizer has all that is in it."""
        return bucket.gradients is None and all(piece.master in self._group_of for piece in bucket.pieces)

    @torch.no_grad()
    def step(
        self, buckets: Sequence[Bucket], untouched: Set[nn.Parameter], divisor: Tensor | None, skip: Tensor | None
    ) -> None:
        """Update the optimizer's pieces but those of parameters that got no gradient; clear what gradients `clears` says.

        divisor: of the gradients; skip: bool, whether to do nothing; scalars on the device. Raises CommunicationError after a
        replica was late, ConfigError where settings have changed to what the kernel can't take.
        """
        if (reason := check_adam(self._optimizer)) is not None:  # as by a checkpoint's settings
            raise ConfigError(f"kernels.optimizer_step: {reason}, or set kernels.optimizer_step to false")
        laid = [(bucket, self._lay_out(bucket, untouched)) for bucket in buckets]
        steps = [step for _, its in laid for step in its.steps]
        if steps:
            torch._foreach_add_(steps, 1 if skip is None else (~skip).float())
        divisor = None if divisor is None else divisor.double()
        settings = adamw.settings_array(self._optimizer.param_groups)
        common = [bucket for bucket in buckets if self.writes_peers(bucket)]
        for bucket, its in laid:
            meets = bool(common) and bucket is common[0], bool(common) and bucket is common[-1]
            self._launch(bucket, its, settings, divisor, skip, meets)

    def _launch(
        self,
        bucket: Bucket,
        laid: _Laid,
        settings: Any,
        divisor: Tensor | None,
        skip: Tensor | None,
        meets: tuple[bool, bool],
    ) -> None:
        assert bucket.weights is not None
        workspace, weights = self._workspace, self._shared.get(bucket)
        if workspace is None or weights is None:
            world, index, weights = 1, 0, addresses([bucket.weights.data_ptr()])
            peers: tuple[Any, ...] = (None, None, None, 0)
            stream = torch.cuda.current_stream(self._device).cuda_stream
        else:
            world, index = workspace.group.size, workspace.group.index
            peers = workspace.pads, workspace.state, workspace.report, workspace.limit_ns
            stream = workspace.follow()
        status = self._library.p3d_adamw(
            DTYPES[bucket.weights.dtype],
            bucket.gradient_dtype != bucket.weights.dtype,
            world,
            index,
            laid.table.data_ptr(),
            laid.vectors,
            settings,
            len(self._optimizer.param_groups),
            None if divisor is None else divisor.data_ptr(),
            None if skip is None else skip.data_ptr(),
            bucket.gradients is None,
            weights,
            *meets,
            *peers,
            adamw.MAX_BLOCKS,
            self._device.index,
            stream,
        )
        check(self._library, "p3d_adamw", status)

    def _lay_out(self, bucket: Bucket, untouched: Set[nn.Parameter]) -> _Laid:
        """Made anew where a tensor has moved, as when a checkpoint is loaded."""
        stepped = [piece for piece in bucket.pieces if piece.master in self._group_of]
        parts = [self._part(piece) for piece in stepped if piece.info.parameter not in untouched]
        known = [t.data_ptr() for p in parts for t in (p.master, p.gradient, p.average, p.square_average, p.step)]
        laid = self._laid.get(bucket)
        if laid is None or laid.known != known:
            assert bucket.weights is not None
            table, vectors = adamw.table(parts, bucket.weights.itemsize)
            on_device = table.pin_memory().to(self._device, non_blocking=True)
            laid = self._laid[bucket] = _Laid(known, on_device, vectors, [part.step for part in parts])
        return laid

    def _part(self, piece: ParameterShard) -> adamw.Part:
        state, master = self._optimizer.state[piece.master], piece.master
        if not state:  # as torch's fused optimizer begins
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
        moments, group = (state["exp_avg"], state["exp_avg_sq"]), self._group_of[master]
        return adamw.Part(master, piece.gradient, *moments, state["step"], piece.place, group)


def check_adam(optimizer: torch.optim.Optimizer) -> Unavailable | None:
    """Return why the kernel can't take an optimizer's step; None if it can."""
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
    most = adamw.MAX_GROUPS
    if len(optimizer.param_groups) > most:
        return Unavailable(f"{name} has {len(optimizer.param_groups)} parameter groups", f"use at most {most}")
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return Unavailable(f"{name} has step hooks, which would see no gradients", "remove them")
    return None
