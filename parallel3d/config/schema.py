"""The whole configuration. A field's description says what to give, and completes the error of a wrong value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, field_validator, model_validator

from parallel3d.config.monitors import (
    CometConfig,
    CommsLoggerConfig,
    CsvMonitorConfig,
    FlopsProfilerConfig,
    MlflowConfig,
    MonitorConfig,
    RunRecordConfig,
    TensorboardConfig,
    WandbConfig,
)
from parallel3d.config.pipeline import ActivationCheckpointingConfig, PipelineConfig, TensorParallelConfig
from parallel3d.config.precision import (
    AmpConfig,
    Bf16Config,
    DataTypesConfig,
    Fp8Config,
    Fp16Config,
    TorchAutocastConfig,
)
from parallel3d.config.section import (
    Dtype,
    LayerNames,
    NonEmpty,
    NonNegative,
    Params,
    Positive,
    ReadOnlyMapping,
    Section,
    key,
    own_key,
)
from parallel3d.config.zero import AioConfig, OffloadConfig, ZeroConfig


class OptimizerConfig(Section, keys="optimizer"):
    """The optimizer by name, and the arguments of its constructor."""

    type: NonEmpty = Field(description='the name of an optimizer, such as "AdamW"')
    params: Params = Field(
        default_factory=ReadOnlyMapping, description='a mapping of the optimizer\'s arguments, such as {"lr": 1e-3}'
    )

    @field_validator("params")
    @classmethod
    def _no_clipping(cls, params: Mapping[str, Any]) -> Mapping[str, Any]:
        if "max_grad_norm" in params:
            raise ValueError(
                "max_grad_norm is not an argument of an optimizer; set gradient_clipping to "
                f"{params['max_grad_norm']!r} at the top level instead"
            )
        return params


class SchedulerConfig(Section):
    """The learning-rate schedule by name, and the arguments of its constructor."""

    type: NonEmpty = Field(description='the name of a schedule, such as "WarmupLR"')
    params: Params = Field(
        default_factory=ReadOnlyMapping,
        description='a mapping of the schedule\'s arguments, such as {"warmup_num_steps": 100}',
    )


class CompileConfig(Section, keys="compile"):
    """torch.compile, layer by layer."""

    enabled: bool = own_key(False, "true or false")
    backend: str = own_key("inductor", "a backend of torch.compile")
    mode: str | None = own_key(None, "a mode of torch.compile, or null")
    options: Params = own_key(
        {}, 'a mapping of inductor\'s options, such as {"cpp_wrapper": true}; not with a mode', validate_default=True
    )
    dynamic: bool | None = own_key(
        None, "true for one graph for all shapes; else other shapes than the first run uncompiled"
    )
    layers: LayerNames = own_key(None, "class names, or a regular expression that is searched in them; null for all")
    cuda_graphs: bool | Literal["auto"] = own_key(
        "auto",
        "true or false, whether forwards and backwards are captured as CUDA graphs, whether or not they are compiled; or "
        '"auto": compiled ones, if schedule "auto" finds that the device waits for the host',
    )


AttentionBackend = Literal["cudnn", "flash", "efficient", "math"]
_QUOTED_BACKENDS = ", ".join(f'"{name}"' for name in get_args(AttentionBackend))


def _read_backends(value: object) -> object:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        return value
    return tuple(dict.fromkeys(names))


class AttentionConfig(Section):
    """PyTorch's kernels that compute scaled_dot_product_attention."""

    unset_by_auto = frozenset({"backend"})

    backend: Annotated[
        tuple[AttentionBackend, ...] | None,
        Field(min_length=1),
        BeforeValidator(_read_backends, json_schema_input_type=AttentionBackend | tuple[AttentionBackend, ...] | None),
    ] = own_key(None, f'"auto" for PyTorch\'s choice, or {_QUOTED_BACKENDS} or a list of them, the first choice first')


def _kernel(choice: str) -> Any:
    """Define the field of a kernel. choice: the meaning of true and false."""
    return own_key(False, f'{choice}, or "auto" for the default')


