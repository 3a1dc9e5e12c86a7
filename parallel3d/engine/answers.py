"""What scripts ask an engine: DeepSpeed's names for what is configured, and for how far the training is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.comm.environment import get_local_rank
from parallel3d.comm.groups import PipelineParallelGrid, ProcessGroups
from parallel3d.config import BatchSizes, Config
from parallel3d.engine.update import WeightUpdate
from parallel3d.pipe.module import PipelineModule


class ConfigAnswers:
    """What is configured."""

    config: Config
    _batch_sizes: BatchSizes
    _update: WeightUpdate

    def train_batch_size(self) -> int:
        """Samples of one step, over all replicas."""
        return self._batch_sizes.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one micro-batch of one replica."""
        return self._batch_sizes.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one step of one replica."""
        return self._batch_sizes.num_micro_batches

    def get_batch_info(self) -> tuple[int, int, int]:
        """train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def gradient_clipping(self) -> float:
        """The largest gradient norm; 0 without a limit."""
        return self.config.gradient_clipping

    def zero_optimization(self) -> bool:
        """Whether optimizer state is partitioned."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        """0, 1 or 2: what runs (stage 3 runs as 2)."""
        return self._update.policy.stage

    def fp16_enabled(self) -> bool:
        """Whether the weights are float16."""
        return self._update.policy.weight_dtype is torch.float16

    def bfloat16_enabled(self) -> bool:
        """Whether the weights are bfloat16."""
        return self._update.policy.weight_dtype is torch.bfloat16

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale adapts."""
        return self._update.scaler is not None and self._update.scaler.dynamic

    def steps_per_print(self) -> int | None:
        """Steps between two printed lines; None to print nothing."""
        return self.config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Whether the printed lines say where the time went; `time_breakdown` tells."""
        return self.config.wall_clock_breakdown

    def optimizer_name(self) -> str | None:
        """As the configuration has it; None where it names none."""
        return self.config.optimizer.type if self.config.optimizer is not None else None

    def scheduler_name(self) -> str | None:
        """As the configuration has it; None where it names none."""
        return self.config.scheduler.type if self.config.scheduler is not None else None


class PlaceAnswers:
    """Where this rank is."""

    grid: PipelineParallelGrid
    _model: PipelineModule
    _groups: ProcessGroups

    def is_first_stage(self) -> bool:
        """Whether this rank holds the first chunk, and so needs inputs."""
        return self._model.placement[0] == self._model.stage_id

    def is_last_stage(self) -> bool:
        """Whether this rank holds the last chunk, and so needs labels and has the loss and the logits."""
        return self._model.placement[-1] == self._model.stage_id

    def get_pipeline_parallel_rank(self) -> int:
        """This rank's stage."""
        return self._groups.coordinate("pipe")

    def get_data_parallel_rank(self) -> int:
        """Position along data parallelism."""
        return self._groups.coordinate("data")

    def get_model_parallel_rank(self) -> int:
        """Position along tensor slicing."""
        return self._groups.coordinate("model")

    @property
    def mpu(self) -> PipelineParallelGrid:
        """The process groups of this rank, by DeepSpeed's names."""
        return self.grid

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self._groups.world.size

    @property
    def dp_world_size(self) -> int:
        """Number of data-parallel replicas."""
        return self._groups.data.size

    @property
    def mp_world_size(self) -> int:
        """Number of tensor slices."""
        return self._groups.model.size

    @property
    def global_rank(self) -> int:
        """This process's rank in the world."""
        return self._groups.rank

    @property
    def local_rank(self) -> int:
        """This process's rank on its host."""
        return get_local_rank()

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._model.device


class Answers(ConfigAnswers, PlaceAnswers):
    """How far the training is."""

    optimizer: torch.optim.Optimizer
    _step_applied: bool

    def get_global_grad_norm(self) -> Tensor | None:
        """2-norm of the last step's gradient before clipping, of the whole model; a scalar on the device, the same on all."""
        return self._update.grad_norm

    def master_weights(self) -> dict[nn.Parameter, Tensor]:
        """What the optimizer updates, whole, in fp32 or wider, of this rank's trainable parameters; on the host.

        Of the first replica's ranks alone, empty elsewhere. Collective over all ranks.
        """
        masters: dict[nn.Parameter, Tensor] = {}
        for bucket in self._update.reducer.all_buckets():
            whole = bucket.whole_masters()
            if self._groups.coordinate("data") == 0:
                masters.update({parameter: master.cpu() for parameter, master in whole.items()})
        return masters

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """The momentum, or betas, of each parameter group."""
        return [group.get("betas", group.get("momentum", 0.0)) for group in self.optimizer.param_groups]

    def loss_scale(self) -> float:
        """By which losses are multiplied in the step under way; 1 without scaling."""
        return self._update.loss_scale

    @property
    def skipped_steps(self) -> int:
        """Steps that overflowed, so that nothing moved."""
        return self._update.skipped_steps

    def was_step_applied(self) -> bool:
        """Whether the last call of `step`, or of train_batch, moved the weights: neither between boundaries, nor skipped."""
        return self._step_applied
