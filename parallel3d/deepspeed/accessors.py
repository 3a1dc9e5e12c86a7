"""Engine with the other methods and attributes of DeepSpeed's engine."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from parallel3d.activity import Phase
from parallel3d.checkpoint.export import SINGLE
from parallel3d.comm.environment import get_local_rank
from parallel3d.comm.groups import PipelineParallelGrid
from parallel3d.deepspeed.outputs import WritingEngine
from parallel3d.engine.state import Location
from parallel3d.engine.step import evaluating
from parallel3d.errors import ConfigError
from parallel3d.models.generation import generate
from parallel3d.models.huggingface.export import whole_module_state, whole_state_dict
from parallel3d.models.huggingface.pipeline import HuggingFacePipeline
from parallel3d.pipe.batch import make_loader
from parallel3d.pipe.data import RepeatingLoader


class DeepSpeedEngine(WritingEngine):
    """The engine that `initialize` returns, with DeepSpeed's accessors of configuration, ranks and progress."""

    # Configuration

    def train_batch_size(self) -> int:
        """Return the number of samples of one step, over all replicas."""
        return self.data.sizes.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the number of samples of one micro-batch of one replica."""
        return self.data.sizes.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Return the number of micro-batches of one step of one replica."""
        return self.data.sizes.num_micro_batches

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return (train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps)."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of samples of a step from the next step on, by the number of its micro-batches.

        Raises ConfigError if it is no multiple of a micro-batch of all replicas, and between the micro-batches of a step.
        """
        self.data.set_train_batch_size(train_batch_size, self.progress.num_backwards)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the number of samples of a micro-batch; a step has as many micro-batches as before. Raises ConfigError."""
        self.data.set_micro_batch_size(micro_batch_size)

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Sampler[Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """Return a loader of micro-batches: for route "train" without a sampler, as `initialize` makes it of training_data.

        Otherwise the loader yields all samples, in the order of the sampler or the dataset. batch_size: the micro-batch size by
        default. Only such a loader has workers: with others, workers would read ahead of the position that a checkpoint saves.
        """
        size = batch_size or self.train_micro_batch_size_per_gpu()
        if data_sampler is None and route == "train":
            if num_local_io_workers:
                warnings.warn(
                    f"num_local_io_workers={num_local_io_workers} is not used: a loader whose position is saved reads in this "
                    "process; for workers, give data_sampler=, or engine.set_dataloader a DataLoader of your own",
                    stacklevel=2,
                )
            sizes = replace(self.data.sizes, micro_batch_size=size)
            return make_loader(self.pipeline_module, dataset, sizes, self.config, collate_fn, pin_memory)
        pins = pin_memory and self.device.type == "cuda"
        options: dict[str, Any] = {"sampler": data_sampler, "collate_fn": collate_fn, "pin_memory": pins}
        return DataLoader(dataset, size, num_workers=num_local_io_workers or 0, **options)

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Take micro-batches from `iterator` when train_batch gets none."""
        self.data.use_iterator(iterator)

    def set_dataloader(self, loader: Any) -> None:
        """Take micro-batches from `loader`, repeatedly, when train_batch gets no iterator."""
        self.data.use_iterator(RepeatingLoader(loader))

    @property
    def training_dataloader(self) -> Any:
        """The loader that `initialize` made of training_data, or that set_dataloader was given; None without one."""
        return getattr(self.data.iterator, "loader", None)

    def set_batch_fn(self, function: Callable[[Any], Any]) -> None:
        """Make (inputs, labels) by function(item) from each item that an iterator yields."""
        self.data.use_batch_fn(function)

    def gradient_clipping(self) -> float:
        """Return the maximum gradient norm; 0 for no limit."""
        return self.config.gradient_clipping

    def zero_optimization(self) -> bool:
        """Return whether optimizer state is partitioned."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        """Return the ZeRO stage, 0 to 3."""
        return self.update.policy.stage

    def fp16_enabled(self) -> bool:
        """Return whether the weights are float16."""
        return self.update.policy.weight_dtype is torch.float16

    def bfloat16_enabled(self) -> bool:
        """Return whether the weights are bfloat16."""
        return self.update.policy.weight_dtype is torch.bfloat16

    def dynamic_loss_scale(self) -> bool:
        """Return whether the loss scale adapts."""
        return self.update.scaler is not None and self.update.scaler.dynamic_loss_scale

    def steps_per_print(self) -> int | None:
        """Return the number of steps between two printed lines; None if nothing is printed."""
        return self.config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Return whether the printed lines have the parts of the step's time; see `reports.time_breakdown`."""
        return self.config.wall_clock_breakdown

    def optimizer_name(self) -> str | None:
        """Return the configuration's name of the optimizer; None without one."""
        return self.config.optimizer.type if self.config.optimizer is not None else None

    def scheduler_name(self) -> str | None:
        """Return the configuration's name of the learning-rate schedule; None without one."""
        return self.config.scheduler.type if self.config.scheduler is not None else None

    @property
    def is_compiled(self) -> bool:
        """Whether layers are compiled."""
        return self.compilation.is_compiled

    # Ranks

    def is_first_stage(self) -> bool:
        """Return whether this rank holds the first chunk, and so needs inputs."""
        return self.pipeline_module.placement[0] == self.pipeline_module.stage_id

    def is_last_stage(self) -> bool:
        """Return whether this rank holds the last chunk, and so needs labels and has the loss and the logits."""
        return self.pipeline_module.placement[-1] == self.pipeline_module.stage_id

    def get_pipeline_parallel_rank(self) -> int:
        """Return this rank's stage."""
        return self.process_groups.coordinate("pipe")

    def get_data_parallel_rank(self) -> int:
        """Return this rank's data-parallel rank."""
        return self.process_groups.coordinate("data")

    def get_model_parallel_rank(self) -> int:
        """Return this rank's tensor-parallel rank."""
        return self.process_groups.coordinate("model")

    @property
    def grid(self) -> PipelineParallelGrid:
        """Process groups of this rank, with DeepSpeed's names."""
        return PipelineParallelGrid(groups=self.process_groups)

    mpu = grid  # DeepSpeed's other name

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.process_groups.world.size

    @property
    def dp_world_size(self) -> int:
        """Number of data-parallel replicas."""
        return self.process_groups.data.size

    @property
    def mp_world_size(self) -> int:
        """Number of tensor-parallel ranks."""
        return self.process_groups.model.size

    @property
    def data_parallel_group(self) -> Any:
        """Torch's group of this rank's replicas; None for a single one."""
        return self.grid.get_data_parallel_group()

    @property
    def global_rank(self) -> int:
        """This process's rank in the world."""
        return self.process_groups.rank

    @property
    def local_rank(self) -> int:
        """This process's rank on its host."""
        return get_local_rank()

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self.pipeline_module.device

    # Progress

    @property
    def global_steps(self) -> int:
        """Number of steps so far, skipped ones included."""
        return self.progress.global_steps

    @global_steps.setter
    def global_steps(self, steps: int) -> None:
        self.progress.load_state_dict({"global_steps": steps})

    @property
    def global_samples(self) -> int:
        """Number of samples trained on so far, over all replicas."""
        return self.progress.global_samples

    @global_samples.setter
    def global_samples(self, samples: int) -> None:
        self.progress.load_state_dict({"global_samples": samples})

    @property
    def micro_steps(self) -> int:
        """Number of calls of `step` so far, one for each micro-batch."""
        return self.progress.micro_steps

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped because gradients overflowed."""
        return self.update.skipped_steps

    def was_step_applied(self) -> bool:
        """Return whether the last `step` or train_batch changed the weights: not between boundaries, nor if it was skipped."""
        return self.progress.applied

    def get_global_grad_norm(self) -> Tensor | None:
        """Return the 2-norm of the whole model's gradient in the last step, before clipping: a scalar on the device."""
        return self.update.grad_norm

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [group["lr"] for group in self.update.optimizer.param_groups]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all parameter groups; a schedule changes it at the next step."""
        for group in self.update.optimizer.param_groups:
            group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """Return the momentum, or betas, of each parameter group."""
        return [group.get("betas", group.get("momentum", 0.0)) for group in self.update.optimizer.param_groups]

    def loss_scale(self) -> float:
        """Return the factor of losses in the current step; 1 without scaling."""
        return self.update.loss_scale

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale, for `engine.scale(loss).backward()`; without float16 loss.backward() does.

        Raises ConfigError for a tensor of more than one element.
        """
        return self._calls.scale(loss)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the following micro-batches end a step, instead of counting gradient_accumulation_steps."""
        self.progress.set_boundary(is_boundary)

    def zero_grad(self) -> None:
        """Drop the gradients added since the last step.

        The `zero_grad` of the optimizer or the module drops none: scripts may call it once for each micro-batch.
        """
        self.progress.forget()

    def save_16bit_model(
        self, save_dir: Location, save_filename: str = SINGLE, exclude_frozen_parameters: bool = False
    ) -> bool:
        """Save the weights that the layers compute with, in their dtype, as one file; return True.

        It is a safetensors file, or one for torch.load if save_filename ends otherwise, as in "pytorch_model.bin". Tensors have
        the names that the model gives them. Collective. Raises CheckpointError on all ranks.
        """
        return self.checkpoints.save_16bit_model(save_dir, save_filename, exclude_frozen_parameters)

    save_fp16_model = save_16bit_model  # DeepSpeed's old name

    def _get_optimizer_ckpt_name(self, checkpoints_path: str, tag: str, expp_rank: int = 0) -> str:
        return f"{checkpoints_path}/{tag}/rank{self.global_rank:05}-00.safetensors"  # DeepSpeed's tests ask for it

    # Memory between steps

    def offload_states(
        self,
        include: Collection[str] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move state of the training to the host until reload_states, so that its memory on the device is free, as to generate.

        - include: some of OffloadStateTypeEnum, or None for all: "lp_params" (the layers' weights), "hp_params" (masters),
          "optim_states", "lp_grads" and "contiguous_grad_buffer" (both: accumulated gradients).
        - device: "cpu". non_blocking: is accepted; the state is on the host when this returns.

        Until then, what needs state on the host raises ExecutionError. Raises ConfigError.
        """
        if device != "cpu":
            raise ConfigError(f"offload_states can't move state to device {device!r}; give 'cpu'")
        self.update.parking.offload(include, pin_memory)
        self._runner.forget_graphs()

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move what offload_states has moved back to the device."""
        self.update.parking.reload()

    def destroy(self) -> None:
        """Free gradients, master weights and optimizer state. The weights stay; the engine can't be used any more."""
        if "update" in vars(self):
            self.monitor.flush()
            self.update.release()
            kept = {"module": self.module, "config": self.config}
            vars(self).clear()
            vars(self).update(kept)
            gc.collect()

    # Generation

    def generate(self, *inputs: Any, **options: Any) -> Tensor:
        """Return the prompts and the tokens that follow them, [batch, seq + new], on every rank.

        For a model that is no list of layers, all arguments go to its own `generate`, with synced_gpus at ZeRO-3. Otherwise
        every rank of a replica passes the same arguments, which have transformers' names:

        - input_ids: the prompts [batch, seq].
        - max_new_tokens: most tokens to append, the same on all replicas.
        - attention_mask: [batch, seq], 0 at padding, which is on the left.
        - do_sample (False): draw tokens, instead of taking the likeliest. temperature (1.0): divides the logits. top_k (None),
          top_p (1.0): draw only from the k likeliest tokens, or from the likeliest with a total probability of p.
        - eos_token_id: one or several tokens that end a sequence; pad_token_id follows. Generation ends when all have ended.
        - seed: seed of the drawn tokens, which differ between replicas; by default torch's generator draws it.

        Keys and values are kept: each step runs only the new token. Collective. Raises ConfigError on all ranks.
        """
        self.reports.monitor.pause()
        together = self.update.policy.stage == 3 and self.dp_world_size > 1
        if self.module is not self.pipeline_module:
            own: Any = self.module
            if together and hasattr(own, "generation_config"):  # a model of transformers
                options = {"synced_gpus": True, **options}
            return own.generate(*inputs, **options)
        self.update.parking.check("lp_params")
        with self._attributing(Phase.EVALUATING), evaluating(self.pipeline_module):
            return generate(self.pipeline_module, self._runner.output_of, together, inputs, options)

    # Whole weights (ZeRO-3)

    def empty_partition_cache(self) -> None:
        """Do nothing: weights are released as soon as a layer has run."""

    sparse_tensor_module_names: frozenset[str] = frozenset()  # gradients are reduced as dense tensors

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Return True: whole weights can always be saved."""
        return True

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Return the module's state_dict with whole weights in their dtype, in host memory, on rank 0; None on the others.

        A model in several stages must have layers of `from_hf`, and its weights get Hugging Face's names. Collective. Raises
        CheckpointError for other layers.
        """
        self.update.parking.check("lp_params")
        if isinstance(self.module, HuggingFacePipeline) or self.pipeline_module.num_stages > 1:
            return whole_state_dict(self.pipeline_module, exclude_frozen_parameters)
        return whole_module_state(self.module, self.process_groups, exclude_frozen_parameters)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict


class PipelineEngine(DeepSpeedEngine):
    """The engine of a PipelineModule."""