class KernelsConfig(Section, keys="kernels"):
    """The CUDA kernels of this package to use, where the hardware has what they need; `p3d doctor` shows where.

    All are off by default: they need a compiler, and make whole steps at most 5% shorter (docs/kernels.md).
    """

    unset_by_auto = frozenset({"all_reduce", "reduce_scatter", "optimizer_step"})

    all_reduce: bool = _kernel(
        "true to all-reduce among tensor-parallel ranks of one host by a kernel over NVLink, false for NCCL"
    )
    reduce_scatter: bool = _kernel(
        "true to reduce-scatter gradients among replicas of one host by a kernel over NVLink, false for NCCL"
    )
    optimizer_step: bool = _kernel(
        "true to run Adam and AdamW as one kernel that also writes the weights of all replicas of one host, false for torch's"
    )


class ElasticConfig(Section):
    """Restarts with another number of replicas, which keep the train batch by another number of micro-batches."""

    enabled: bool = own_key(False, "true or false")
    min_replicas: Positive = own_key(1, "a whole number >= 1: with fewer data-parallel replicas, training stops")


class RngConfig(Section):
    """Dependence of random numbers on the layout."""

    layout_independent: bool = own_key(
        False,
        "true or false, whether dropout on tensor-parallel ranks uses parts of one process's mask; each rank then draws the "
        "whole mask, and attention with dropout stores its probabilities",
    )


def _read_flag(value: object) -> object:
    return bool(value) if value in (0, 1) else value


def _capitalized(value: object) -> object:
    return value.capitalize() if isinstance(value, str) else value


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


TagValidation = Annotated[Literal["Ignore", "Warn", "Fail"], BeforeValidator(_capitalized, json_schema_input_type=str)]


class CheckpointConfig(Section, keys="checkpoint"):
    """Settings of engine.save_checkpoint."""

    tag_validation: TagValidation = key(
        "Warn",
        '"Ignore", "Warn" or "Fail", when ranks give different tags',
        differs="rank 0's is used, unless it is Fail",
    )
    keep_last: Positive | None = own_key(None, "a whole number of checkpoints >= 1 to keep, or null for all")
    async_save: bool = own_key(False, "true, to write while training continues, or false")
    timeout_s: float = own_key(1800.0, "a number of seconds > 0 that ranks wait for each other", gt=0)


class FailuresConfig(Section):
    """Detection and reports of failures. Timeouts: how long ranks may wait for one that doesn't move; 0: forever."""

    timeout_s: float = own_key(60.0, "seconds >= 0 after which a rank that holds up others is late, 0 for never", ge=0)
    first_step_timeout_s: float = own_key(
        600.0,
        "seconds >= 0 as failures.timeout_s, in the first step, where a compilation counts as a move; 0 for never",
        ge=0,
    )
    directory: NonEmpty = own_key(".", "the folder for failure-RANK.json")


def _none_for_never(value: object) -> object:
    return None if value == float("inf") else value


def _read_zero(value: object) -> object:
    """Read DeepSpeed's oldest form: true is stage 1, false is stage 0."""
    return {"stage": int(value)} if isinstance(value, bool) else value


_SAMPLES = "a whole number >= 1, or leave the key out to have it derived"


