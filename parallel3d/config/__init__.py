"""The typed, immutable configuration: DeepSpeed's keys from JSON, YAML or a dict, and batch-size arithmetic."""

from parallel3d.config.batch import BatchSizes, resolve_batch
from parallel3d.config.load import load
from parallel3d.config.schema import ActivationCheckpointingConfig, Config, OptimizerConfig, PipelineConfig, ZeroConfig

__all__ = [
    "ActivationCheckpointingConfig",
    "BatchSizes",
    "Config",
    "OptimizerConfig",
    "PipelineConfig",
    "ZeroConfig",
    "load",
    "resolve_batch",
]
