"""The configuration's sections. A field's description says what to give, and completes the error of a wrong value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    field_validator,
    model_validator,
)

from parallel3d.errors import nearest

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "zb-looped")
_QUOTED_SCHEDULES = ", ".join(f'"{name}"' for name in SCHEDULES)


class ReadOnlyMapping(Mapping[str, Any]):
    """A mapping without mutators, made of copies: mappings inside become read-only too, lists become tuples."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = {key: _read_only(value) for key, value in items.items()}

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


def _read_only(value: Any) -> Any:
    if isinstance(value, Mapping):
        return ReadOnlyMapping(value)
    return tuple(map(_read_only, value)) if isinstance(value, (list, tuple)) else value


def _dumped(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else value


def _whole(value: object) -> object:
    """5e8 -> 500000000; what is no whole number stays as it is, to be refused."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _read_params(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError('give a mapping of the optimizer\'s arguments, such as {"lr": 1e-3}')
    return ReadOnlyMapping(value)


def _read_schedule(value: object) -> object:
    if isinstance(value, (list, tuple)) and value and all(isinstance(rank, (list, tuple)) for rank in value):
        if all(isinstance(instruction, str) for rank in value for instruction in rank):
            return tuple(map(tuple, value))
    elif isinstance(value, str) and value in SCHEDULES:
        return value
    hint = nearest(value.lower(), SCHEDULES) if isinstance(value, str) else ""
    raise ValueError(
        f'give {_QUOTED_SCHEDULES} or, for each stage, its list of instructions such as ["F0@0", "B0@0"].{hint}'
    )


def _read_partition(value: object) -> object:
    if value == "best":
        return None  # DeepSpeed's default: whatever the module says
    if value is None or (isinstance(value, str) and value):
        return value
    if isinstance(value, Mapping) and set(value) == {"weights"}:
        weights = value["weights"]
        if isinstance(weights, (list, tuple)) and all(map(_is_number, weights)):
            return ReadOnlyMapping(value)
    elif isinstance(value, (list, tuple)):
        bounds = tuple(map(_whole, value))
        if all(_is_number(bound) and isinstance(bound, int) for bound in bounds):
            return bounds
    raise ValueError(
        'give "uniform", "parameters", "type:REGEX", bounds such as [0, 3, 8] or {"weights": [one number a layer]}'
    )


def _read_checkpointable(value: object) -> object:
    if value is None or (isinstance(value, str) and value):
        return value
    if isinstance(value, (list, tuple)) and value and all(isinstance(name, str) for name in value):
        return tuple(value)
    raise ValueError('give a regular expression such as "Block|MLP", or a list of class names such as ["Block"]')


Positive = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
NonNegative = Annotated[int, Field(ge=0), BeforeValidator(_whole)]
Params = Annotated[Mapping[str, Any], PlainValidator(_read_params), PlainSerializer(_dumped)]
Schedule = Annotated[str | tuple[tuple[str, ...], ...], PlainValidator(_read_schedule)]
Partition = Annotated[
    str | tuple[int, ...] | Mapping[str, Any] | None, PlainValidator(_read_partition), PlainSerializer(_dumped)
]
Checkpointable = Annotated[str | tuple[str, ...] | None, PlainValidator(_read_checkpointable)]
_BOOL = "true or false"


class Section(BaseModel):
    """A mapping of the file: immutable, typed strictly, closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    # DeepSpeed's keys that change no number here: known, and named in one warning.
    without_effect: ClassVar[frozenset[str]] = frozenset()
    # DeepSpeed's keys that would change the numbers: refused unless off, or one of these values, which hold anyway.
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    # Keys for which "auto" means: not given.
    unset_by_auto: ClassVar[frozenset[str]] = frozenset()


class OptimizerConfig(Section):
    """The optimizer by name, and the arguments of its constructor."""

    without_effect = frozenset({"legacy_fusion"})

    type: str = Field(min_length=1, description='the name of an optimizer, such as "AdamW"')
    params: Params = Field(ReadOnlyMapping({}), description="a mapping of the optimizer's arguments")


class Fp16Config(Section):
    """Training in float16."""

    without_effect = frozenset(
        {
            "auto_cast",
            "consecutive_hysteresis",
            "fp16_master_weights_and_grads",
            "fused_mode",
            "hysteresis",
            "initial_scale_power",
            "loss_scale",
            "loss_scale_window",
            "min_loss_scale",
        }
    )

    enabled: bool = Field(False, description="false")

    @field_validator("enabled")
    @classmethod
    def _not_yet(cls, enabled: bool) -> bool:
        if enabled:
            raise ValueError("not yet supported; set it to false, and bf16.enabled to true for half precision")
        return enabled


class Bf16Config(Section):
    """Training in bfloat16."""

    without_effect = frozenset(
        {"bf16_master_weights_and_grads", "bf16_optimizer_states", "check_grad_overflow", "immediate_grad_update"}
    )

    enabled: bool = Field(False, description="true or false")


ReducedDtype = Literal["fp32", "bf16"]


class DataTypesConfig(Section):
    """Dtypes that are chosen apart from the weights'."""

    grad_accum_dtype: ReducedDtype | None = Field(None, description='"fp32" or "bf16"')


class ZeroConfig(Section):
    """What is partitioned over the data-parallel ranks, and how gradients are bucketed."""

    without_effect = frozenset(
        {
            "allgather_partitions",
            "contiguous_gradients",
            "cpu_offload",
            "cpu_offload_param",
            "cpu_offload_use_pin_memory",
            "elastic_checkpoint",
            "enable_sanity_checks",
            "ignore_unused_parameters",
            "leaf_module",
            "legacy_stage1",
            "load_from_fp32_weights",
            "log_trace_cache_warnings",
            "memory_efficient_linear",
            "mics_hierarchical_params_gather",
            "mics_shard_size",
            "offload_optimizer",
            "offload_param",
            "overlap_comm",
            "override_module_apply",
            "pipeline_loading_checkpoint",
            "reduce_scatter",
            "round_robin_gradients",
            "save_muon_momentum_buffer_in_memory",
            "stage3_allgather_sequential",
            "stage3_gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_model_persistence_threshold",
            "stage3_module_granularity_threshold",
            "stage3_param_persistence_threshold",
            "stage3_partition_stream_chunk_size",
            "stage3_prefetch_bucket_size",
            "stage3_use_all_reduce_for_fetch_params",
            "sub_group_size",
            "use_multi_rank_bucket_allreduce",
            "zero_hpz_partition_size",
            "zero_quantized_gradients",
            "zero_quantized_nontrainable_weights",
            "zero_quantized_weights",
            "zeropp_loco_param",
        }
    )
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"zenflow": ()}
    unset_by_auto = frozenset({"reduce_per_micro_batch"})

    stage: NonNegative = Field(0, description="0, 1 or 2")
    reduce_bucket_size: Positive = Field(500_000_000, description="a whole number of elements >= 1, such as 5e8")

    allgather_bucket_size: Positive = Field(500_000_000, description="a whole number of elements >= 1, such as 5e8")
    reduce_per_micro_batch: bool | Literal["auto"] = Field("auto", description='true, false or "auto"')

    @field_validator("stage")
    @classmethod
    def _not_yet(cls, stage: int) -> int:
        if stage > 2:
            raise ValueError("not yet supported; set stage to 0, 1 or 2")
        return stage

    @model_validator(mode="after")
    def _consistent(self) -> ZeroConfig:
        if self.reduce_per_micro_batch is True and self.stage < 2:
            raise ValueError(
                f"reduce_per_micro_batch needs partitioned gradients, but stage is {self.stage}; set stage to 2, or "
                'reduce_per_micro_batch to "auto"'
            )
        return self


