"""Hugging Face's Trainer for models in pipeline stages and tensor-parallel shards."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from parallel3d.comm.collectives import all_gather_into, all_gather_object, broadcast
from parallel3d.config import load_sections
from parallel3d.errors import ConfigError
from parallel3d.models.huggingface.pipeline import HuggingFacePipeline
from parallel3d.models.loss import IGNORED, SlicedLogits
from parallel3d.rng import generator_states, set_generator_states

_Trainer: Any = object


def _keeps_labels(model: Any) -> bool:
    """Return whether a model is one of transformers' that compute a cross entropy themselves, as BartForCausalLM does.

    All of these compare a position's logits with its own label. Others call their `loss_function`, which shifts labels.
    """
    kind = type(model.get_base_model() if hasattr(model, "peft_config") else model)
    return kind.__module__.startswith("transformers.") and "loss_function" not in unwrap(kind.forward).__code__.co_names


class PipelineTrainer(_Trainer):
    """Mixin by which a Trainer trains an unmodified model in any layout: `class T(PipelineTrainer, transformers.Trainer)`.

    The layout is that of `TrainingArguments(deepspeed=)` or `accelerate launch`: its `pipeline` and `tensor_parallel` sections
    and its ZeRO stage. The micro-batches of a step run together, as one train_batch. The loss is the mean over all tokens of
    a step. Raises ConfigError for arguments with which the results would differ from a Trainer's.
    """

    model: Any
    deepspeed: Any
    _pipelined: tuple[Any, HuggingFacePipeline] | None = None  # a model, and the pipeline made of it

    def __init__(self, *args: Any, **kwargs: Any):
        self._micro_batches: list[Any] = []
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False  # the loss counts its tokens by itself
        self._check_arguments()

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, whose batch sizes are those of this layout."""
        loaders = self.args.accelerator_config
        if loaders.dispatch_batches is None:
            loaders.dispatch_batches = False  # a rank's micro-batches are those of its replica
        super().create_accelerator_and_postprocess()
        if not self.is_deepspeed_enabled:
            raise ConfigError(
                "there is no configuration; give TrainingArguments(deepspeed=...), or use `accelerate launch`"
            )
        from accelerate.utils.deepspeed import HfDeepSpeedConfig

        # The Trainer fills in, and compares with, the train_batch_size of a world that is only data parallel. One that is
        # given is checked by initialize.
        source = self.args.deepspeed or os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
        filled: Any = self.accelerator.state.deepspeed_plugin.hf_ds_config
        if source == "none" or HfDeepSpeedConfig(source).get_value("train_batch_size") in (None, "auto"):
            self._deepspeed_config.pop("train_batch_size", None)
        # A plain Trainer clips. A configuration without the key would not.
        self._deepspeed_config.setdefault("gradient_clipping", self.args.max_grad_norm or 0.0)
        filled.mismatches = [text for text in filled.mismatches if not text.startswith("- ds train_batch_size=")]

    @property
    def _deepspeed_config(self) -> dict[str, Any]:
        config: dict[str, Any] = self.accelerator.state.deepspeed_plugin.hf_ds_config.config
        return config

    def _check_arguments(self) -> None:
        args = self.args
        refused = {
            "auto_find_batch_size": args.auto_find_batch_size,
            "save_on_each_node": args.save_on_each_node,
            "label_smoothing_factor": self.label_smoother is not None,
            "average_tokens_across_devices=False": not args.average_tokens_across_devices,
            "accelerator_config.dispatch_batches": args.accelerator_config.dispatch_batches,
            "train_sampling_strategy='batch_rebalance'": args.train_sampling_strategy == "batch_rebalance",
            # Its hook is the model's embedding's, of which tensor-parallel ranks may have a copy made before.
            "neftune_noise_alpha and tensor_parallel.size above 1": args.neftune_noise_alpha is not None
            and (load_sections(self._deepspeed_config, "tensor_parallel").tensor_parallel.size or 1) > 1,
            "compute_loss_func": self.compute_loss_func is not None,
            f"{type(self).__name__}.compute_loss": not type(self).compute_loss.__module__.startswith("transformers."),
            f"a {type(self.model).__name__}, whose loss isn't known to be a causal language model's (if it is, set "
            "model.loss_type = 'ForCausalLM')": not self._loss_shifts_labels,
            f"a {type(self.model).__name__}, whose loss compares each position with its own label": _keeps_labels(
                self.model
            ),
        }
        if given := [name for name, is_given in refused.items() if is_given]:
            raise ConfigError(
                f"PipelineTrainer can't train with {', '.join(given)}; leave it out, or use transformers.Trainer"
            )

    @property
    def pipeline(self) -> HuggingFacePipeline:
        """This rank's part of `model`. Collective at the first access."""
        if self._pipelined is None or self._pipelined[0] is not self.model:
            self._pipelined = self.model, HuggingFacePipeline(self.model, self._deepspeed_config)
        return self._pipelined[1]

    def get_tp_size(self) -> int:
        """Return the number of ranks that train on the same samples."""
        groups = self.pipeline.groups
        return groups.pipe.size * groups.model.size

    # Data

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return a loader of this replica's micro-batches."""
        state, groups = self.accelerator.state, self.pipeline.groups
        world = state.num_processes, state.process_index
        state.num_processes, state.process_index = groups.data.size, groups.coordinate("data")
        try:
            return super()._get_dataloader(*args, **kwargs)
        finally:
            state.num_processes, state.process_index = world

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> float:
        """Return this rank's share of the operations of a micro-batch."""
        return super().floating_point_ops(inputs) / self.get_tp_size()

    def _track_num_input_tokens(self, inputs: Mapping[str, Any]) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // self.get_tp_size()

    # Training

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """Make the optimizer and the engine of this rank's part of the model."""
        self._micro_batches = []
        model, pipeline = self.model, self.pipeline
        self.model = self.model_wrapped = pipeline
        states = generator_states(self.args.device)
        try:
            prepared = super()._prepare_for_training(*args, **kwargs)
        finally:
            self.model = model
        # The engine has restored the generators of a checkpoint. The Trainer does so later: its samplers must draw first.
        set_generator_states(states, self.args.device)
        self.callback_handler.model = model
        return prepared

    def training_step(self, model: Any, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Keep a micro-batch, and train on all of a step's at its last one; return the step's loss there, and 0 before."""
        self._micro_batches.append(self._prepare_inputs(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        # Only the step's micro-batches: earlier ones are of a step that the Trainer doesn't count, as the data ended within it.
        batch, self._micro_batches = self._micro_batches[-self.current_gradient_accumulation_steps :], []
        loss: Tensor = self.deepspeed.train_batch(iter(batch))
        return loss

    # Evaluation

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate, also before any training."""
        self._need_engine()
        return super().evaluation_loop(*args, **kwargs)

    def _need_engine(self) -> None:
        if self.deepspeed is None:
            trained = [parameter for parameter in self.pipeline.parameters() if parameter.requires_grad]
            self.deepspeed = self.model_wrapped = self.accelerator.prepare(self.pipeline)
            for parameter in trained:  # an engine without an optimizer freezes them
                parameter.requires_grad_(True)

    def prediction_step(
        self, model: Any, inputs: Mapping[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the loss of all replicas' micro-batches, and this replica's logits and labels, on every rank."""
        inputs = self._prepare_inputs(inputs)
        labels: Tensor | None = inputs.get("labels", inputs.get("shift_labels"))
        if labels is None and prediction_loss_only:
            return None, None, None
        if labels is not None:  # not of the samples that fill the last batch
            num_own = self._num_evaluated(labels, self.pipeline.groups.coordinate("data"))
            own = {name: inputs[name].clone() for name in ("labels", "shift_labels") if name in inputs}
            for given in own.values():
                given[num_own:] = IGNORED
            inputs = {**inputs, **own}
        result = self.deepspeed.eval_batch(
            iter([inputs]), return_logits=not prediction_loss_only, compute_loss=labels is not None, num_micro_batches=1
        )
        if prediction_loss_only:
            return result, None, None
        loss, logits = result if labels is not None else (None, result)
        return loss, self._on_all_stages(logits), labels

    def _on_all_stages(self, logits: list[Any] | None) -> Tensor:
        """Return the logits that ranks of the last stage have, on every rank."""
        groups = self.pipeline.groups
        own = torch.empty(0)
        if logits is not None:
            own = (logits[0].whole() if isinstance(logits[0], SlicedLogits) else logits[0]).float().contiguous()
        last = groups.pipe.ranks[self.pipeline.placement[-1]]
        shape = all_gather_object(list(own.shape), groups.control)[last]
        whole = own if logits is not None else torch.empty(shape, device=self.pipeline.device)
        broadcast(whole, last, groups.pipe)
        return whole

    @property
    def gather_function(self) -> Any:
        """Function that gathers each replica's tensors once, for the metrics, without the samples that fill the last batch."""
        return lambda tensors: tree_map_only(Tensor, self._of_replicas, tensors)

    @gather_function.setter
    def gather_function(self, function: Any) -> None:
        """Do nothing: accelerate's would gather a replica's tensors from each of its ranks."""

    def _of_replicas(self, tensor: Tensor) -> Tensor:
        data = self.pipeline.groups.data
        whole = tensor.new_empty((data.size * len(tensor), *tensor.shape[1:]))
        all_gather_into(whole, tensor.contiguous(), data).wait()
        return whole[: self._num_evaluated(tensor, 0)]

    def _num_evaluated(self, batch: Tensor, replica: int) -> int:
        """Return the number of samples in the batches of `replica` and later ones, without those that fill the last step."""
        state = self.accelerator.gradient_state
        last = state.end_of_dataloader and state.remainder > 0
        return max(0, state.remainder - replica * len(batch)) if last else sys.maxsize

    # Saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model as a directory that from_pretrained reads. Collective."""
        self._need_engine()
        weights = self.deepspeed._consolidated_16bit_state_dict()
        if self.args.should_save:  # _save of transformers 5.17 writes on every rank that calls it
            self._save(output_dir, state_dict=weights)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
