"""Update of the weights from a batch's gradients: reduction, norm, clipping, loss scale, optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor, nn

from parallel3d.comm.collectives import Work, all_gather_integers, all_gather_object, all_reduce
from parallel3d.comm.peer.gathers import open_gather_copies
from parallel3d.config import Config
from parallel3d.engine.loss import LossShare, countable
from parallel3d.errors import ConfigError, OffloadError
from parallel3d.kernels.fused_adamw import open_update_kernels
from parallel3d.optim.precision import LossScaler, Precision
from parallel3d.parameters import ParameterInfo
from parallel3d.pipe.module import PipelineModule
from parallel3d.schedule.instructions import Instruction, Op
from parallel3d.zero.buckets import Bucket, FrozenBucket, ShardHomes, shard_frozen
from parallel3d.zero.disk import ScratchFile
from parallel3d.zero.gathered import describe_whole
from parallel3d.zero.host_shards import HostShards
from parallel3d.zero.layout import mapped_shards
from parallel3d.zero.memory import moments_of, predict_shards, predict_state
from parallel3d.zero.optimizer import ShardedOptimizer, StepAgreement
from parallel3d.zero.parking import Parking
from parallel3d.zero.policy import make_policy
from parallel3d.zero.reducer import GradientReducer, check_precision
from parallel3d.zero.storage import Storage, open_storage
from parallel3d.zero.weights import ShardedWeights, Units, make_whole, weights_of
from parallel3d.zero.whole_state import WholeState

# Maximum number of parameters that the warning of an overflow lists.
_MAX_NAMES = 3


def _cast(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Cast the weights to a half precision, without `to`, which would drop the imaginary part of complex buffers."""
    if dtype is not None:
        (model.half if dtype is torch.float16 else model.bfloat16)()