class ActivationCheckpointingConfig(Section):
    """How layers that are recomputed keep their inputs; which layers: pipeline.activation_checkpoint_interval."""

    partition_activations: bool = Field(False, description=_BOOL)
    contiguous_memory_optimization: bool = Field(False, description=_BOOL)
    cpu_checkpointing: bool = Field(False, description=_BOOL)
    number_checkpoints: Positive | None = Field(None, description="a whole number of checkpoints >= 1, or null")
    synchronize_checkpoint_boundary: bool = Field(False, description=_BOOL)
    profile: bool = Field(False, description=_BOOL)


class PipelineConfig(Section):
    """How layers become stages, and in which order the stages work; None: as PipelineModule says."""

    without_effect = frozenset({"grad_partitioned", "pipe_partitioned"})
    unset_by_auto = frozenset({"stages"})

    stages: Positive | None = Field(None, description="a whole number of stages >= 1")
    schedule: Schedule = Field("1f1b", description=f"{_QUOTED_SCHEDULES} or lists of instructions")
    num_chunks: Positive | None = Field(None, description="a whole number of chunks a stage >= 1")
    placement: Literal["loop", "v"] | None = Field(None, description='"loop" or "v"')
    partition: Partition = Field(None, description='a method such as "parameters", bounds or weights')
    activation_checkpoint_interval: NonNegative | None = Field(
        None, description="a whole number of layers >= 0, where 0 recomputes nothing"
    )
    checkpointable_layers: Checkpointable = Field(None, description="a regular expression or a list of class names")
    max_in_flight: float | None = Field(
        None, gt=0, description='a number > 0, the activations that "zb-looped" may hold as a multiple of "1f1b"\'s'
    )
    shapes: Literal["static", "dynamic"] = Field("static", description='"static" or "dynamic"')
    seed_layers: bool | None = Field(None, description="true or false")

    @model_validator(mode="after")
    def _consistent(self) -> PipelineConfig:
        others = {"1f1b": '"interleaved" or "gpipe"', "zb-h1": '"zb-looped"'}
        if self.schedule in others and self.num_chunks not in (None, 1):
            raise ValueError(
                f'schedule "{self.schedule}" runs 1 chunk a stage, but num_chunks is {self.num_chunks}; set schedule to '
                f"{others[self.schedule]}, or num_chunks to 1"
            )
        others = {"interleaved": '"gpipe"', "zb-looped": '"zbv"'}
        if self.schedule in others and self.placement == "v":
            raise ValueError(
                f'schedule "{self.schedule}" needs placement "loop"; set that, or schedule to {others[self.schedule]}'
            )
        if self.schedule == "zbv" and (self.num_chunks not in (None, 2) or self.placement not in (None, "v")):
            raise ValueError(
                f'schedule "zbv" needs num_chunks 2 and placement "v", but num_chunks is {self.num_chunks} and placement '
                f'is {self.placement!r}; set both, or schedule to "zb-looped"'
            )
        if self.placement == "v" and self.num_chunks not in (None, 2):
            raise ValueError(
                f'placement "v" puts 2 chunks on each stage, but num_chunks is {self.num_chunks}; set num_chunks to 2, '
                'or placement to "loop"'
            )
        if self.max_in_flight is not None and self.schedule != "zb-looped":
            raise ValueError(
                'max_in_flight bounds schedule "zb-looped"; set schedule to that, or leave max_in_flight out'
            )
        if isinstance(self.schedule, tuple) and self.stages not in (None, len(self.schedule)):
            raise ValueError(
                f"schedule lists instructions for {len(self.schedule)} stages, but stages is {self.stages}; give one "
                "list a stage"
            )
        return self


