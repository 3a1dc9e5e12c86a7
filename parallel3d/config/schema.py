"""The whole configuration. A field's description says what to give, and completes the error of a wrong value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, model_validator

from parallel3d.config.known_keys import keys_of
from parallel3d.config.pipeline import PipelineConfig, TensorParallelConfig
from parallel3d.config.precision import AmpConfig, Bf16Config, DataTypesConfig, Fp16Config, TorchAutocastConfig
from parallel3d.config.section import Dtype, NonNegative, Positive, Section, key, own_key
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


_SAMPLES = "a whole number >= 1, or leave the key out to have it derived"


class Config(Section):
    """The whole configuration; the keys keep DeepSpeed's names."""

    known_keys = keys_of("top level")
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
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    fp16: Fp16Config = Fp16Config()
    bf16: Bf16Config = Bf16Config()
    torch_autocast: TorchAutocastConfig = TorchAutocastConfig()
    amp: AmpConfig = AmpConfig()
    data_types: DataTypesConfig = DataTypesConfig()
    communication_data_type: Dtype | None = key(
        None, '"fp32", "bf16" or "fp16"', differs="the dtype in which gradients accumulate by default"
    )
    zero_optimization: Annotated[ZeroConfig, BeforeValidator(_read_zero, json_schema_input_type=ZeroConfig | bool)] = (
        ZeroConfig()
    )
    zero_allow_untested_optimizer: bool = False
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
        "true or false: on CUDA keep Python's garbage collector from the objects that exist after the first steps, so that "
        "no rank pauses for it in the middle of one",
    )
    dataloader_drop_last: bool = False
    seed: NonNegative = own_key(1234, "a whole number >= 0, which fixes the order of the training data")
    rng: RngConfig = RngConfig()
    steps_per_print: Positive | None = key(10, "a whole number of steps >= 1, or null to print nothing")
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    dump_state: bool = False

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
        # With bf16 or fp16 weights, torch_autocast still chooses the dtype of single operations.
        if len(on) > 1 and not ("torch_autocast" in on and "amp" not in on and len(on) == 2):
            raise ValueError(f"{' and '.join(on)} are enabled at once; set enabled to false in all of them but one")
        return self