def idle_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that updates nothing, of a model that is evaluated only: no parameter requires a gradient."""
    model.requires_grad_(False)
    return torch.optim.SGD([{"params": []}], lr=0.0)


class WeightUpdate:
    """This rank's gradients, master weights and optimizer, in flat buckets into which the parameters are moved.

    - on_launch: called with each GATHER_PARAMS and REDUCE_GRADS instruction that has been launched, and its Work.
    - on_value, on_gradient: called with each gradient, see GradientSink.

    infos, frozen_infos: parameters that were trainable, and frozen, at `initialize`; one that is frozen later stays in infos.
    units: the sharded weights of ZeRO-3, those of frozen_buckets included; None if all are whole. host_shards: those of their
    shards that are in host memory or on disk; None if offload_param is off. parking: moves state to the host between steps.
    grad_norm: the norm of the whole model's gradient in the last step, before clipping; a scalar on the device, the same on
    every rank. skipped_steps: the number of steps skipped after an overflow. num_writes: how often a script has
    written masters, and with them weights, by safe_set_full_fp32_param and its like.
    """

    def __init__(
        self,
        model: PipelineModule,
        optimizer: torch.optim.Optimizer,
        config: Config,
        precision: Precision,
        on_launch: Callable[[Instruction, Work], None],
        on_value: Callable[[nn.Parameter, Tensor], None] | None = None,
        on_gradient: Callable[[nn.Parameter], None] | None = None,
    ):
        infos = self.infos = model.parameter_infos()
        self.frozen_infos, groups = model.frozen_infos(), model.groups
        self._model, self._groups, self._on_launch = model, groups, on_launch
        self._clipping = config.gradient_clipping
        # Ratio of the gradient that the optimizer gets to the mean gradient.
        self._replicas_summed = groups.data.size if config.gradient_allreduce_op == "sum" else 1
        self.optimizer = optimizer
        held = sum(info.parameter.numel() for info in (*infos, *self.frozen_infos)) // groups.data.size
        mine = make_policy(config, infos, model.device, precision.weights, held)
        # All ranks run one program: a single rank that is short of memory decides for all.
        anywhere = any(row[0] for row in all_gather_integers([int(mine.reduce_per_micro_batch)], groups.control))
        self.policy = replace(mine, reduce_per_micro_batch=anywhere)
        check_precision(infos, self.policy)
        self._storage, self._weight_file = self._open_storage(infos, config.offload.host_memory_gib)
        self._make_buckets(infos, on_value, on_gradient)
        _cast(model, precision.weights)
        self.sharded = ShardedOptimizer(
            optimizer,
            self.reducer.all_buckets(),
            model.parameters(),
            config.zero_allow_untested_optimizer,
            on_gather=self._report_gather,
            open_kernel=lambda b: open_update_kernels(optimizer, b, groups, model.device, config.kernels),
            storage=self._storage,
            host=self.host_shards,
            partitions=self.policy.stage > 0 or groups.model.size > 1,
        )
        self.scaler = LossScaler(precision.scaling) if precision.scaling is not None else None
        self._attach_state()
        names = all_gather_object([info.name for info in infos], groups.control)
        self._agreement = StepAgreement(infos, names, groups.control)
        model.use_waiter(self.sharded.wait_for_module)
        self.parking = Parking(optimizer, self.sharded.buckets, self._frozen_weights(), self._settle)
        self._checks_overflow = precision.checks_overflow
        self._before_step: Callable[[], None] | None = None
        self.grad_norm: Tensor | None = None
        # Count of the last batch's losses, in units of the weights that their gradients had.
        self._count = torch.ones((), dtype=torch.float64, device=model.device)
        self._counted = False
        self.skipped_steps = self.num_writes = 0

    def _attach_state(self) -> None:
        """Give parameters what DeepSpeed's safe_get and safe_set functions use, and the optimizer its names of the scaler."""
        # DeepSpeed's optimizer wraps the script's, which has this name.
        vars(self.optimizer)["optimizer"] = self.optimizer
        if self.scaler is not None:
            attributes = {"loss_scaler": self.scaler, "loss_scale_config": self.scaler}
            vars(self.optimizer).update(attributes, dynamic_loss_scale=self.scaler.dynamic_loss_scale)
        self._whole_states: list[WholeState] = []
        for bucket in self.reducer.all_buckets():
            for k, parameter in enumerate(bucket.parameters):
                state = WholeState(
                    bucket,
                    k,
                    self.optimizer,
                    lambda: self.loss_scale / self._replicas_summed,
                    self.reducer.end_reductions,
                    lambda *kinds: self.parking.check(*kinds),
                    self.sharded.settle,
                    self._count_write,
                )
                state.attach(parameter)
                self._whole_states.append(state)

    def _frozen_weights(self) -> list[Tensor]:
        whole = [info.parameter for info in self.frozen_infos if weights_of(info.parameter) is None]
        return [*whole, *(bucket.sharded.shard for bucket in self.frozen_buckets)]

    def _count_write(self) -> None:
        self.num_writes += 1

    def _settle(self) -> None:
        """Wait until no copy or gather of state is in progress."""
        self.sharded.wait_for_module(self._model)
        self.sharded.settle()

    def _open_storage(
        self, infos: Sequence[ParameterInfo], limit_gib: float | None
    ) -> tuple[Storage | None, ScratchFile | None]:
        """Return where offloaded state will be kept, and the file of weights; None for what won't be. Collective."""
        if self.policy.offload is None and self.policy.weight_offload is None:
            return None, None
        moments, replicas = moments_of(self.optimizer), self._groups.data.size
        if moments is None and self.policy.offload is not None and self.policy.offload.disk is not None:
            raise OffloadError(
                f"how much state {type(self.optimizer).__name__} keeps for an element isn't known, so no space can be taken on "
                "disk for it; use offload_optimizer.device cpu, or one of the optimizers of torch.optim"
            )
        state = predict_state(infos, self.policy, replicas, moments or 0, frozen=self.frozen_infos)
        shards = predict_shards(infos, self.frozen_infos, self.policy, replicas)
        own = (weights_of(info.parameter) for info in (*infos, *self.frozen_infos))
        held = sum(w.shard.nbytes for w in own if w is not None and w.shard.device.type == "cpu")
        return open_storage(self.policy, state, shards, held, self._groups.control, limit_gib)

    def disks(self) -> dict[str, ScratchFile]:
        """Return the files of what is offloaded to disk, by what that is."""
        files = {"optimizer state": self._storage.file if self._storage else None, "weights": self._weight_file}
        return {what: file for what, file in files.items() if file is not None}

    def _make_buckets(
        self,
        infos: Sequence[ParameterInfo],
        on_value: Callable[[nn.Parameter, Tensor], None] | None,
        on_gradient: Callable[[nn.Parameter], None] | None,
    ) -> None:
        """Move the parameters into buckets, and make units of those whose weights are sharded."""
        model, groups = self._model, self._groups
        shards, offload = self.policy.shards_weights(groups.data.size), self.policy.weight_offload
        # A separate communicator, because gathers of weights and reductions of gradients have no common order on all ranks.
        gather_group = groups.build(groups.topology.get_axis_comm_lists("data")) if shards else None
        if gather_group is not None and self.policy.peer_copies:
            held = sum(mapped_shards(each, self.policy, groups.data.size) for each in (infos, self.frozen_infos))
            gather_group.use_gather_copies(open_gather_copies(groups, model.device, held))
        self.host_shards = None
        if shards and offload is not None:
            self.host_shards = HostShards(model.device, offload.pin, self._weight_file, offload.buffers)
        allocate = None if self._storage is None else self._storage.allocate
        self.reducer = GradientReducer(
            infos,
            self.policy,
            groups.rank,
            groups.data,
            model.replica_groups,
            is_first_tensor_rank=groups.coordinate("model") == 0,
            on_launch=self._on_launch,
            on_value=on_value,
            on_gradient=on_gradient,
            homes=ShardHomes(gather_group, allocate, self.host_shards),
        )
        frozen = shard_frozen(self.frozen_infos, self.policy, gather_group, self.host_shards) if gather_group else ()
        self.frozen_buckets = list(frozen)
        sharded = {info.parameter for bucket in self.frozen_buckets for info in bucket.infos}
        for info in self.frozen_infos:
            if info.parameter not in sharded:
                make_whole(info.parameter)
        self.units = self._make_units() if shards else None
        if self.policy.stage == 3:
            for info in (*infos, *self.frozen_infos):
                describe_whole(info.parameter, groups.data)

    def _make_units(self) -> Units:
        weights: dict[int, list[ShardedWeights]] = {}
        buckets: list[Bucket | FrozenBucket] = [*self.reducer.all_buckets(), *self.frozen_buckets]
        for bucket in buckets:
            if bucket.sharded is not None:
                weights.setdefault(bucket.infos[0].unit, []).append(bucket.sharded)
        units = Units(weights, self.host_shards)
        units.refuse_state_dicts(self._model)
        return units

    def call_before_step(self, call: Callable[[], None]) -> None:
        """Call `call` in each step once all gradients are reduced; they are gradient_scale times the optimizer's."""
        self._before_step = call

    def release(self) -> None:
        """Free gradients, masters and optimizer state. Nothing but the weights can be used afterwards."""
        self._settle()
        buckets = list(self.reducer.all_buckets())
        tensors = [tensor for bucket in buckets for tensor in (bucket.gradients, bucket.gradient_shard)]
        tensors += [bucket.master for bucket in buckets if bucket.has_own_master]
        tensors += [value for state in self.optimizer.state.values() for value in state.values()]
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().resizable():
                tensor.untyped_storage().resize_(0)
        self.optimizer.state.clear()
        for file in self.disks().values():
            file.close()

    def restore(self, skipped_steps: int, scaler: dict[str, float] | None) -> None:
        """Load the number of skipped steps and, if both have one, the state of the loss scaler."""
        self.skipped_steps = skipped_steps
        if self.scaler is not None and scaler is not None:
            self.scaler.load_state_dict(scaler)

    def _report_gather(self, owners: tuple[int, ...], bucket: int, work: Work) -> None:
        first = next(c for c in owners if self._model.placement[c] == self._model.stage_id)
        self._on_launch(Instruction(Op.GATHER_PARAMS, first, 0, bucket), work)

    def master_weights(self) -> dict[nn.Parameter, Tensor]:
        """Return the whole master weights of this rank's trainable parameters, in fp32 or wider, on the host.

        Empty except on the first replica's ranks. Collective over all ranks.
        """
        masters: dict[nn.Parameter, Tensor] = {}
        self.parking.check()
        self.sharded.settle()
        self.sharded.follow_weights()
        for bucket in self.reducer.all_buckets():
            whole = bucket.whole_masters()
            if self._groups.coordinate("data") == 0:
                masters.update({parameter: master.cpu() for parameter, master in whole.items()})
        return masters

    @property
    def loss_scale(self) -> float:
        """Factor of the losses in the current step."""
        return self.scaler.cur_scale if self.scaler is not None else 1.0

    @property
    def gradient_scale(self) -> Tensor:
        """Ratio of the reduced gradients to the optimizer's: the loss scale times the count of the losses, unless summed."""
        return self._count * (self.loss_scale / self._replicas_summed)

    @torch.no_grad()
    def reduce_scalars(self, own: LossShare) -> Tensor:
        """Return the batch's mean loss from all ranks' shares, and set grad_norm, with one all-reduce for both."""

        def counts(owners: tuple[int, ...]) -> bool:
            return self._model.placement[owners[0]] == self._model.stage_id

        scalars = torch.stack([own.total, own.count, self.reducer.norm_squared(counts, own.total.device)])
        all_reduce(scalars, self._groups.world).wait()
        self._counted, self._count = own.counted, countable(scalars[1])
        self.grad_norm = scalars[2].sqrt() / self.gradient_scale
        return (scalars[0] / self._count).to(torch.get_default_dtype())

    @torch.no_grad()
    def step(self, number: int) -> bool:
        """Run the optimizer's step unless gradients overflowed. Returns whether it ran.

        number: the step's number, for messages. The gradients are divided by the loss scale and clipped in the same pass. If
        overflows are checked, the host waits for the device once, if possible after everything is enqueued. Raises
        PrecisionError for an overflow at the lowest scale, ConfigError for a parameter that was frozen at `initialize` and
        no longer is.
        """
        self._refuse_unfrozen()
        assert self.grad_norm is not None
        if self._before_step is not None:
            self._before_step()
        finite = torch.isfinite(self.grad_norm) if self._checks_overflow else None
        untouched, counted = self._agreement.reach(self.reducer.sink.touched(), self._counted)
        divisor = self._divisor(self.grad_norm, finite, counted)
        if self.sharded.takes_scale():
            self.sharded.step(untouched, divisor, None if finite is None else ~finite)
            self.sharded.gather()
            overflow = finite is not None and not bool(finite)  # the host waits here, after everything is enqueued
        else:
            overflow = finite is not None and not bool(finite)
            if not overflow:
                self.sharded.step(untouched, divisor)
            self.sharded.gather()
        self._update_scale(number, overflow)
        return not overflow

    def _refuse_unfrozen(self) -> None:
        for info in self.frozen_infos:
            if info.parameter.requires_grad:
                raise ConfigError(
                    f"parameter {info.name} was frozen when initialize was called, so it has no gradient buffer or optimizer "
                    "state, but now requires a gradient; freeze it after initialize (without a gradient it is not changed)"
                )

    def _divisor(self, norm: Tensor, finite: Tensor | None, counted: bool) -> Tensor | None:
        """Return the divisor of the gradients, a scalar on the device; None for 1."""
        if self._clipping == 0 and self.scaler is None and not counted and self._replicas_summed == 1:
            return None
        divisor = self.gradient_scale
        if self._clipping > 0:
            divisor = divisor * ((norm + 1e-6) / self._clipping).clamp(min=1.0)
        # After an overflow the step is not applied, and the gradients are kept as they are, for inspection.
        return divisor if finite is None else torch.where(finite, divisor, 1.0)

    def _update_scale(self, number: int, overflow: bool) -> None:
        vars(self.optimizer)["overflow"] = overflow  # DeepSpeed's name
        if not self._checks_overflow:
            return
        scale = self.loss_scale
        if overflow:
            self.skipped_steps += 1
        try:
            if self.scaler is not None:
                self.scaler.update(overflow)
        finally:
            if overflow:
                self._warn_of_overflow(number, scale)

    def _warn_of_overflow(self, number: int, scale: float) -> None:
        """Warn on rank 0 which parameters' gradients overflowed, the last layers first, because the backward begins there.

        Collective: the norm is the same on every rank.
        """
        where = f"(stage {self._model.stage_id}, rank {self._groups.rank})"
        own = [(info.owners[0], info.name, where) for info in self.reducer.non_finite()[:_MAX_NAMES]]
        everywhere = chain(*all_gather_object(own, self._groups.control))
        if self._groups.rank != 0:
            return
        found: dict[str, str] = {}
        for _, name, where in sorted(everywhere, key=lambda place: -place[0]):
            found.setdefault(name, f"{name} {where}")
        change = f"; loss scale {scale:g} -> {self.loss_scale:g}" if self.scaler is not None else ""
        listed = ", ".join(list(found.values())[:_MAX_NAMES])
        warnings.warn(f"step {number} skipped: gradients overflow, first in {listed}{change}", stacklevel=2)
