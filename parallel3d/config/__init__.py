"""The typed, immutable configuration: DeepSpeed's keys from JSON, YAML or a dict, and batch-size arithmetic."""

from parallel3d.config.batch import BatchSizes, batch_sizes, resolve_batch
from parallel3d.config.layout import Layout, PartialLayout, parse_layout
from parallel3d.config.load import load, load_sections, read, read_source, without_removed
from parallel3d.config.pipeline import (
    SELECTIVE,
    ActivationCheckpointingConfig,
    PipelineConfig,
    RecomputationPolicy,
    SelectivePolicy,
    TensorParallelConfig,
    leaves_open,
)
from parallel3d.config.precision import (
    AmpConfig,
    Bf16Config,
    DataTypesConfig,
    Fp8Config,
    Fp16Config,
    TorchAutocastConfig,
)
from parallel3d.config.schema import (
    AttentionConfig,
    CheckpointConfig,
    CompileConfig,
    Config,
    FailuresConfig,
    KernelsConfig,
    OptimizerConfig,
    SchedulerConfig,
)
from parallel3d.config.zero import AioConfig, OffloadOptimizerConfig, OffloadParamConfig, ZeroConfig
