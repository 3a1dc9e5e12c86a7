"""The whole configuration. A field's description says what to give, and completes the error of a wrong value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field, model_validator

from parallel3d.config.deepspeed_keys import TOP_LEVEL
from parallel3d.config.pipeline import PipelineConfig, TensorParallelConfig
from parallel3d.config.precision import AmpConfig, Bf16Config, DataTypesConfig, Fp16Config, TorchAutocastConfig
from parallel3d.config.section import OWN, Dtype, KnownKey, NonNegative, Positive, Section, differs
from parallel3d.config.training import (
    ActivationCheckpointingConfig,
    AttentionConfig,
    CheckpointConfig,
    CompileConfig,
    ElasticConfig,
    FailuresConfig,
    KernelsConfig,
    OptimizerConfig,
    RngConfig,
    RunRecordConfig,
    SchedulerConfig,
)
from parallel3d.config.zero import ZeroConfig


def _read_zero(value: object) -> object:
    """DeepSpeed's oldest form: true is stage 1, false is stage 0."""
    return {"stage": int(value)} if isinstance(value, bool) else value


_BOOL = "true or false"
_SAMPLES = "a whole number >= 1, or leave the key out to have it derived"
_OFF = 'a mapping {"enabled": false}'


class Config(Section):
    """The whole configuration; the keys keep DeepSpeed's names."""

    known_keys: ClassVar[Mapping[str, KnownKey]] = TOP_LEVEL
    renamed: ClassVar[Mapping[str, str]] = {"bfloat16": "bf16"}
    unset_by_auto = frozenset({"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"})

    train_batch_size: Positive | None = Field(None, description=_SAMPLES)
    train_micro_batch_size_per_gpu: Positive | None = Field(None, description=_SAMPLES)
    gradient_accumulation_steps: Positive | None = Field(None, description=_SAMPLES)
    gradient_clipping: float = Field(
        0.0,
        ge=0,
        description="a number >= 0, where 0 turns clipping off",
        json_schema_extra=differs("off by default; the norm is the whole model's"),
    )
    optimizer: OptimizerConfig | None = Field(None, description='a mapping {"type": ..., "params": {...}}')
    scheduler: SchedulerConfig | None = Field(None, description='a mapping {"type": ..., "params": {...}}')
    fp16: Fp16Config = Field(Fp16Config(), description=_OFF)
    bf16: Bf16Config = Field(Bf16Config(), description=_OFF)
    torch_autocast: TorchAutocastConfig = Field(TorchAutocastConfig(), description=_OFF)
    amp: AmpConfig = Field(AmpConfig(), description=_OFF)
    data_types: DataTypesConfig = Field(DataTypesConfig(), description='a mapping {"grad_accum_dtype": "fp32"}')
    communication_data_type: Dtype | None = Field(
        None,
        description='"fp32", "bf16" or "fp16"',
        json_schema_extra=differs("the dtype in which gradients accumulate by default"),
    )
    zero_optimization: Annotated[ZeroConfig, BeforeValidator(_read_zero, json_schema_input_type=ZeroConfig | bool)] = (
        Field(ZeroConfig(), description='a mapping {"stage": 0}')
    )
    zero_allow_untested_optimizer: bool = Field(False, description=_BOOL)
    activation_checkpointing: ActivationCheckpointingConfig = Field(
        ActivationCheckpointingConfig(), description='a mapping such as {"cpu_checkpointing": true}'
    )
    attention: AttentionConfig = Field(
        AttentionConfig(), description='a mapping such as {"backend": ["cudnn", "flash"]}'
    )
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description='a mapping such as {"keep_last": 3}')
    compile: CompileConfig = Field(CompileConfig(), description='a mapping {"enabled": false}')
    elastic: ElasticConfig = Field(ElasticConfig(), description='a mapping {"enabled": false}')
    kernels: KernelsConfig = Field(KernelsConfig(), description='a mapping such as {"all_reduce": true}')
    pipeline: PipelineConfig = Field(PipelineConfig(), description='a mapping such as {"stages": 2}')
    tensor_parallel: TensorParallelConfig = Field(TensorParallelConfig(), description='a mapping such as {"size": 2}')
    failures: FailuresConfig = Field(FailuresConfig(), description='a mapping such as {"timeout_s": 60}')
    run_record: RunRecordConfig = Field(RunRecordConfig(), description='a mapping such as {"directory": "runs/first"}')
    check_numerics: bool = Field(
        False,
        description="true or false: look for inf and NaN in what each layer returns, the loss and the gradients",
        json_schema_extra=OWN,
    )
    gc_freeze: bool = Field(
        True,
        description="true or false: on CUDA keep Python's garbage collector from what there is after the first steps, so that "
        "no rank pauses for it in the middle of one",
        json_schema_extra=OWN,
    )
    dataloader_drop_last: bool = Field(False, description=_BOOL)
    seed: NonNegative = Field(
        1234, description="a whole number >= 0, which fixes the order of the training data", json_schema_extra=OWN
    )
    rng: RngConfig = Field(RngConfig(), description='a mapping such as {"layout_independent": true}')
    steps_per_print: Positive | None = Field(10, description="a whole number of steps >= 1, or null to print nothing")
    wall_clock_breakdown: bool = Field(False, description=_BOOL)
    memory_breakdown: bool = Field(False, description=_BOOL)
    dump_state: bool = Field(False, description=_BOOL)

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
        sections = {
            "fp16": self.fp16.enabled,
            "bf16": self.bf16.enabled,
            "torch_autocast": self.torch_autocast.enabled,
            "amp": self.amp.enabled,
        }
        on = [name for name, enabled in sections.items() if enabled]
        # With bf16 or fp16 weights, torch_autocast still chooses the dtype of single operations.
        if len(on) > 1 and not ("torch_autocast" in on and "amp" not in on and len(on) == 2):
            raise ValueError(f"{' and '.join(on)} are enabled at once; set enabled to false in all of them but one")
        return self
