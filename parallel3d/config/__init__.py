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
    leaves_open,
)
from parallel3d.config.precision import Bf16Config, Fp8Config, Fp16Config
from parallel3d.config.schema import CheckpointConfig, Config, FailuresConfig, KernelsConfig
from parallel3d.config.zero import AioConfig, OffloadOptimizerConfig, OffloadParamConfig, ZeroConfig
