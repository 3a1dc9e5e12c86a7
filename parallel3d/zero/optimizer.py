"""The optimizer on shards: each rank updates its own, and all gather the weights while the next forward starts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial, reduce
from operator import or_
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from parallel3d.comm.collectives import Group, Work, all_gather_integers
from parallel3d.errors import ConfigError
from parallel3d.parameters import ParameterInfo
from parallel3d.zero.buckets import Bucket, ParameterShard
from parallel3d.zero.host_shards import HostShards
from parallel3d.zero.memory import MOMENTS, StateBytes, bytes_of, is_elementwise_state
from parallel3d.zero.offload import OffloadedState
from parallel3d.zero.policy import COPIED_NUMEL
from parallel3d.zero.storage import Storage

if TYPE_CHECKING:
    from parallel3d.kernels.fused_adamw import FusedAdamW

# An elementwise optimizer updates each element from that element's own history, so that it can work on shards.
# Other classes declare it by a class attribute `elementwise = True`.
_ELEMENTWISE = tuple(getattr(torch.optim, name) for name in MOMENTS if hasattr(torch.optim, name))
# Optimizers that use norms of tensors, sums over rows and columns, or products of matrices, which differ for a shard.
WHOLE_TENSOR = (torch.optim.Adafactor, torch.optim.Muon)
# Optimizers whose fused kernels divide the gradients and read a flag (torch's protocol with its GradScaler). Not SGD: when
# its first step is skipped, the momentum is never initialized.
_SCALING = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


class ShardedOptimizer:
    """Makes a torch optimizer update this rank's shards instead of the parameters it was made for.

    Parameter groups of the optimizer keep their settings, and a parameter's shards stay in its group; so learning-rate
    schedules and the user's handles keep working, and groups can be added. on_gather: called with the owners and the index of
    each bucket whose gather has been launched, and its Work. Raises ConfigError for an optimizer that would compute something
    else on shards, unless allow_untested, and for parameters that aren't the model's. partitions: whether it must be fit for
    shards, though a single rank may hold whole tensors, or parameters are sharded over tensor-parallel ranks.

    open_kernel: called when the optimizer holds the masters; returns the kernel that steps these buckets, or None.
    storage: where the state of the buckets that are offloaded is kept. offloaded: that state; None if there is none.
    host: shards of weights in host memory and on disk.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        buckets: Iterable[Bucket],
        model_parameters: Iterable[nn.Parameter],
        allow_untested: bool = False,
        on_gather: Callable[[tuple[int, ...], int, Work], None] | None = None,
        open_kernel: Callable[[Sequence[Bucket]], FusedAdamW | None] | None = None,
        storage: Storage | None = None,
        host: HostShards | None = None,
        partitions: bool = False,
    ):
        self.optimizer = optimizer
        # Buckets come from the last layer on; the next forward needs them from the first layer on.
        self.buckets = list(buckets)[::-1]
        cuts = partitions or any(b.partition.size > 1 or b.is_offloaded for b in self.buckets)
        check_optimizer(optimizer, cuts, allow_untested)
        self._masters: dict[nn.Parameter, list[nn.Parameter]] = {p: [] for p in model_parameters}
        for bucket in self.buckets:
            for shard in bucket.shards:
                self._masters[shard.info.parameter].append(shard.master)
            _move_state(optimizer, bucket)
        for group in optimizer.param_groups:
            group["params"] = self._masters_of(group["params"])
        held = {master for group in optimizer.param_groups for master in group["params"]}  # frozen ones have no master
        for parameter in optimizer.state.keys() - held:
            del optimizer.state[parameter]
        add = WeakMethod(self._add_param_group)  # so that who keeps the optimizer doesn't keep the engine
        plain = partial(type(optimizer).add_param_group, optimizer)
        vars(optimizer)["add_param_group"] = lambda group: (add() or plain)(group)
        self._fused = open_kernel(self.buckets) if open_kernel is not None else None
        offloaded = [bucket for bucket in self.buckets if bucket.is_offloaded]
        self.offloaded = OffloadedState(optimizer, offloaded, storage) if storage is not None and offloaded else None
        self._host = host
        self._stale: set[Bucket] = set()
        self._gathers: dict[Bucket, Work] = {}
        self._on_gather = on_gather
        self._bucket_of = {info.parameter: bucket for bucket in self.buckets for info in bucket.infos}

    def _masters_of(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return this rank's shards of some of the model's parameters. Raises ConfigError for others."""
        found: list[nn.Parameter] = []
        for parameter in parameters:
            if parameter not in self._masters:
                raise ConfigError(
                    f"the optimizer holds a parameter of shape {list(parameter.shape)} that is not the model's; make it "
                    "from model.parameters()"
                )
            found += self._masters[parameter]
        return found

    def _add_param_group(self, group: dict[str, Any]) -> None:
        """Add a group of the model's parameters, or of (name, parameter), as a script does that trains more of them later."""
        given = [group["params"]] if isinstance(group["params"], nn.Parameter) else list(group["params"])
        if names := [each[0] for each in given if isinstance(each, tuple)]:
            given, group = [parameter for _, parameter in given], {**group, "param_names": names}
        type(self.optimizer).add_param_group(self.optimizer, {**group, "params": self._masters_of(given)})

    def state_bytes(self) -> StateBytes:
        """Return the bytes of the optimizer's state on this rank now, and of masters and weights on the host."""
        offloaded = {shard.master for bucket in self.buckets if bucket.is_offloaded for shard in bucket.shards}
        states = (state.values() for master, state in self.optimizer.state.items() if master not in offloaded)
        held = bytes_of(t for values in states for t in values if isinstance(t, Tensor))
        total = StateBytes(optimizer=held)
        if self._host is not None:
            host, disk = bytes_of(self._host.on_host()), self._host.bytes_on_disk()
            total += StateBytes(host=host, disk=disk, transient=bytes_of(self._host.buffers()))
        return total + (self.offloaded.state_bytes() if self.offloaded is not None else StateBytes())

    def takes_scale(self) -> bool:
        """Return whether the optimizer's kernels divide gradients and skip an overflow, in the pass they make anyway."""
        if self.offloaded is not None and self.offloaded.on_cpu:
            return False
        if any(bucket.master_dtype == torch.float64 for bucket in self.buckets):
            return False  # the kernels take the divisor in fp32
        fused = all(group.get("fused") for group in self.optimizer.param_groups)
        return fused and isinstance(self.optimizer, _SCALING) and hasattr(self.optimizer, "_step_supports_amp_scaling")

    def step(self, untouched: Set[nn.Parameter], divisor: Tensor | None = None, overflow: Tensor | None = None) -> None:
        """Update the shards; gather their weights afterwards. Parameters in `untouched` got no gradient and don't change.

        divisor: divides the gradients, or None; overflow: whether to do nothing, if `takes_scale`; scalars on the device.
        """
        optimizer: Any = self.optimizer
        factor = None
        if divisor is not None and self.takes_scale():
            optimizer.grad_scale = divisor.float()
        elif divisor is not None:
            factor = divisor.reciprocal()
        if overflow is not None:
            optimizer.found_inf = overflow.float()
        for work in self._gathers.values():  # gathers of weights that were not used since
            work.wait()
        self._gathers.clear()
        fused, resident = self._fused, [bucket for bucket in self.buckets if not bucket.is_offloaded]
        ours = [] if fused is None else [bucket for bucket in resident if fused.takes(bucket)]
        others = [bucket for bucket in resident if bucket not in ours]
        for bucket in self.buckets:
            bucket.check_place()
        if self._host is not None:
            self._host.expect(())  # what was read ahead will be out of date
        self.follow_weights()
        if self.offloaded is not None:
            self.offloaded.step(untouched, factor, lambda: self._step_resident(others, untouched, factor))
        else:
            self._step_resident(others, untouched, factor)
        if vars(optimizer).pop("grad_scale", None) is not None:  # the kernels have divided
            for bucket in self.buckets:
                bucket.mark_gradients(is_divided=bucket not in ours and not bucket.copies_gradients)
        vars(optimizer).pop("found_inf", None)
        self._stale = {bucket for bucket in self.buckets if bucket.partition.size > 1 and bucket.sharded is None}
        if fused is not None and ours:
            fused.step(ours, untouched, divisor, overflow)
            for bucket in ours:
                bucket.mark_gradients(overflow is None and fused.clears(bucket))
            self._stale -= {bucket for bucket in ours if fused.writes_peers(bucket)}
        if self.offloaded is not None:
            self.offloaded.after_step()

    def _step_resident(self, buckets: Sequence[Bucket], untouched: Set[nn.Parameter], factor: Tensor | None) -> None:
        """Run the optimizer on buckets whose state is on the device.

        Where it gets copies of gradients it steps several times, each time on part of the parameters: no more than COPIED_NUMEL
        elements are copied at a time. Not an optimizer that isn't elementwise, or that has hooks.
        """
        in_parts, copied = is_elementwise(self.optimizer) and not _has_hooks(self.optimizer), 0
        assigned: list[ParameterShard] = []
        for bucket, span in [(b, s) for b in buckets for s in b.spans]:
            numel = (span.part.stop - span.part.start) * bucket.copies_gradients
            if in_parts and copied and copied + numel > COPIED_NUMEL:
                self._update(assigned)
                copied = 0
            bucket.assign_gradients(span, untouched, factor)
            assigned += span.shards
            copied += numel
        self._update(assigned)
        for bucket in buckets:
            bucket.write_back()

    def _update(self, shards: list[ParameterShard]) -> None:
        """Run the optimizer, which skips masters without a gradient; clear the list and the shards' gradients."""
        self.optimizer.step()
        for shard in shards:
            shard.master.grad = None  # it may be a copy in the masters' dtype
        shards.clear()

    def settle(self) -> None:
        """Wait until the host may read and write offloaded state, and weights on the host."""
        for offloaded in (self.offloaded, self._host):
            if offloaded is not None:
                offloaded.settle()

    def follow_weights(self) -> None:
        """Copy weights that others have written into the masters, before these are read.

        Raises OffloadError if a step has failed in the middle; see OffloadedState.check_whole.
        """
        if self.offloaded is not None:
            self.offloaded.check_whole()
        for bucket in self.buckets:
            bucket.follow_weights(self.settle)

    def follow_masters(self, with_state: bool) -> None:
        """Make the weights from the masters after these were written, as by a checkpoint. Collective over the partitions.

        with_state: whether the optimizer's state was written, too.
        """
        self.settle()
        if with_state and self.offloaded is not None:
            self.offloaded.forget_failure()
        for bucket in self.buckets:
            bucket.write_back()
        for work in [bucket.gather() for bucket in self.buckets if bucket.partition.size > 1]:
            work.wait()

    def gather(self, chunk: int | None = None) -> None:
        """Start to gather the weights of a chunk, or all, bucket by bucket in layer order, unless in progress."""
        for number, bucket in enumerate(self.buckets):
            if bucket in self._stale and (chunk is None or chunk in bucket.owners):
                self._stale.remove(bucket)
                work = self._gathers[bucket] = bucket.gather()
                if self._on_gather is not None:
                    self._on_gather(bucket.owners, number, work)

    def wait_for_module(self, module: nn.Module) -> None:
        """Return (CUDA: let the stream go on) when the weights of the module are gathered."""
        if not self._gathers:
            return
        # Not the module's own parameters(): a PipelineModule's waits for the weights.
        parameters = [p for m in module.modules() for p in m._parameters.values() if p is not None]
        for bucket in {self._bucket_of[p] for p in parameters if p in self._bucket_of}:
            work = self._gathers.pop(bucket, None)
            if work is not None:
                work.wait()


def _move_state(optimizer: torch.optim.Optimizer, bucket: Bucket) -> None:
    """Cut state that the optimizer has before its first step, as Adagrad has, into the state of the shards."""
    for shard in bucket.shards:
        parameter, master = shard.info.parameter, shard.master
        if master is not parameter and parameter in optimizer.state:
            whole = optimizer.state[parameter].items()
            optimizer.state[master] = {k: _state_of(k, value, parameter, master, shard.start) for k, value in whole}


def _state_of(key: str, value: Any, parameter: Tensor, master: Tensor, start: int) -> Any:
    """Cut elementwise state and convert it to the master's dtype; copy other state, such as a step count."""
    if not isinstance(value, Tensor):
        return value
    if not is_elementwise_state(key, value.shape, parameter.shape):
        return value.clone()
    part = value.reshape(-1)[start : start + master.numel()].view(master.shape)
    return part.to(master.dtype if part.is_floating_point() else part.dtype, copy=True)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is known or declared to update each element from that element's own history."""
    return type(optimizer) in _ELEMENTWISE or getattr(type(optimizer), "elementwise", False)


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer runs a script's functions at each step, which expect that it has updated all weights."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def check_optimizer(optimizer: torch.optim.Optimizer, partitioned: bool, allow_untested: bool = False) -> None:
    """Raise ConfigError for an optimizer that would compute something else on shards, or that no engine can step.

    partitioned: whether it will get flat parts of tensors. allow_untested: accept, with a warning, an optimizer that is not
    known to be elementwise; an optimizer that is known to need whole tensors is an error in any case.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(f"optimizer {name} evaluates the model within its step, which no engine can do; use AdamW")
    if not partitioned or is_elementwise(optimizer):
        return
    known = ", ".join(cls.__name__ for cls in _ELEMENTWISE)
    if isinstance(optimizer, WHOLE_TENSOR):
        raise ConfigError(
            f"optimizer {name} works on whole tensors, but a rank has only shards of them; use zero_optimization.stage 0 and "
            f"no tensor parallelism, or Lion or one of {known}"
        )
    if not allow_untested:
        raise ConfigError(
            f"optimizer {name} is not known to be elementwise, so shards of tensors may change what it does; use "
            f"zero_optimization.stage 0 and no tensor parallelism, Lion or one of {known}, or, if it is elementwise, give its "
            "class the attribute elementwise = True or set zero_allow_untested_optimizer to true"
        )
    warnings.warn(
        f"optimizer {name} gets shards of tensors, as zero_allow_untested_optimizer wants; unless it is elementwise, the "
        "weights now depend on the layout",
        stacklevel=2,
    )


class StepAgreement:
    """Agrees, on the host, which parameters got a gradient on any rank: the others are not updated, as in torch.

    everyone: the names of each rank's parameters, in the order of `control`.
    """

    def __init__(self, infos: Sequence[ParameterInfo], everyone: Sequence[Sequence[str]], control: Group):
        self._control = control
        bits = {name: bit for bit, name in enumerate(sorted({name for names in everyone for name in names}))}
        self._bits = {info.parameter: bits[info.name] for info in infos}
        self._words = max(1, -(-len(bits) // 63))

    def reach(self, touched: Set[nn.Parameter], flag: bool) -> tuple[set[nn.Parameter], bool]:
        """Return this rank's parameters that no rank touched, and whether any set the flag. Collective over `control`."""
        mask = sum(1 << bit for parameter, bit in self._bits.items() if parameter in touched)
        words = [mask >> (63 * w) & (1 << 63) - 1 for w in range(self._words)]
        flags, *columns = zip(*all_gather_integers([int(flag), *words], self._control), strict=True)
        anywhere = sum(reduce(or_, column) << (63 * w) for w, column in enumerate(columns))
        return {parameter for parameter, bit in self._bits.items() if not anywhere >> bit & 1}, any(flags)