_SAMPLES = "a whole number >= 1, or leave the key out to have it derived"


class Config(Section):
    """The whole configuration; the keys keep DeepSpeed's names."""

    without_effect = frozenset(
        {
            "aio",
            "checkpoint",
            "comet",
            "comms_logger",
            "compile",
            "csv_monitor",
            "datastates",
            "disable_allgather",
            "flops_profiler",
            "gradient_predivide_factor",
            "graph_harvesting",
            "log_level",
            "nebula",
            "prescale_gradients",
            "sparse_gradients",
            "tensorboard",
            "timers",
            "use_data_before_expert_parallelism",
            "vocabulary_size",
            "wandb",
            "zero_force_ds_cpu_optimizer",
        }
    )
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "amp": (),
        "autotuning": (),
        "bfloat16": (),
        "compression_training": (),
        "curriculum_learning": (),
        "data_efficiency": (),
        "eigenvalue": (),
        "elasticity": (),
        "expert_parallel": (),
        "gradient_allreduce_op": ("mean",),
        "hybrid_engine": (),
        "progressive_layer_drop": (),
        "quantize_training": (),
        "scheduler": (),
        "seq_parallel_comm_data_type": ("fp32",),
        "sequence_parallel_size": (1,),
        "sparse_attention": (),
        "tensor_parallel": (),
        "torch_autocast": (),
        "weight_quantization": (),
    }
    unset_by_auto = frozenset({"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"})

    train_batch_size: Positive | None = Field(None, description=_SAMPLES)
    train_micro_batch_size_per_gpu: Positive | None = Field(None, description=_SAMPLES)
    gradient_accumulation_steps: Positive | None = Field(None, description=_SAMPLES)
    gradient_clipping: float = Field(0.0, ge=0, description="a number >= 0, where 0 turns clipping off")
    steps_per_print: Positive | None = Field(10, description="a whole number of steps >= 1, or null to print nothing")
    seed: NonNegative = Field(1234, description="a whole number >= 0, which fixes the order of the training data")
    optimizer: OptimizerConfig | None = Field(None, description='a mapping {"type": ..., "params": {...}}')
    fp16: Fp16Config = Field(Fp16Config(), description='a mapping {"enabled": false}')
    bf16: Bf16Config = Field(Bf16Config(), description='a mapping {"enabled": false}')
    zero_optimization: ZeroConfig = Field(ZeroConfig(), description='a mapping {"stage": 0}')
    zero_allow_untested_optimizer: bool = Field(False, description="true or false")
    communication_data_type: ReducedDtype | None = Field(None, description='"fp32" or "bf16"')
    data_types: DataTypesConfig = Field(DataTypesConfig(), description='a mapping {"grad_accum_dtype": "fp32"}')
    dataloader_drop_last: bool = Field(False, description="true or false")
    activation_checkpointing: ActivationCheckpointingConfig = Field(
        ActivationCheckpointingConfig(), description='a mapping such as {"cpu_checkpointing": true}'
    )
    wall_clock_breakdown: bool = Field(False, description=_BOOL)
    memory_breakdown: bool = Field(False, description=_BOOL)
    dump_state: bool = Field(False, description=_BOOL)
    pipeline: PipelineConfig = Field(PipelineConfig(), description='a mapping such as {"stages": 2}')


def section_of(annotation: object) -> type[Section] | None:
    """The Section that a field's annotation is, or is when not None; None for a plain field."""
    for candidate in (annotation, *get_args(annotation)):
        if get_origin(candidate) is None and isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None