class Config(Section, keys="top level"):
    """The whole configuration; the keys keep DeepSpeed's names."""

    renamed: ClassVar[Mapping[str, str]] = {"bfloat16": "bf16"}
    unset_by_auto = frozenset({"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"})

    train_batch_size: Positive | None = key(None, _SAMPLES)
    train_micro_batch_size_per_gpu: Positive | None = key(None, _SAMPLES)
    gradient_accumulation_steps: Positive | None = key(None, _SAMPLES)
    gradient_clipping: float = key(
        0.0,
        "a number >= 0, where 0 turns clipping off",
        differs="off by default; the norm is the whole model's",
        ge=0,
    )
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], BeforeValidator(_lower, json_schema_input_type=str)] = key(
        "mean", '"mean" over the replicas, or "sum"'
    )
    strict: bool = own_key(False, "true or false: whether a key that is left out is an error and not a warning")
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    fp16: Fp16Config = Fp16Config()
    bf16: Bf16Config = Bf16Config()
    fp8: Fp8Config = Fp8Config()
    torch_autocast: TorchAutocastConfig = TorchAutocastConfig()
    amp: AmpConfig = AmpConfig()
    data_types: DataTypesConfig = DataTypesConfig()
    communication_data_type: Dtype | None = key(
        None, '"fp32", "bf16" or "fp16"', differs="the dtype in which gradients accumulate by default"
    )
    zero_optimization: Annotated[ZeroConfig, BeforeValidator(_read_zero, json_schema_input_type=ZeroConfig | bool)] = (
        ZeroConfig()
    )
    zero_allow_untested_optimizer: Annotated[bool, BeforeValidator(_read_flag, json_schema_input_type=bool | int)] = (
        False
    )
    aio: AioConfig = AioConfig()
    offload: OffloadConfig = OffloadConfig()
    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    attention: AttentionConfig = AttentionConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    compile: CompileConfig = CompileConfig()
    elastic: ElasticConfig = ElasticConfig()
    kernels: KernelsConfig = KernelsConfig()
    pipeline: PipelineConfig = PipelineConfig()
    tensor_parallel: TensorParallelConfig = TensorParallelConfig()
    failures: FailuresConfig = FailuresConfig()
    run_record: RunRecordConfig = RunRecordConfig()
    check_numerics: bool = own_key(
        False, "true or false: look for inf and NaN in what each layer returns, the loss and the gradients"
    )
    gc_freeze: bool = own_key(
        True,
        "true or false: on CUDA exclude the objects that exist after the first steps from Python's garbage collection, so "
        "that no rank pauses for it in the middle of a step",
    )
    dataloader_drop_last: bool = False
    dataloader_shuffle: bool | None = own_key(
        None,
        "true or false, whether the loader made of training_data shuffles; null: not for a pipeline, but for other modules",
    )
    seed: NonNegative = own_key(1234, "a whole number >= 0, which fixes the order of the training data")
    rng: RngConfig = RngConfig()
    steps_per_print: Annotated[Positive | None, BeforeValidator(_none_for_never)] = key(
        10, "a whole number of steps >= 1, or null or infinity to print nothing"
    )
    tensorboard: TensorboardConfig = TensorboardConfig()
    csv_monitor: CsvMonitorConfig = CsvMonitorConfig()
    wandb: WandbConfig = WandbConfig()
    comet: CometConfig = CometConfig()
    mlflow: MlflowConfig = MlflowConfig()
    monitor: MonitorConfig = MonitorConfig()
    flops_profiler: FlopsProfilerConfig = FlopsProfilerConfig()
    comms_logger: CommsLoggerConfig = CommsLoggerConfig()
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    dump_state: bool = False

    @property
    def has_monitors(self) -> bool:
        """Whether values of the steps are written anywhere."""
        sections = self.tensorboard, self.csv_monitor, self.wandb, self.comet, self.mlflow, self.run_record
        return any(section.enabled for section in sections)

    @property
    def cuda_graphs(self) -> bool | Literal["auto"]:
        """compile.cuda_graphs; "auto" is false unless all layers are compiled and schedule "auto" measures them."""
        measured = self.compile.enabled and self.compile.layers is None and self.pipeline.schedule == "auto"
        return self.compile.cuda_graphs if measured or self.compile.cuda_graphs != "auto" else False

    @property
    def monitor_config(self) -> Config:
        """This configuration, by the name with which DeepSpeed's scripts give it to MonitorMaster."""
        return self

    @model_validator(mode="after")
    def _fixed_batch(self) -> Config:
        if self.elastic.enabled and (self.train_batch_size is None or self.train_micro_batch_size_per_gpu is None):
            raise ValueError(
                "elastic keeps the train batch whatever the number of replicas; give train_batch_size and "
                "train_micro_batch_size_per_gpu, from which gradient_accumulation_steps follows"
            )
        return self

    @model_validator(mode="after")
    def _one_precision(self) -> Config:
        on = [name for name in ("fp16", "bf16", "torch_autocast", "amp") if getattr(self, name).enabled]
        # torch_autocast may be combined with bf16 or fp16 weights: it chooses the dtype of single operations.
        if len(on) > 1 and not ("torch_autocast" in on and "amp" not in on and len(on) == 2):
            raise ValueError(f"{' and '.join(on)} are enabled at once; set enabled to false in all of them but one")
        if self.fp8.enabled and (others := [name for name in on if name != "bf16"]):
            raise ValueError(
                f"fp8 replaces products of bf16 or fp32 weights, but {' and '.join(others)} is enabled; enable bf16 instead"
            )
        return self
